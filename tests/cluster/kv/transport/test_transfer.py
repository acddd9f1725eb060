"""KV moves between two pools through real sockets and real shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import zmq
from local_ranks import CREDENTIALS, HOST, Context, wait_for
from msgspec.structs import replace

from cluster.kv import reads as kv_reads
from cluster.kv.handoff import KVHolder
from cluster.kv.transport import puller as puller_module
from cluster.kv.transport.puller import KVPuller
from cluster.kv.transport.server import KVServer, ProvedCall
from cluster.kv.transport.thread import KVThreadDied
from cluster.wire.group_messages import ReadEnded
from cluster.wire.messages import KVHandoff, KVRenew, KVSource, decode, encode
from cluster.wire.shared_memory import SharedMemory
from cluster.wire.sockets import Doorbell, node_id
from examples.bench.fault_injection import cut_connections
from model.kv_cache import KVCacheSpec

NUM_BLOCKS = 40
SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16)


@dataclass
class Pair:
    """A holder's and a reader's pool with what lies between them."""

    source: torch.Tensor
    target: torch.Tensor
    memory: SharedMemory
    server: KVServer
    puller: KVPuller
    lease_s: float

    def hold(self, *blocks: int) -> KVHandoff:
        generations = [7] * len(blocks)
        handoff_id = self.server.hold("r", list(blocks), generations)
        server, memory = self.server, self.memory
        where = KVSource(0, node_id(), memory.pid, memory.fd, server.address, server.process)
        num_tokens = len(blocks) * SPEC.block_size
        return KVHandoff(
            *(handoff_id, "r", [where], list(blocks), generations, num_tokens),
            *(SPEC.block_bytes, "kv", self.lease_s),
        )

    def start(self, handoff: KVHandoff, *dst_blocks: int, name: str = "r") -> None:
        """Start to read the first blocks of a handoff."""
        self.puller.expect(name, handoff)
        self.puller.start(name, handoff, list(range(len(dst_blocks))), list(dst_blocks))

    def read(self, handoff: KVHandoff, *dst_blocks: int) -> ReadEnded:
        self.start(handoff, *dst_blocks)
        return self.finished()

    def finished(self) -> ReadEnded:
        [result] = wait_for(self.puller.take_finished)
        return result


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(context: Context) -> Iterator[MakePair]:
    parts: list[KVServer | KVPuller] = []

    def make(transport: str, lease_s: float = 30.0, epoch: int = 1, host: str = HOST) -> Pair:
        memory = SharedMemory((NUM_BLOCKS + 1) * SPEC.block_bytes)
        source = SPEC.allocate(NUM_BLOCKS, torch.device("cpu"), storage=memory.view)
        source.copy_(torch.randn(source.shape))
        target = SPEC.allocate(NUM_BLOCKS, torch.device("cpu"))
        server = KVServer(
            KVHolder(lease_s, time.monotonic),
            source,
            host=host,
            credentials=CREDENTIALS,
            epoch=epoch,
            doorbell=Doorbell(),
        )
        puller = KVPuller(
            target,
            tp_rank=0,
            transport=transport,
            context=context,
            credentials=CREDENTIALS,
            doorbell=Doorbell(),
        )
        parts.extend((server, puller))
        return Pair(source, target, memory, server, puller, lease_s)

    yield make
    for part in parts:
        part.close()


@pytest.mark.parametrize(("transport", "host"), [("shm", HOST), ("tcp", HOST), ("tcp", "::1")])
def test_blocks_arrive_where_they_should_and_nowhere_else(
    make_pair: MakePair, transport: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_reads, "CHUNK_BYTES", 3 * SPEC.block_bytes)  # several chunks
    pair = make_pair(transport, host=host)
    handoff = decode(encode(pair.hold(5, 1, 40, 17, 18, 3, 9, 2)), KVHandoff)
    pair.puller.expect("r", handoff)
    pair.puller.start("r", handoff, [0, 2, 3, 5, 6, 7], [10, 40, 1, 2, 30, 31])
    assert pair.finished() == ReadEnded("r", "")
    wanted = torch.zeros_like(pair.target)
    wanted[[10, 40, 1, 2, 30, 31]] = pair.source[[5, 40, 17, 3, 9, 2]]
    assert torch.equal(pair.target, wanted)
    assert pair.puller.reads.bytes_received == pair.server.bytes_sent == 6 * SPEC.block_bytes
    assert pair.server.take_ended() == [handoff.handoff_id]
    assert pair.server.num_held == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_read_under_an_expired_lease_is_not_believed(make_pair: MakePair, transport: str) -> None:
    pair = make_pair(transport, lease_s=0.05)
    handoff = pair.hold(1, 2, 3)
    time.sleep(0.1)
    result = pair.read(handoff, 1, 2, 3)
    assert not result.ok and "lease" in result.error
    assert pair.puller.reads.bytes_received == pair.server.bytes_sent == 0
    assert pair.server.take_ended() == [handoff.handoff_id]


@pytest.mark.feature("P18")
def test_an_expected_handoff_outlives_its_lease_by_renewal(make_pair: MakePair) -> None:
    pair = make_pair("shm", lease_s=1.5)
    handoff = pair.hold(4)
    pair.puller.expect("r", handoff)
    time.sleep(2.5)
    pair.puller.start("r", handoff, [0], [4])
    assert pair.finished().ok


def test_a_handoff_ends_with_a_read_of_nothing_and_when_nothing_is_read(
    make_pair: MakePair,
) -> None:
    pair = make_pair("tcp")
    handoff = pair.hold(4)
    assert pair.read(handoff).ok
    assert pair.server.take_ended() == [handoff.handoff_id]
    cancelled = pair.hold(4)
    pair.puller.expect("r", cancelled)
    pair.puller.cancel("r")
    assert wait_for(pair.server.take_ended) == [cancelled.handoff_id]
    assert pair.puller.take_finished() == []
    assert pair.server.bytes_sent == 0


def test_a_thread_that_dies_is_heard_of_by_the_step(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("shm")

    def broken() -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(pair.puller.reads, "on_tick", broken)
    pair.puller.expect("r", pair.hold(1))
    with pytest.raises(KVThreadDied, match="kv puller thread ended: ZeroDivisionError: planted"):
        wait_for(pair.puller.take_finished)


def test_memory_that_may_not_be_opened_is_read_over_tcp(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That of another user on the same machine, for one."""

    def refused(pid: int, fd: int) -> memoryview:
        raise PermissionError(f"/proc/{pid}/fd/{fd}")

    monkeypatch.setattr(puller_module, "open_shared", refused)
    pair = make_pair("auto")
    for block in (4, 5):
        assert pair.read(pair.hold(block), block) == ReadEnded("r", "")
        assert torch.equal(pair.target[block], pair.source[block])
    assert caplog.text.count("not shm") == 1
    named = make_pair("shm")
    assert "/proc/" in named.read(named.hold(4), 4).error


HOLDER = """
import sys
from cluster.wire.shared_memory import SharedMemory
memory = SharedMemory(int(sys.argv[1]))
print(memory.fd, flush=True)
sys.stdin.read()
"""


def test_the_memory_of_a_dead_holder_is_let_go_of(make_pair: MakePair) -> None:
    """Mapped, all of its pool would stay in memory, and of every one that comes after it."""
    pair, other = make_pair("shm"), make_pair("shm")
    holders = pair.puller._transport._holders
    handoff = pair.hold(4)
    size = str((NUM_BLOCKS + 1) * SPEC.block_bytes)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, size], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        fd = int(holder.stdout.readline())
        dead = replace(handoff.sources[0], pid=holder.pid, shm_fd=fd)
        assert pair.read(replace(handoff, sources=[dead]), 1).ok
        assert list(holders) == [dead]
        holder.kill()
    living = other.hold(4)
    assert pair.read(living, 4).ok
    assert list(holders) == living.sources
    assert str(holder.pid) in pair.read(replace(pair.hold(4), sources=[dead]), 1).error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("unsealed", "wanted sealed memory"),
        ("regular", "Invalid argument"),
        ("pipe", "Invalid argument"),
        ("odd", "wanted blocks of"),
        ("short", "wanted blocks below"),
        ("none", "No such file"),
    ],
)
def test_a_handoff_that_names_other_memory_ends_its_read_alone(
    make_pair: MakePair, kind: str, error: str, tmp_path: Path
) -> None:
    """A file that shrinks under its reader would end the reader's process."""
    pair = make_pair("shm")
    handoff = pair.hold(4)
    fds = [-1]
    if kind == "unsealed":
        fds = [os.memfd_create("kv")]
        os.ftruncate(fds[0], 41 * SPEC.block_bytes)
    elif kind == "regular":
        (tmp_path / "file").write_bytes(b"x" * 41 * SPEC.block_bytes)
        fds = [os.open(tmp_path / "file", os.O_RDWR)]
    elif kind == "pipe":
        fds = list(os.pipe())
    elif kind in ("odd", "short"):
        memory = SharedMemory(2 * SPEC.block_bytes + (kind == "odd"))
        fds = [os.dup(memory.fd)]
    source = replace(handoff.sources[0], pid=os.getpid(), shm_fd=fds[0])
    result = pair.read(replace(handoff, sources=[source]), 4)
    assert not result.ok and error in result.error
    for fd in fds:
        if fd >= 0:
            os.close(fd)
    assert pair.read(pair.hold(5), 5).ok


def test_memory_that_peers_map_cannot_shrink() -> None:
    memory = SharedMemory(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 4096)


@pytest.fixture
def one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every server bind the same port, as after a restart that finds it free."""
    ports: list[int] = []

    def bind(socket: zmq.Socket[bytes], address: str) -> int:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.bind(f"{address}:{ports[0] if ports else '*'}")
            except zmq.ZMQError:  # the last one's end is on its way
                assert time.monotonic() < deadline
                time.sleep(0.01)
            else:
                ports[:] = [int(socket.last_endpoint.rpartition(b":")[2])]
                return ports[0]

    monkeypatch.setattr(zmq.Socket, "bind_to_random_port", bind)


@pytest.mark.usefixtures("one_port")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_handoff_of_a_dead_holder_is_refused_by_whoever_got_its_port(
    make_pair: MakePair, transport: str
) -> None:
    """Its numbers are those of a handoff that lives there: handoff 1, block 4, generation 7."""
    old = make_pair(transport, epoch=1)
    stale = old.hold(4)
    old.puller.expect("r", stale)
    old.server.close()
    new = make_pair(transport, epoch=2)
    new.hold(4)
    old.puller.start("r", stale, [0], [4])
    result = old.finished()
    assert not result.ok
    assert f"kv source {new.server.address}: the connection ended" in result.error
    assert (new.server.num_held, new.server.bytes_sent) == (1, 0)


@pytest.mark.usefixtures("one_port")
def test_the_memory_of_a_dead_holder_is_not_read_for_whoever_got_its_port(
    make_pair: MakePair,
) -> None:
    old = make_pair("shm", epoch=1)
    assert old.read(old.hold(4), 4).ok
    old.server.close()
    new = make_pair("shm", epoch=2)
    assert old.read(new.hold(4), 4).ok
    assert torch.equal(old.target[4], new.source[4])


@pytest.mark.feature("P17")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_connection_that_is_cut_ends_what_waits_on_it_and_the_next_read_makes_another(
    make_pair: MakePair, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(transport)
    assert pair.read(pair.hold(4), 4).ok
    answer, may_answer = pair.server._answer, threading.Event()

    def answer_late(proved: ProvedCall) -> None:
        may_answer.wait(60)
        answer(proved)

    monkeypatch.setattr(pair.server, "_answer", answer_late)
    later = pair.hold(7)
    pair.puller.expect("later", later)
    for block in (5, 6):
        pair.start(pair.hold(block), block, name=str(block))
    pulls = pair.puller.reads._pulls
    wait_for(lambda: len(pulls) == 3 and pulls["5"].awaited and pulls["6"].awaited)
    cut_connections(pair.server.address)
    ended: list[ReadEnded] = []
    wait_for(lambda: ended.extend(pair.puller.take_finished()) or len(ended) == 2)
    error = f"kv source {pair.server.address}: the connection ended"
    assert [each.error for each in ended] == [error, error]
    may_answer.set()
    pair.puller.start("later", later, [0], [7])
    assert pair.finished().ok
    assert torch.equal(pair.target[7], pair.source[7])


def test_a_holder_that_is_gone_keeps_no_reader_from_its_work(make_pair: MakePair) -> None:
    """Renewals to it pile up; those to others must leave all the same."""
    gone, pair = make_pair("tcp"), make_pair("tcp")
    stale = gone.hold(4)
    gone.server.close()
    pair.puller.expect("gone", stale)
    for _ in range(3000):
        pair.puller._post(lambda: pair.puller._transport.send(stale.sources[0], KVRenew(1)))
    assert pair.read(pair.hold(4), 4).ok


def test_a_holder_whose_answers_wait_for_others_to_be_written_is_not_silent(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to a GPU takes a while."""
    monkeypatch.setattr(kv_reads, "ANSWER_TIMEOUT_S", 2.0)
    near, late = make_pair("tcp"), make_pair("tcp")
    store, late_store = near.puller._transport.store, late.server._store
    scatter, gather = store.scatter, late_store.gather

    def slow_scatter(ids: list[int], blocks: list[memoryview]) -> None:
        time.sleep(0.15)
        scatter(ids, blocks)

    def late_gather(ids: list[int]) -> list[memoryview]:
        time.sleep(0.5)
        return gather(ids)

    monkeypatch.setattr(store, "scatter", slow_scatter)
    monkeypatch.setattr(late_store, "gather", late_gather)
    handoffs = {f"near {i}": near.hold(1 + i) for i in range(20)}
    handoffs["late"] = late.hold(30)
    for i, (name, handoff) in enumerate(handoffs.items()):
        near.start(handoff, 1 + i, name=name)
    # All answers of the near holder are there before the first of them is written.
    near.puller._post(lambda: time.sleep(0.2))
    results: dict[str, ReadEnded] = {}
    while len(results) < len(handoffs):
        found = wait_for(near.puller.take_finished)
        results |= {result.request_id: result for result in found}
    assert [result for result in results.values() if not result.ok] == []
    assert torch.equal(near.target[1:21], near.source[1:21])
    assert torch.equal(near.target[21], late.source[30])


def test_a_step_does_not_wait_for_the_copies_of_a_holder(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those from a GPU take a while."""
    pair = make_pair("tcp")
    store = pair.server._store
    gather, is_copying, may_end = store.gather, threading.Event(), threading.Event()

    def slow_gather(ids: list[int]) -> list[memoryview]:
        is_copying.set()
        assert may_end.wait(60)
        return gather(ids)

    monkeypatch.setattr(store, "gather", slow_gather)
    handoff = pair.hold(4)
    pair.start(handoff, 11)
    assert is_copying.wait(60)
    with ThreadPoolExecutor(1) as step:
        assert step.submit(pair.hold, 5).result(timeout=5).handoff_id == handoff.handoff_id + 1
        assert step.submit(pair.server.take_ended).result(timeout=5) == []
        may_end.set()
    assert pair.finished().ok
    assert torch.equal(pair.target[11], pair.source[4])


def test_a_call_that_overtakes_the_order_to_hold_waits_for_it(make_pair: MakePair) -> None:
    """A follower may hear of a handoff from its reader first."""
    pair = make_pair("tcp")
    ahead = replace(pair.hold(4), handoff_id=2)
    pair.start(ahead, 11)
    time.sleep(0.2)
    assert pair.puller.take_finished() == []
    assert pair.hold(4).handoff_id == ahead.handoff_id
    assert pair.finished().ok
    assert torch.equal(pair.target[11], pair.source[4])
