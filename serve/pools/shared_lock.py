"""The lock of all ingresses of an application: a `FairLock` in a small named actor.

It is made when a suspect first asks for it, so most applications never have one. If it ends with
the ingress that made it, the next one to ask makes another.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from cluster.actors.status_board import NAMESPACE
from serve.pools.quarantine import FairLock

ASK_TIMEOUT_S = 30.0
"""How long one asking may take, in which the actor may have to start."""


class ActorLock:
    def __init__(self, app_name: str, ingress_id: str) -> None:
        self._actor_name = f"quarantine:{app_name}"
        self._ingress_id = ingress_id
        self._actor: Any = None

    async def take(self) -> bool:
        try:
            if self._actor is None:
                # Ray is asked for the name and answers late while it is busy with dead ranks.
                self._actor = await asyncio.to_thread(self._found)
            call = self._actor.take.remote(self._ingress_id)
            return bool(await asyncio.wait_for(call, ASK_TIMEOUT_S))
        except TimeoutError:
            return True
        except (ValueError, ray.exceptions.RayError):
            self._actor = None
            return True

    def _found(self) -> Any:
        remote = ray.remote(num_cpus=0)(FairLock)
        options = {"name": self._actor_name, "namespace": NAMESPACE, "get_if_exists": True}
        return remote.options(**options).remote()

    def give_back(self) -> None:
        if self._actor is not None:
            self._actor.give_back.remote(self._ingress_id)
