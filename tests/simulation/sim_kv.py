"""KV between simulated ranks: every one of them lets others read, and reads.

Real are the handoffs and leases (`KVHolder`), the reads (`KVPulls`), the turns of their threads
(`KVServer`, `KVPuller`) and what makes one of all ranks' slices (`GroupHolder`, `GroupReader`).
Simulated are the threads themselves, their sockets and the memory.

Both threads run on while the rank steps. What they call runs in the loop, or later if the process
is stopped, and never once it is dead. The blocks of an answer are looked at when the reader writes
them: a handoff that ended meanwhile must not be believed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sim_ingress import RESET_S
from sim_loop import Violation
from sim_model import Cell

from cluster.kv.handoff import HandoffMetadata
from cluster.kv.reads import CHUNK_BYTES, max_chunk_blocks
from cluster.kv.transport.proofs import CallIds
from cluster.kv.transport.puller import KVPuller
from cluster.kv.transport.server import KVServer, ProvedCall
from cluster.wire.messages import KVAnswer, KVCall, KVSource, RankProcess, decode, encode

if TYPE_CHECKING:
    from sim_group import SimGroup
    from sim_rank import SimRank

BLOCK_BYTES = CHUNK_BYTES // 2
"""Two blocks in one answer."""
WAKE_S = 0.0001
"""Until a thread does what it was asked to."""
TOLD_SHARE = 0.5
"""Of what is lost: so often a reader is told that its connection ended, else it waits in vain."""

Block = list[Cell | None]


POOLS = ("mixed", "prefill", "decode")


def kv_address(group: SimGroup, index: int) -> str:
    return f"tcp://{POOLS.index(group.pool)}.{group.replica.number}.{group.epoch}.{index}:1"


def place_of(address: str) -> tuple[str, int, int, int]:
    """Return the pool, replica and epoch of a group, and the index of its rank."""
    pool, *place = map(int, address.removeprefix("tcp://").removesuffix(":1").split("."))
    replica, epoch, index = place
    return POOLS[pool], replica, epoch, index


def kv_source(group: SimGroup, tp_rank: int, index: int) -> KVSource:
    address = kv_address(group, index)
    return KVSource(tp_rank, "node", index, 0, address, RankProcess(group.epoch, address))


def handoff_terms(group: SimGroup, dp_rank: int) -> HandoffMetadata:
    sources = []
    for tp_rank in range(group.tp_size):
        sources.append(kv_source(group, tp_rank, dp_rank * group.tp_size + tp_rank))
    shape = group.replica.shape
    kv_hash = group.plants.hashes(shape.weights, shape.block_times).kv
    return HandoffMetadata(sources, BLOCK_BYTES, kv_hash, group.schedule.lease_s)


class SimThread:
    """Stands for a `KVThread`: its turns run in the loop, after a ring and at deadlines."""

    def __init__(
        self, rank: SimRank, turn: Callable[[], None], next_deadline: Callable[[], float | None]
    ) -> None:
        self.wake = self
        self._loop, self._call = rank.group.loop, rank.process.call
        self._turn, self._next_deadline = turn, next_deadline
        self._is_timed = False

    def ring(self) -> None:
        self._loop.after(WAKE_S, self._call, self.run)

    def run(self) -> None:
        self._turn()
        deadline = self._next_deadline()
        if deadline is not None and not self._is_timed:
            self._is_timed = True
            at = max(deadline, self._loop.now + WAKE_S)
            self._loop.at(at, self._call, self._on_deadline)

    def check(self) -> None:
        """It never dies by itself."""

    def _on_deadline(self) -> None:
        self._is_timed = False
        self.run()


class SimServer(KVServer):
    """The real server; it is its own socket, memory and proofs."""

    def __init__(self, rank: SimRank, ring: Callable[[], None]) -> None:
        self._rank = rank
        schedule, plants = rank.group.schedule, rank.group.plants
        self._source = kv_source(rank.group, rank.tp_rank, rank.index)
        self._holder = plants.kv_holder(schedule.lease_s, rank.group.loop.time)
        self._max_blocks = max_chunk_blocks(BLOCK_BYTES)
        self._lock = threading.Lock()
        self._early: list[Any] = []
        self._last_numbers: dict[int, int] = {}
        self.num_expired = 0
        self._socket: Any = self
        self._store: Any = self
        self._proofs: Any = self
        self._doorbell: Any = SimpleNamespace(ring=ring)
        self._thread: Any = SimThread(rank, self._turn, self._next_deadline)
        self._asked: dict[int, int] = {}
        """The blocks and generations of the handoff that the call under way is for."""

    def on_call(self, puller: SimPuller, call_id: bytes, body: bytes) -> None:
        self._rank.group.on_transfer(self._rank, puller._rank)
        self._rank.process.call(self._take, puller, call_id, body)

    def _take(self, puller: Any, call_id: bytes, body: bytes) -> None:
        self._early.append(ProvedCall(puller, call_id, b"", decode(body, KVCall)))
        self._answer_early()

    def _turn(self) -> None:
        self._answer_early()
        self._expire()

    def gather(self, ids: list[int]) -> list[Block]:
        return [self._rank.model.blocks[i] for i in ids]

    def of_answer(self, call_proof: bytes, answer: bytes) -> bytes:
        return b""

    def _answer(self, proved: ProvedCall) -> None:
        lease = self._holder._leases.get(proved.call.handoff_id)
        self._asked = lease.generations if lease is not None else {}
        super()._answer(proved)

    def send_multipart(self, parts: list[Any], *, copy: bool) -> None:
        puller, _, answer, _, *blocks = parts
        if decode(answer, KVAnswer).alive:
            self._check_held()
        puller.answer_from(self._source, answer, blocks)

    def _check_held(self) -> None:
        """Assert that the blocks of a handoff that has not ended here were not given to others."""
        rank = self._rank
        generations = rank.group.leaders[rank.dp_rank].scheduler.blocks.generations
        for block, generation in self._asked.items():
            if generations[block] != generation:
                rank.group.loop.fail(Violation("freed while held", f"{rank.name}: block {block}"))


class SimPuller(KVPuller):
    """The real reader; it is the `ReadTransport` of its reads."""

    def __init__(self, rank: SimRank, ring: Callable[[], None]) -> None:
        group = rank.group
        self._rank, self._world = rank, group.world
        self.address = kv_address(group, rank.index)
        self._ids = CallIds()
        self._answers: list[tuple[KVSource, KVAnswer, list[Any]]] = []
        self._lost: list[tuple[KVSource, str]] = []
        self._transport: Any = self
        self._commands, self._finished = SimpleQueue(), SimpleQueue()
        self._doorbell: Any = SimpleNamespace(ring=ring)
        self.reads = group.plants.kv_pulls(
            self, tp_rank=rank.tp_rank, block_bytes=BLOCK_BYTES, clock=group.loop.time
        )
        self._thread: Any = SimThread(rank, self._turn, self.reads.next_deadline)

    def answer_from(self, source: KVSource, answer: bytes, blocks: list[Block]) -> None:
        """Put a holder's answer on its way. Called on the holder's thread."""
        call = self._rank.process.call
        sender = source.address
        if not self._world.send_kv(sender, self.address, call, self._take, source, answer, blocks):
            self._notice(source)

    def _take(self, source: KVSource, answer: bytes, blocks: list[Block]) -> None:
        self._answers.append((source, decode(answer, KVAnswer), blocks))
        self._thread.run()

    # --- what the reads need of the world ---------------------------------------------------------

    def take_lost(self) -> list[tuple[KVSource, str]]:
        lost, self._lost = self._lost, []
        return lost

    def receive(self) -> list[tuple[KVSource, KVAnswer, list[Any]]]:
        answers, self._answers = self._answers, []
        return answers

    def send(self, source: KVSource, call: KVCall) -> None:
        holder = self._world.rank_at(source.address)
        self._rank.group.on_transfer(self._rank, holder)
        args = self, self._ids.next(), encode(call)
        if not self._world.send_kv(self.address, source.address, holder.server.on_call, *args):
            self._notice(source)

    def _notice(self, source: KVSource) -> None:
        """Something to or from a holder is lost: mostly with the connection, whose end is told."""
        rng, loop = self._world.rng, self._rank.group.loop
        if rng.random() < TOLD_SHARE:
            loop.after(RESET_S * rng.random(), self._rank.process.call, self._lose, source)

    def _lose(self, source: KVSource) -> None:
        self._lost.append((source, "the connection ended"))
        self._thread.run()

    def is_mapped(self, source: KVSource) -> bool:
        return self._world.schedule.is_mapped

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
