"""KV handoff of a tensor-parallel group: every rank holds, and reads, its own slice.

A leader's scheduler speaks to one `HandoffHolder` and one `KVReader`. The ones here pass each order
on to the followers, which do the same with their slices, and put the answers together:

1. A handoff has the same number on all ranks. Its blocks may be freed when it has ended on all of
   them: a reader may still be copying from the rank whose lease runs longest.
2. A read has ended when no rank writes any more, and well if it ended well on all of them. Then
   every rank's lease was alive to the end, so that all slices may be believed.

A rank without followers is a group too. Nothing here does I/O: `tell` puts an order on the way,
reports come in through `on_handoffs_ended` and `on_read_ended`, and all of it happens on the step
thread. A report that was not asked for is a `FrameError`, which ends the group: the rank that sent
it has lost its way.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.kv.handoff import HandoffHolder, KVReader
from cluster.wire.group_messages import (
    CancelRead,
    DropKV,
    ExpectKV,
    HoldKV,
    KVOrder,
    ReadEnded,
    StartRead,
)
from cluster.wire.messages import FrameError, KVHandoff

Tell = Callable[[KVOrder], None]
"""Puts an order on its way to every follower, in order with the steps."""


class GroupHolder:
    """The handoffs of a prefill group.

    Invariant: a handoff comes out of `take_ended` once, after it has ended on every rank.
    """

    def __init__(self, local: HandoffHolder, num_followers: int, tell: Tell | None = None) -> None:
        self._local = local
        self._num_followers = num_followers
        self._tell = tell or (lambda order: None)
        self._num_alive: dict[int, int] = {}
        """By handoff: the ranks on which it has not ended."""
        self._ended: list[int] = []

    @property
    def num_held(self) -> int:
        return len(self._num_alive)

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        handoff_id = self._local.hold(request_id, block_ids, generations)
        self._num_alive[handoff_id] = 1 + self._num_followers
        self._tell(HoldKV(handoff_id, request_id, block_ids, generations))
        return handoff_id

    def drop(self, handoff_id: int) -> None:
        self._local.drop(handoff_id)
        self._tell(DropKV(handoff_id))

    def on_handoffs_ended(self, handoff_ids: list[int]) -> None:
        """Take one rank's report. Each reports a handoff once.

        Raises:
            FrameError: a handoff has ended on all ranks before, or was never held.
        """
        for handoff_id in handoff_ids:
            if handoff_id not in self._num_alive:
                raise FrameError(f"handoff: wanted one that is held, found the end of {handoff_id}")
            self._num_alive[handoff_id] -= 1
            if not self._num_alive[handoff_id]:
                del self._num_alive[handoff_id]
                self._ended.append(handoff_id)

    def take_ended(self) -> list[int]:
        self.on_handoffs_ended(self._local.take_ended())
        ended, self._ended = self._ended, []
        return ended


class GroupReader:
    """The reads of a decode group.

    Invariant: a started read comes out of `take_finished` once, after its last write on any rank.
    """

    def __init__(self, local: KVReader, num_followers: int, tell: Tell | None = None) -> None:
        self._local = local
        self._num_followers = num_followers
        self._tell = tell or (lambda order: None)
        self._num_reading: dict[str, int] = {}
        """By request: the ranks whose read has not ended."""
        self._errors: dict[str, str] = {}
        self._finished: list[ReadEnded] = []

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        self._local.expect(request_id, handoff)
        self._tell(ExpectKV(request_id, handoff))

    def start(
        self, request_id: str, handoff: KVHandoff, source_indices: list[int], dst_blocks: list[int]
    ) -> None:
        self._num_reading[request_id] = 1 + self._num_followers
        self._local.start(request_id, handoff, source_indices, dst_blocks)
        self._tell(StartRead(request_id, handoff, source_indices, dst_blocks))

    def cancel(self, request_id: str) -> None:
        self._local.cancel(request_id)
        self._tell(CancelRead(request_id))

    def on_read_ended(self, request_id: str, error: str) -> None:
        """Take one rank's report. Each reports a started read once.

        Raises:
            FrameError: the read has ended on all ranks before, or was never started.
        """
        if request_id not in self._num_reading:
            raise FrameError(f"read: wanted one that was started, found the end of {request_id!r}")
        if error:
            self._errors.setdefault(request_id, error)
        self._num_reading[request_id] -= 1
        if not self._num_reading[request_id]:
            del self._num_reading[request_id]
            error = self._errors.pop(request_id, "")
            self._finished.append(ReadEnded(request_id, error))

    def take_finished(self) -> list[ReadEnded]:
        for result in self._local.take_finished():
            self.on_read_ended(result.request_id, result.error)
        finished, self._finished = self._finished, []
        return finished
