"""When a reader gives up on a holder, and when it does not."""

from __future__ import annotations

from collections import deque

from cluster.kv import reads as kv_reads
from cluster.kv.reads import KVPulls, max_chunk_blocks
from cluster.wire.messages import (
    KVAnswer,
    KVCall,
    KVHandoff,
    KVRead,
    KVRelease,
    KVRenew,
    KVSource,
    RankProcess,
    encode,
)
from cluster.wire.sockets import MAX_PART_BYTES

CHUNK_S = 0.1
"""What a chunk takes on its way: of 8 MB, a network of 80 MB/s."""
SOURCE = KVSource(0, "another", 1, -1, "tcp://holder", RankProcess(1, "holder"))


class SlowHolder:
    """A holder behind a network: chunks come one after the other, all else at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: deque[KVCall] = deque()
        self.forgotten: list[KVSource] = []
        self.reads = KVPulls(self, tp_rank=0, block_bytes=1 << 20, clock=lambda: self.now)

    def send(self, source: KVSource, call: KVCall) -> None:
        if not isinstance(call, KVRenew):
            self.calls.append(call)

    def is_mapped(self, source: KVSource) -> bool:
        return False

    def write(self, ids: list[int], blocks: list[memoryview]) -> None:
        assert len(ids) == len(blocks)

    def forget(self, source: KVSource) -> None:
        self.forgotten.append(source)

    def start(self, handoff_id: int, num_blocks: int) -> None:
        blocks = list(range(num_blocks))
        name = str(handoff_id)
        handoff = KVHandoff(
            handoff_id, name, [SOURCE], blocks, blocks, num_blocks, 1 << 20, "kv", 30.0
        )
        self.reads.expect(name, handoff)
        self.reads.start(name, blocks, blocks)

    def answer(self) -> None:
        call = self.calls.popleft()
        blocks = [memoryview(b"")] * len(call.block_ids) if isinstance(call, KVRead) else []
        self.now += CHUNK_S if blocks else 0
        self.reads.on_answer(SOURCE, KVAnswer(call.handoff_id, type(call).__name__, True), blocks)
        self.reads.on_tick()


def test_many_reads_at_once_wait_for_one_another_and_all_are_good() -> None:
    """80 reads of 3 chunks: each chunk waits 8 seconds for those of the others."""
    holder = SlowHolder()
    for handoff_id in range(80):
        holder.start(handoff_id, num_blocks=24)
    while holder.calls:
        holder.answer()
    results = holder.reads.take_finished()
    assert len(results) == 80 and all(result.ok for result in results)
    assert holder.now > 2 * kv_reads.ANSWER_TIMEOUT_S and not holder.forgotten


def test_a_holder_that_falls_silent_ends_all_its_reads_and_is_forgotten() -> None:
    holder = SlowHolder()
    for handoff_id in range(3):
        holder.start(handoff_id, num_blocks=24)
    for _ in range(4):
        holder.answer()
    deadline = holder.reads.next_deadline()
    assert deadline == holder.now + kv_reads.ANSWER_TIMEOUT_S
    holder.now = deadline - 0.01
    holder.reads.on_tick()
    assert not holder.reads.take_finished()
    holder.now = deadline
    holder.reads.on_tick()
    results = holder.reads.take_finished()
    assert [result.ok for result in results] == [False] * 3
    assert all("tcp://holder: no answer for 5 s" in result.error for result in results)
    assert set(holder.forgotten) == {SOURCE}


def test_answers_to_renewals_do_not_make_up_for_one_that_is_lost() -> None:
    holder = SlowHolder()
    holder.start(1, num_blocks=8)
    holder.calls.clear()
    while not (results := holder.reads.take_finished()):
        holder.now += 0.1
        holder.reads.on_answer(SOURCE, KVAnswer(1, KVRenew.__name__, True), [])
        holder.reads.on_tick()
        assert holder.now < 2 * kv_reads.ANSWER_TIMEOUT_S
    assert not results[0].ok and "no answer for 5 s" in results[0].error


def test_a_call_that_is_lost_ends_its_read_once_a_later_one_was_answered() -> None:
    holder = SlowHolder()
    holder.start(1, num_blocks=8)
    lost = holder.calls.popleft()
    assert isinstance(lost, KVRead)
    handoff_id = 2
    while not (results := [r for r in holder.reads.take_finished() if not r.ok]):
        holder.now += 0.01
        holder.start(handoff_id, num_blocks=8)
        handoff_id += 1
        holder.answer()
        holder.answer()
        assert holder.now < 2 * kv_reads.ANSWER_TIMEOUT_S
    [result] = results
    assert result.request_id == "1" and "no answer for 5 s" in result.error
    assert not holder.forgotten, "the others go on"
    assert not any(isinstance(call, KVRelease) and call.handoff_id == 1 for call in holder.calls)


def test_the_longest_call_fits_into_one_part_of_a_message() -> None:
    """A longer one would break the connection, and every read over it."""
    most = max_chunk_blocks(block_bytes=1)
    call = encode(KVRead(2**53, [2**31 - 1] * most, [2**53] * most))
    assert most == 4096 and len(call) <= MAX_PART_BYTES


def test_of_two_requests_with_one_handoff_the_second_ends_and_waits_for_nothing() -> None:
    """A waiting thread would have to make an integer of its deadline."""
    holder = SlowHolder()
    for name in ("first", "second"):
        handoff = KVHandoff(1, name, [SOURCE], [0], [0], 1, 1 << 20, "kv", 30.0)
        holder.reads.expect(name, handoff)
    assert holder.reads.next_deadline() == 10.0
    holder.reads.start("first", [0], [3])
    while holder.calls:
        holder.answer()
    assert holder.reads.next_deadline() is None
    holder.reads.start("second", [0], [3])
    first, second = holder.reads.take_finished()
    assert first.ok
    assert second.error == "kv handoff: wanted one for one request, found 1 for two"
