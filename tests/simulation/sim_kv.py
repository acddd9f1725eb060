"""KV between the simulated ranks of a prefill and a decode pool.

Real are the tickets and leases (`KVHolder`), the reads (`KVPulls`) and what makes one of all ranks'
slices (`GroupHolder`, `GroupReader`). Simulated are the two threads, their sockets and the memory.

Both threads run on while the rank steps. What they call runs in the loop, or later if the process
is stopped, and never once it is dead. The blocks of an answer are looked at when the reader writes
them: a ticket that ended meanwhile must not be believed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim_model import Cell

from cluster.kv.handoff import HandoffMetadata
from cluster.kv.reads import CHUNK_BYTES, max_chunk_blocks
from cluster.kv.transport.puller import KVPuller
from cluster.wire.group_messages import ReadEnded
from cluster.wire.messages import (
    KVAnswer,
    KVCall,
    KVRead,
    KVRelease,
    KVSource,
    RankProcess,
    decode,
    encode,
)

if TYPE_CHECKING:
    from sim_rank import SimRank

BLOCK_BYTES = CHUNK_BYTES // 2
"""Two blocks in one answer."""
LAYOUT = "simulated"
WAKE_S = 0.0001
"""Until a thread does what it was asked to."""

Block = list[Cell | None]


POOLS = ("mixed", "prefill", "decode")


def kv_address(pool: str, epoch: int, index: int) -> str:
    return f"tcp://10.{POOLS.index(pool)}.{epoch}.{index}:1"


def place_of(address: str) -> tuple[str, int, int]:
    _, pool, epoch, index = address.removeprefix("tcp://").removesuffix(":1").split(".")
    return POOLS[int(pool)], int(epoch), int(index)


def kv_source(pool: str, epoch: int, tp_rank: int, index: int) -> KVSource:
    address = kv_address(pool, epoch, index)
    return KVSource(tp_rank, "node", index, 0, address, RankProcess(epoch, address))


def handoff_terms(
    pool: str, epoch: int, dp_rank: int, tp_size: int, lease_s: float
) -> HandoffMetadata:
    sources = []
    for tp_rank in range(tp_size):
        sources.append(kv_source(pool, epoch, tp_rank, dp_rank * tp_size + tp_rank))
    return HandoffMetadata(sources, BLOCK_BYTES, LAYOUT, lease_s)


class SimServer:
    """The holder's thread, as `KVServer`."""

    def __init__(self, rank: SimRank, ring: Callable[[], None]) -> None:
        self._rank = rank
        self._loop = rank.group.loop
        self._ring = ring
        self._source = kv_source(rank.group.pool, rank.epoch, rank.tp_rank, rank.index)
        self._holder = rank.group.plants.kv_holder(rank.group.schedule.lease_s, self._loop.time)
        self._early: list[tuple[SimPuller, KVCall]] = []
        self._is_timed = False

    # --- the step thread's side -----------------------------------------------------------------

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        ticket: int = self._holder.hold(request_id, block_ids, generations)
        self._loop.after(WAKE_S, self._rank.process.call, self._wake)
        return ticket

    def drop(self, ticket: int) -> None:
        self._holder.drop(ticket)

    def take_ended(self) -> list[int]:
        ended: list[int] = self._holder.take_ended()
        return ended

    @property
    def num_held(self) -> int:
        num_held: int = self._holder.num_held
        return num_held

    # --- the thread -----------------------------------------------------------------------------

    def _wake(self) -> None:
        early, self._early = self._early, []
        for puller, call in early:
            self._take(puller, call)
        if self._holder.tick():
            self._ring()
        deadline = self._holder.next_deadline()
        if deadline is not None and not self._is_timed:
            self._is_timed = True
            at = max(deadline, self._loop.now + WAKE_S)
            self._loop.at(at, self._rank.process.call, self._on_deadline)

    def _on_deadline(self) -> None:
        self._is_timed = False
        self._wake()

    def on_call(self, puller: SimPuller, body: bytes) -> None:
        self._rank.group.on_transfer(self._rank)
        self._rank.process.call(self._take, puller, decode(body, KVCall))

    def _take(self, puller: SimPuller, call: KVCall) -> None:
        """Answer a call, or keep it until its ticket is held."""
        if call.ticket > self._holder.last_ticket:
            self._early.append((puller, call))
            return
        alive = self._holder.answer(call, max_chunk_blocks(BLOCK_BYTES))
        blocks: list[Block] = []
        if isinstance(call, KVRead) and alive:
            blocks = [self._rank.model.blocks[block] for block in call.block_ids]
        if isinstance(call, KVRelease):
            self._ring()
        answer = encode(KVAnswer(call.ticket, type(call).__name__, alive))
        puller.answer_from(self._source, answer, blocks)


class SimPuller(KVPuller):
    """The real reader, but for its thread; also the `ReadTransport` of its reads."""

    def __init__(self, rank: SimRank, ring: Callable[[], None]) -> None:
        group = rank.group
        self._rank, self._loop, self._world = rank, group.loop, group.world
        self._ring = ring
        self.address = kv_address(group.pool, rank.epoch, rank.index)
        self._todo: deque[Callable[[], None]] = deque()
        self._ended: list[ReadEnded] = []
        self._is_timed = False
        self.reads = group.plants.kv_pulls(
            self, tp_rank=rank.tp_rank, block_bytes=BLOCK_BYTES, clock=group.loop.time
        )

    def take_finished(self) -> list[ReadEnded]:
        ended, self._ended = self._ended, []
        return ended

    def _post(self, command: Callable[[], None]) -> None:
        self._todo.append(command)
        self._loop.after(WAKE_S, self._rank.process.call, self._wake)

    # --- the thread -----------------------------------------------------------------------------

    def _wake(self) -> None:
        while self._todo:
            self._todo.popleft()()
        self.reads.on_tick()
        if finished := self.reads.take_finished():
            self._ended += finished
            self._ring()
        deadline = self.reads.next_deadline()
        if deadline is not None and not self._is_timed:
            self._is_timed = True
            at = max(deadline, self._loop.now + WAKE_S)
            self._loop.at(at, self._rank.process.call, self._on_deadline)

    def _on_deadline(self) -> None:
        self._is_timed = False
        self._wake()

    def answer_from(self, source: KVSource, answer: bytes, blocks: list[Block]) -> None:
        """Put a holder's answer on its way. Called on the holder's thread."""
        call = self._rank.process.call
        sender = source.address
        self._world.send_kv(sender, self.address, call, self._take, source, answer, blocks)

    def _take(self, source: KVSource, answer: bytes, blocks: list[Block]) -> None:
        self.reads.on_answer(source, decode(answer, KVAnswer), blocks)
        self._wake()

    # --- what the reads need of the world ---------------------------------------------------------

    def send(self, source: KVSource, call: KVCall) -> None:
        self._rank.group.on_transfer(self._rank)
        server = self._world.rank_at(source.address).server
        assert server is not None, f"{source.address}: wanted a holder"
        self._world.send_kv(self.address, source.address, server.on_call, self, encode(call))

    def is_mapped(self, source: KVSource) -> bool:
        is_mapped: bool = self._world.schedule.is_mapped
        return is_mapped

    def copy(self, source: KVSource, source_ids: list[int], ids: list[int]) -> None:
        """Copy blocks of the source into blocks of ours; raises OSError where it is gone."""
        rank = self._world.rank_at(source.address)
        if rank.process.is_dead:
            raise OSError(f"process {source.pid}: wanted it alive, found it dead")
        self.write(ids, [rank.model.blocks[block] for block in source_ids])

    def write(self, ids: list[int], blocks: list[Any]) -> None:
        for block, cells in zip(ids, blocks, strict=True):
            self._rank.model.blocks[block][:] = cells

    def forget(self, source: KVSource) -> None:
        """Nothing is open."""
