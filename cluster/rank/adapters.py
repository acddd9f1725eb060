"""Adapters that are loaded and unloaded while a rank serves.

The leader's step thread compares what the application wants with what the slots hold between two
steps (`GroupAdapters.advance`). It tells its followers what to read, and reads its own part like
them (`AdapterReads`): a little between two steps, since a whole adapter would hold streams up.

No step can see a slot change. A slot is given away when no sequence has its adapter, and none that
a step in flight computes had it: an overlapped leader has retired that step, and a follower retires
its own before it does what it is told. A request gets the adapter when all ranks have reported it,
so the steps that use it are planned after the last number was written; on a GPU they run behind
those copies, on the same stream.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from cluster.engine.adapters import AdapterSlots
from cluster.group.context import LoadedAdapters
from cluster.wire.group_messages import AdapterLoaded, LoadAdapter
from cluster.wire.messages import LoraAdapter
from compile.errors import FieldError

if TYPE_CHECKING:
    from model.adapters import ModelAdapters  # which imports torch

log = logging.getLogger("lockstep.adapters")

MAX_READ_S = 0.002
"""For reading between two steps, plus what the last layer takes: as long as a short step."""


class AdapterReader(Protocol):
    """What reads adapters into one rank's slots. Belongs to the step thread."""

    def start(self, order: LoadAdapter) -> None: ...

    def load_slice(self) -> None:
        """Read on for a while. Call it between two steps."""

    def take_ended(self) -> list[AdapterLoaded]:
        """Return the reads that ended since the last call."""


class AdapterReads:
    """An `AdapterReader` of a model's slots; one after the other, in the order of their start."""

    def __init__(self, slots: ModelAdapters, wake: Callable[[], None]) -> None:
        """`wake` wakes the step thread: there is more to read, or to take."""
        self._slots = slots
        self._wake = wake
        self._orders: deque[LoadAdapter] = deque()
        self._reading: Iterator[None] | None = None
        self._ended: list[AdapterLoaded] = []

    def start(self, order: LoadAdapter) -> None:
        self._orders.append(order)
        self._wake()

    def load_slice(self) -> None:
        if not self._orders:
            return
        order = self._orders[0]
        if self._reading is None:
            adapter = order.adapter
            self._reading = self._slots.reading(order.slot, adapter.path, adapter.fingerprint)
        end = time.monotonic() + MAX_READ_S
        try:
            has_more = True
            while has_more and time.monotonic() < end:
                has_more = next(self._reading, self) is not self
        except FieldError as error:
            self._end(str(error))
        else:
            if not has_more:
                self._end("")
        self._wake()

    def take_ended(self) -> list[AdapterLoaded]:
        ended, self._ended = self._ended, []
        return ended

    def _end(self, error: str) -> None:
        self._reading = None
        self._ended.append(AdapterLoaded(self._orders.popleft().adapter.id, error))


class GroupAdapters:
    """The adapters of a leader's group. `want` may be called on any thread, and `loaded` read;
    the rest belongs to the step thread."""

    def __init__(
        self,
        slots: AdapterSlots,
        reader: AdapterReader | None = None,
        tell: Callable[[LoadAdapter], None] | None = None,
    ) -> None:
        """`reader`: of the leader's own slices; `tell` has all followers read theirs. None: there
        is no slot to read into, or no follower."""
        self._slots = slots
        self._reader = reader
        self._tell = tell or (lambda order: None)
        self._told: Sequence[LoraAdapter] = ()
        self._known: Sequence[LoraAdapter] = ()
        self._is_settled = True
        self.loaded = LoadedAdapters()
        """Replaced, and never changed."""

    def want(self, adapters: Sequence[LoraAdapter]) -> None:
        """Say which adapters the application has, beside those that the engine started with."""
        self._told = tuple(adapters)

    def advance(self, is_used: Callable[[int], bool]) -> None:
        """Do what can be done now towards having what is wanted; call it between two steps.
        `is_used`: see `AdapterSlots.free_unused`."""
        if (told := self._told) is not self._known:
            self._known = told
            self._slots.want(told)
            self._publish()
            self._is_settled = False
        if self._is_settled or self._reader is None:
            return
        self._reader.load_slice()
        for report in self._reader.take_ended():
            self.on_loaded(0, report)
        for adapter in self._slots.free_unused(is_used):
            log.info("adapter %s (%d): unloaded", adapter.name, adapter.id)
            self._publish()
        if (order := self._slots.start_next()) is not None:
            self._tell(order)
            self._reader.start(order)
        self._is_settled = self._slots.is_settled

    def on_loaded(self, tp_rank: int, report: AdapterLoaded) -> None:
        """Take one rank's report; a `FrameError` if it was not asked for."""
        end = self._slots.on_loaded(tp_rank, report)
        if end is None:
            return
        adapter, error = end
        if error:
            log.warning("adapter %s (%d): not loaded: %s", adapter.name, adapter.id, error)
        else:
            log.info("adapter %s (%d): loaded", adapter.name, adapter.id)
        self._publish()

    def _publish(self) -> None:
        self.loaded = LoadedAdapters(self._slots.loaded_ids, self._slots.errors)
