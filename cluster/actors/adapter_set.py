"""`AdapterSets`: the LoRA adapters that an application has loaded while it serves.

It is what the status board wants all to have, and nothing here waits for anybody. An entry's life:

1. It is added under an id that no other one has or had. From now on replicas are told of it, and
   ingresses offer its name, at the next answer that each of them gets.
2. It is marked as leaving. Ingresses that hear of it offer its name no more; replicas keep it,
   because requests that run may still move among them.
3. It goes once every ingress that lives has heard of that, and none has a request with it.

What an ingress has heard is a *revision*: a number that each change counts up, and that its report
repeats. That it has asked again would not be enough: a request may come between what it reports and
the answer that it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

import msgspec

from cluster.wire.messages import FIRST_LOADED_ID, LoraAdapter
from compile.errors import FieldError, Words


def _new_id() -> str:
    return uuid4().hex


@dataclass(frozen=True)
class LoadCall:
    """An ingress's wish that all of its numerics load an adapter, if there are fewer than
    `max_loaded` yet. One whose answer is lost comes again, under the same id."""

    numerics_hash: str
    name: str
    path: str
    fingerprint: bytes
    max_loaded: int
    id: str = field(default_factory=_new_id)


@dataclass(frozen=True)
class UnloadCall:
    """The same, that none of them offer one any more."""

    numerics_hash: str
    name: str
    id: str = field(default_factory=_new_id)


class AdapterEntry(msgspec.Struct, frozen=True):
    adapter: LoraAdapter
    left_at: int | None = None
    """The revision since which it is leaving; None: it is offered."""
    changed_by: str = ""
    """The id of the call that added or marked it."""


class StoredAdapters(msgspec.Struct, frozen=True):
    """What outlives the board. Invariant: `next_id` and `revision` never fall."""

    next_id: int = FIRST_LOADED_ID
    revision: int = 0
    sets: dict[str, tuple[AdapterEntry, ...]] = {}
    """By the numerics hash of those that they are for, in the order in which they came."""


@dataclass(frozen=True)
class AdapterSet:
    """What those of one numerics hash have at a revision. Invariant: no two that are offered have
    one name; one that leaves may have that of another."""

    revision: int = 0
    offered: tuple[LoraAdapter, ...] = ()
    """Those that new requests may name."""
    leaving: tuple[LoraAdapter, ...] = ()
    """Those that only requests which run may have."""

    @property
    def of_engines(self) -> tuple[LoraAdapter, ...]:
        """Those that engines have to have."""
        return (*self.offered, *self.leaving)

    def named(self, name: str) -> LoraAdapter | None:
        return next((each for each in self.offered if each.name == name), None)


class AdapterUser(Protocol):
    """What an ingress reports of adapters (`IngressReport`)."""

    @property
    def numerics_hash(self) -> str: ...
    @property
    def adapters_revision(self) -> int | None: ...
    @property
    def used_adapters(self) -> frozenset[int]: ...


class AdapterSets:
    """The sets of all numerics hashes. Invariant: what it returns is what was saved before."""

    def __init__(
        self,
        stored: StoredAdapters | None = None,
        save: Callable[[StoredAdapters], None] = lambda stored: None,
    ) -> None:
        """Go on from what was stored; `save` takes each change."""
        self._stored = stored or StoredAdapters()
        self._save = save

    def of(self, numerics_hash: str) -> AdapterSet:
        entries = self._entries(numerics_hash)
        return AdapterSet(
            self._stored.revision,
            tuple(each.adapter for each in entries if each.left_at is None),
            tuple(each.adapter for each in entries if each.left_at is not None),
        )

    def add(self, call: LoadCall) -> AdapterSet:
        """Add one; a FieldError if its name is taken, or there are `max_loaded` already. One that
        is leaving has its place until it is gone. A call that comes again does nothing more."""
        found = self.of(call.numerics_hash)
        if self._has_done(call):
            return found
        if found.named(call.name) is not None:
            raise FieldError("lora_name", "a name that is free", call.name)
        if len(found.of_engines) >= call.max_loaded:
            leaving = f" ({len(found.leaving)} of them until its last request ends)"
            words = f"{len(found.of_engines)}{leaving if found.leaving else ''}"
            wanted = f"fewer than {call.max_loaded} that are loaded already (max_loras, those of "
            raise FieldError("lora_name", wanted + "lora_modules taken off)", Words(words))
        adapter = LoraAdapter(self._stored.next_id, call.name, call.path, call.fingerprint)
        entries = (*self._entries(call.numerics_hash), AdapterEntry(adapter, None, call.id))
        self._change(call.numerics_hash, entries, next_id=adapter.id + 1)
        return self.of(call.numerics_hash)

    def mark(self, call: UnloadCall) -> AdapterSet | None:
        """Let the one leave that is offered under a name; None if none is. A call that comes again
        does nothing more."""
        found = self.of(call.numerics_hash)
        if self._has_done(call):
            return found
        if (adapter := found.named(call.name)) is None:
            return None
        left_at = self._stored.revision + 1
        self._change(
            call.numerics_hash,
            tuple(
                AdapterEntry(each.adapter, left_at, call.id) if each.adapter is adapter else each
                for each in self._entries(call.numerics_hash)
            ),
        )
        return self.of(call.numerics_hash)

    def sweep(self, living: Iterable[AdapterUser]) -> None:
        """Forget what leaves and nobody needs. living: the last reports of all ingresses that
        live, whatever their numerics."""
        users = list(living)
        for numerics_hash in [*self._stored.sets]:
            entries = self._entries(numerics_hash)
            ours = [each for each in users if each.numerics_hash == numerics_hash]
            kept = tuple(each for each in entries if _is_needed(each, ours))
            if len(kept) < len(entries):
                self._change(numerics_hash, kept)

    def _entries(self, numerics_hash: str) -> tuple[AdapterEntry, ...]:
        return self._stored.sets.get(numerics_hash, ())

    def _has_done(self, call: LoadCall | UnloadCall) -> bool:
        return any(each.changed_by == call.id for each in self._entries(call.numerics_hash))

    def _change(
        self, numerics_hash: str, entries: tuple[AdapterEntry, ...], next_id: int | None = None
    ) -> None:
        sets = {**self._stored.sets, numerics_hash: entries}
        changed = StoredAdapters(
            self._stored.next_id if next_id is None else next_id,
            self._stored.revision + 1,
            {key: found for key, found in sets.items() if found},
        )
        self._save(changed)
        self._stored = changed


def _is_needed(entry: AdapterEntry, users: list[AdapterUser]) -> bool:
    left_at = entry.left_at
    if left_at is None:
        return True
    return any(
        # An ingress of a release without adapters has none to offer.
        (each.adapters_revision is not None and each.adapters_revision < left_at)
        or entry.adapter.id in each.used_adapters
        for each in users
    )
