"""`ServedModels`: what an ingress's requests may call the model, and which adapter that means.

The names of the model and of `lora_modules` are there from the start. Those of adapters that are
loaded while the application serves come and go with what the status board answers. A request finds
its adapter once, when it is admitted, and its slot has it until its end, so that engines keep it as
long (`Admission.used_adapters`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.actors.adapter_set import AdapterSet
from serve.config import ApiSettings


@dataclass(frozen=True)
class ServedModel:
    name: str
    """What answers call it."""
    adapter_id: int = 0
    """As in `GenerateRequest.adapter_id`; 0: none."""
    created: int = 0
    """When this ingress heard of it, in seconds since 1970."""


class ServedModels:
    """Belongs to the event loop of its ingress. Invariant: a name that was there from the start
    means what it meant then."""

    def __init__(self, settings: ApiSettings) -> None:
        self._created = int(time.time())
        self.base = ServedModel(settings.served_model_name, created=self._created)
        self._aliases = (settings.served_model_name, *settings.other_model_names)
        self._fixed = dict.fromkeys(self._aliases, self.base) | {
            name: ServedModel(name, place, self._created)
            for place, name in enumerate(settings.adapter_names, start=1)
        }
        self.by_name: Mapping[str, ServedModel] = self._fixed
        """Replaced, never changed: any thread may read it."""
        self.revision = 0
        """Of the `AdapterSet` that was seen last."""

    def is_fixed(self, name: str) -> bool:
        return name in self._fixed

    def is_alias(self, name: str) -> bool:
        """Return whether a name is one of the model's without an adapter."""
        return name in self._aliases

    def see(self, adapters: AdapterSet) -> None:
        """Take what the status board says; answers may come in any order."""
        if adapters.revision < self.revision:
            return
        known = {each.adapter_id: each for each in self.by_name.values()}
        self.revision = adapters.revision
        self.by_name = self._fixed | {
            each.name: known.get(each.id) or ServedModel(each.name, each.id, int(time.time()))
            for each in adapters.offered
            if each.name not in self._fixed
        }
