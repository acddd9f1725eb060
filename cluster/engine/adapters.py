"""Which LoRA adapter is in which slot of one engine's ranks.

1. `want` says which adapters the application has now, beside those that the engine started with.
2. `start_next` gives one of them a free slot, to be read by all ranks of the group: one at a time.
3. When each has said how that ended (`on_loaded`), requests may have the adapter, or the slot is
   free again and the error stands for as long as the adapter is wanted.
4. An adapter that is not wanted any more leaves its slot once no sequence has it (`free_unused`).

Requests name an adapter by its id, and so do the digests of blocks; ranks know slots alone. This
has no I/O, and takes no part in steps: an adapter changes no graph and no collective.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.wire.group_messages import AdapterLoaded, LoadAdapter
from cluster.wire.messages import FrameError, LoraAdapter


@dataclass
class _Read:
    """An adapter on its way into a slot. Invariant: `missing` is not empty."""

    order: LoadAdapter
    missing: set[int]
    """Tensor-parallel ranks that have not said how it ended."""
    errors: dict[int, str] = field(default_factory=dict)


class AdapterSlots:
    """The slots of one engine. Invariant: an adapter keeps its slot for as long as it is loaded,
    and no other one has it; those that the engine started with have the first ones for ever."""

    def __init__(self, num_static: int = 0, num_slots: int = 0, num_ranks: int = 1) -> None:
        """`num_static`: adapters that the engine starts with, whose ids are 1 to that."""
        self._num_static = num_static
        self._ranks = range(num_ranks)
        self._free = list(range(num_static, num_slots))
        self._wanted: dict[int, LoraAdapter] = {}
        self._loaded: dict[int, LoadAdapter] = {}
        self._read: _Read | None = None
        self._errors: dict[int, str] = {}

    @property
    def loaded_ids(self) -> frozenset[int]:
        """Those that were loaded since the engine started."""
        return frozenset(self._loaded)

    @property
    def errors(self) -> dict[int, str]:
        """Why wanted ones could not be read, with the rank, by their ids."""
        return self._errors.copy()

    def place(self, adapter_id: int) -> int | None:
        """Return what ranks are told of an adapter, one more than its slot, or 0 of none; None if
        it is not loaded here."""
        if 0 <= adapter_id <= self._num_static:
            return adapter_id
        order = self._loaded.get(adapter_id)
        return None if order is None else order.slot + 1

    def want(self, adapters: Iterable[LoraAdapter]) -> None:
        self._wanted = {adapter.id: adapter for adapter in adapters}
        self._errors = {
            adapter_id: self._errors[adapter_id]
            for adapter_id in self._errors
            if adapter_id in self._wanted
        }

    def free_unused(self, is_used: Callable[[int], bool]) -> list[LoraAdapter]:
        """Free the slots of those that are not wanted any more; return them. `is_used` says whether
        a sequence has an adapter, or a step in flight computes one that had it."""
        freed = [
            order
            for adapter_id, order in self._loaded.items()
            if adapter_id not in self._wanted and not is_used(adapter_id)
        ]
        for order in freed:
            del self._loaded[order.adapter.id]
            heapq.heappush(self._free, order.slot)
        return [order.adapter for order in freed]

    def start_next(self) -> LoadAdapter | None:
        """Return what all ranks are to read now, if there is anything."""
        if self._read is not None or not self._free or (adapter := self._waiting()) is None:
            return None
        order = LoadAdapter(heapq.heappop(self._free), adapter)
        self._read = _Read(order, set(self._ranks))
        return order

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be done until others are wanted."""
        is_kept = self._loaded.keys() <= self._wanted.keys()
        return self._read is None and is_kept and not (self._free and self._waiting())

    def on_loaded(self, tp_rank: int, report: AdapterLoaded) -> tuple[LoraAdapter, str] | None:
        """Take one rank's report; return how the read has ended once all have reported: the error
        is that of the first rank that could not, and empty if all could. A `FrameError` if the
        report was not asked for."""
        read = self._read
        if read is None or read.order.adapter.id != report.id or tp_rank not in read.missing:
            raise FrameError(f"adapter: wanted one that is being read, found {report.id}")
        read.missing.remove(tp_rank)
        if report.error:
            read.errors[tp_rank] = report.error
        if read.missing:
            return None
        self._read = None
        if not read.errors:
            self._loaded[report.id] = read.order
            return read.order.adapter, ""
        heapq.heappush(self._free, read.order.slot)
        first = min(read.errors)
        error = f"tp={first}: {read.errors[first]}"
        if report.id in self._wanted:
            self._errors[report.id] = error
        return read.order.adapter, error

    def _waiting(self) -> LoraAdapter | None:
        """Return the first that is wanted and has no slot, nor an error."""
        waiting = (
            adapter
            for adapter_id, adapter in self._wanted.items()
            if adapter_id not in self._loaded and adapter_id not in self._errors
        )
        return next(waiting, None)
