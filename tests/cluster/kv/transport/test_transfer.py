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

import msgspec
import pytest
import torch
import zmq

from cluster.kv import reads as kv_reads
from cluster.kv.handoff import KVHolder, KVReadResult
from cluster.kv.transport import puller as puller_module
from cluster.kv.transport.memory import SharedMemory
from cluster.kv.transport.puller import KVPuller
from cluster.kv.transport.server import KVServer
from cluster.kv.transport.store import KVThreadDied
from cluster.wire.credentials import Credentials
from cluster.wire.messages import KVHandoff, KVRenew, KVSource
from cluster.wire.node import node_id
from cluster.wire.polling import Doorbell
from cluster.wire.sockets import end_context
from model.kv_cache import KVCacheSpec

SECRET = b"s" * 32
NUM_BLOCKS = 40
SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16)


@dataclass
class Pair:
    """A holder's and a reader's pool with what lies between them."""

    source: torch.Tensor
    target: torch.Tensor
    server: KVServer
    puller: KVPuller
    handoff: Callable[[list[int]], KVHandoff]

    def finished(self, timeout_s: float = 3.0) -> KVReadResult:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            results = self.puller.take_finished()
            if results:
                [result] = results
                return result
            time.sleep(0.002)
        raise AssertionError("no read finished")


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    parts: list[KVServer | KVPuller] = []

    def make(
        transport: str, lease_s: float = 30.0, reader_hash: str = "same", epoch: int = 1
    ) -> Pair:
        memory = SharedMemory((NUM_BLOCKS + 1) * SPEC.block_bytes)
        source = SPEC.allocate(NUM_BLOCKS, torch.device("cpu"), storage=memory.view)
        source.copy_(torch.randn(source.shape))
        target = SPEC.allocate(NUM_BLOCKS, torch.device("cpu"))
        server = KVServer(
            KVHolder(lease_s, time.monotonic),
            source,
            host="127.0.0.1",
            credentials=Credentials("same", SECRET),
            epoch=epoch,
            doorbell=Doorbell(),
        )
        puller = KVPuller(
            target,
            tp_rank=0,
            transport=transport,
            context=context,
            credentials=Credentials(reader_hash, SECRET),
            doorbell=Doorbell(),
        )
        parts.extend((server, puller))

        def handoff(blocks: list[int]) -> KVHandoff:
            ticket = server.hold("r", blocks, [7] * len(blocks))
            where = KVSource(0, node_id(), memory.pid, memory.fd, server.address, server.process)
            return KVHandoff(
                ticket=ticket,
                request_id="r",
                sources=[where],
                block_ids=blocks,
                generations=[7] * len(blocks),
                num_tokens=len(blocks) * 4,
                block_bytes=SPEC.block_bytes,
                layout=SPEC.layout,
                lease_s=lease_s,
            )

        return Pair(source, target, server, puller, handoff)

    yield make
    for part in parts:
        part.close()
    end_context(context, "test")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_blocks_arrive_where_they_should_and_nowhere_else(
    make_pair: Callable[..., Pair], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_reads, "CHUNK_BYTES", 3 * SPEC.block_bytes)  # several chunks
    pair = make_pair(transport)
    source_blocks = [5, 1, 40, 17, 18, 3, 9, 2]
    handoff = pair.handoff(source_blocks)
    pair.puller.expect("r", handoff)
    pair.puller.start("r", handoff, [0, 2, 3, 5, 6, 7], [10, 40, 1, 2, 30, 31])
    assert pair.finished() == KVReadResult("r", "")
    wanted = torch.zeros_like(pair.target)
    wanted[[10, 40, 1, 2, 30, 31]] = pair.source[[5, 40, 17, 3, 9, 2]]
    assert torch.equal(pair.target, wanted)
    assert pair.puller.bytes_received == pair.server.bytes_sent == 6 * SPEC.block_bytes
    assert pair.server.take_ended() == [handoff.ticket]
    assert pair.server.num_held == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_read_under_an_expired_lease_is_not_believed(
    make_pair: Callable[..., Pair], transport: str
) -> None:
    pair = make_pair(transport, lease_s=0.05)
    handoff = pair.handoff([1, 2, 3])
    time.sleep(0.1)
    pair.puller.expect("r", handoff)
    pair.puller.start("r", handoff, [0, 1, 2], [1, 2, 3])
    result = pair.finished()
    assert not result.ok
    assert "lease" in result.error
    assert pair.puller.bytes_received == pair.server.bytes_sent == 0
    assert pair.server.take_ended() == [handoff.ticket]


@pytest.mark.feature("P18")
def test_an_expected_ticket_outlives_its_lease_by_renewal(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("shm", lease_s=1.5)
    handoff = pair.handoff([4])
    pair.puller.expect("r", handoff)
    time.sleep(2.5)
    pair.puller.start("r", handoff, [0], [4])
    assert pair.finished().ok


def test_an_idle_holder_frees_an_abandoned_ticket(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("shm", lease_s=0.1)
    began = time.monotonic()
    handoff = pair.handoff([4])
    while pair.server.num_held and time.monotonic() < began + 5:
        time.sleep(0.01)
    assert time.monotonic() - began >= 0.1
    assert pair.server.take_ended() == [handoff.ticket]


def test_a_cancelled_expectation_releases_its_ticket(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("shm")
    handoff = pair.handoff([4])
    pair.puller.expect("r", handoff)
    pair.puller.cancel("r")
    deadline = time.monotonic() + 2
    while pair.server.num_held and time.monotonic() < deadline:
        time.sleep(0.002)
    assert pair.server.take_ended() == [handoff.ticket]
    assert pair.puller.take_finished() == []
    assert pair.server.bytes_sent == 0


def test_a_read_of_nothing_releases_the_ticket(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("tcp")
    handoff = pair.handoff([4])
    pair.puller.expect("r", handoff)
    pair.puller.start("r", handoff, [], [])
    assert pair.finished().ok
    assert pair.server.take_ended() == [handoff.ticket]


def test_a_block_with_another_generation_is_not_served(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("tcp")
    handoff = pair.handoff([4, 5])
    stale = KVHandoff(
        **{
            name: getattr(handoff, name)
            for name in handoff.__struct_fields__
            if name != "generations"
        },
        generations=[7, 6],
    )
    pair.puller.expect("r", stale)
    pair.puller.start("r", stale, [0, 1], [1, 2])
    assert not pair.finished().ok
    assert not pair.target.any()


def test_a_silent_holder_ends_in_an_error_that_names_it(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_reads, "ANSWER_TIMEOUT_S", 0.2)
    pair = make_pair("shm", reader_hash="another deployment")  # its frames are dropped
    handoff = pair.handoff([1])
    pair.puller.expect("r", handoff)
    pair.puller.start("r", handoff, [0], [1])
    result = pair.finished()
    assert not result.ok
    assert pair.server.address in result.error


def test_a_thread_that_dies_is_heard_of_by_the_step(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("shm")
    reads = pair.puller._pulls

    def broken() -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(reads, "on_tick", broken)
    pair.puller.expect("r", pair.handoff([1]))
    pair.puller._thread.join(timeout=3)
    with pytest.raises(KVThreadDied, match="kv puller thread ended: ZeroDivisionError: planted"):
        pair.puller.take_finished()


def test_a_holder_with_the_identity_of_a_dead_one_is_mapped_anew(
    make_pair: Callable[..., Pair],
) -> None:
    """Process ids and descriptors come again, and so do ports."""
    first, second = make_pair("shm"), make_pair("shm")
    for pair in (first, second):
        handoff = pair.handoff([4])
        first.puller.expect("r", handoff)
        first.puller.start("r", handoff, [0], [4])
        assert first.finished().ok
        assert torch.equal(first.target[4], pair.source[4])


def test_memory_that_may_not_be_opened_is_read_over_tcp(
    make_pair: Callable[..., Pair],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That of another user on the same machine, for one."""

    def refused(pid: int, fd: int) -> memoryview:
        raise PermissionError(f"/proc/{pid}/fd/{fd}")

    monkeypatch.setattr(puller_module, "open_shared", refused)
    pair = make_pair("auto")
    for block in (4, 5):
        handoff = pair.handoff([block])
        pair.puller.expect("r", handoff)
        pair.puller.start("r", handoff, [0], [block])
        assert pair.finished() == KVReadResult("r", "")
        assert torch.equal(pair.target[block], pair.source[block])
    assert caplog.text.count("not shm") == 1
    named = make_pair("shm")
    handoff = named.handoff([4])
    named.puller.expect("r", handoff)
    named.puller.start("r", handoff, [0], [4])
    assert "/proc/" in named.finished().error


HOLDER = """
import sys
from cluster.kv.transport.memory import SharedMemory
memory = SharedMemory(int(sys.argv[1]))
print(memory.fd, flush=True)
sys.stdin.read()
"""


def test_the_memory_of_a_dead_holder_is_let_go_of(make_pair: Callable[..., Pair]) -> None:
    """Mapped, all of its pool would stay in memory, and of every one that comes after it."""
    pair = make_pair("shm")
    transport = pair.puller._pulls._transport
    living = pair.handoff([4]).sources[0]
    size = str((NUM_BLOCKS + 1) * SPEC.block_bytes)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, size], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        fd = int(holder.stdout.readline())
        dead = msgspec.structs.replace(living, pid=holder.pid, shm_fd=fd)
        transport.copy(dead, [1], [1])
        assert list(transport._mapped) == [dead]
        holder.kill()
    transport.copy(living, [4], [4])
    assert list(transport._mapped) == [living]
    with pytest.raises(OSError, match=str(holder.pid)):
        transport.copy(dead, [1], [1])


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
def test_a_ticket_that_names_other_memory_ends_its_read_alone(
    make_pair: Callable[..., Pair], kind: str, error: str, tmp_path: Path
) -> None:
    """A file that shrinks under its reader would end the reader's process."""
    pair = make_pair("shm")
    handoff = pair.handoff([4])
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
    source = msgspec.structs.replace(handoff.sources[0], pid=os.getpid(), shm_fd=fds[0])
    wrong = msgspec.structs.replace(handoff, sources=[source])
    pair.puller.expect("r", wrong)
    pair.puller.start("r", wrong, [0], [4])
    result = pair.finished()
    assert not result.ok and error in result.error
    for fd in fds:
        if fd >= 0:
            os.close(fd)
    handoff = pair.handoff([5])
    pair.puller.expect("r", handoff)
    pair.puller.start("r", handoff, [0], [5])
    assert pair.finished().ok


def test_memory_that_peers_map_cannot_shrink() -> None:
    memory = SharedMemory(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 4096)


@pytest.fixture
def one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every server bind the same port, as after a restart that finds it free."""
    ports: list[int] = []

    def bind(socket: zmq.Socket[bytes], address: str) -> int:
        deadline = time.monotonic() + 5
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
def test_a_ticket_of_a_dead_holder_is_refused_by_whoever_got_its_port(
    make_pair: Callable[..., Pair], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are those of a ticket that lives there: ticket 1, block 4, generation 7."""
    monkeypatch.setattr(kv_reads, "ANSWER_TIMEOUT_S", 0.5)
    old = make_pair(transport, epoch=1)
    stale = old.handoff([4])
    old.puller.expect("r", stale)
    old.server.close()
    new = make_pair(transport, epoch=2)
    new.handoff([4])
    old.puller.start("r", stale, [0], [4])
    result = old.finished()
    assert not result.ok
    assert f"kv source {new.server.address}: no answer" in result.error
    assert (new.server.num_held, new.server.bytes_sent) == (1, 0)


@pytest.mark.usefixtures("one_port")
def test_the_memory_of_a_dead_holder_is_not_read_for_whoever_got_its_port(
    make_pair: Callable[..., Pair],
) -> None:
    old = make_pair("shm", epoch=1)
    handoff = old.handoff([4])
    old.puller.expect("r", handoff)
    old.puller.start("r", handoff, [0], [4])
    assert old.finished().ok
    old.server.close()
    new = make_pair("shm", epoch=2)
    handoff = new.handoff([4])
    old.puller.expect("r", handoff)
    old.puller.start("r", handoff, [0], [4])
    assert old.finished().ok
    assert torch.equal(old.target[4], new.source[4])


def test_a_holder_that_is_gone_keeps_no_reader_from_its_work(
    make_pair: Callable[..., Pair],
) -> None:
    """Renewals to it pile up; those to others must leave all the same."""
    gone, pair = make_pair("tcp"), make_pair("tcp")
    transport = pair.puller._pulls._transport
    stale = gone.handoff([4])
    gone.server.close()
    pair.puller.expect("gone", stale)
    for _ in range(3000):
        pair.puller._post(lambda: transport.send(stale.sources[0], KVRenew(1)))
    handoff = pair.handoff([4])
    pair.puller.expect("r", handoff)
    pair.puller.start("r", handoff, [0], [4])
    assert pair.finished().ok


def test_a_holder_whose_answers_wait_for_others_to_be_written_is_not_silent(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to a GPU takes a while."""
    monkeypatch.setattr(kv_reads, "ANSWER_TIMEOUT_S", 2.0)
    near, late = make_pair("tcp"), make_pair("tcp")
    puller, store, late_store = near.puller, near.puller._transport.store, late.server._store
    scatter, gather = store.scatter, late_store.gather

    def slow_scatter(ids: list[int], blocks: list[memoryview]) -> None:
        time.sleep(0.15)
        scatter(ids, blocks)

    def late_gather(ids: list[int]) -> list[memoryview]:
        time.sleep(0.5)
        return gather(ids)

    monkeypatch.setattr(store, "scatter", slow_scatter)
    monkeypatch.setattr(late_store, "gather", late_gather)
    handoffs = {f"near {i}": near.handoff([1 + i]) for i in range(20)}
    handoffs["late"] = late.handoff([30])
    for i, (name, handoff) in enumerate(handoffs.items()):
        puller.expect(name, handoff)
        puller.start(name, handoff, [0], [1 + i])
    # All answers of the near holder are there before the first of them is written.
    puller._post(lambda: time.sleep(0.2))
    results: dict[str, KVReadResult] = {}
    deadline = time.monotonic() + 30
    while len(results) < len(handoffs) and time.monotonic() < deadline:
        results |= {result.request_id: result for result in puller.take_finished()}
        time.sleep(0.01)
    assert [result for result in results.values() if not result.ok] == []
    assert len(results) == len(handoffs)
    assert torch.equal(near.target[1:21], near.source[1:21])
    assert torch.equal(near.target[21], late.source[30])


def test_a_step_does_not_wait_for_the_copies_of_a_holder(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those from a GPU take a while."""
    pair = make_pair("tcp")
    store = pair.server._store
    gather, is_copying, may_end = store.gather, threading.Event(), threading.Event()

    def slow_gather(ids: list[int]) -> list[memoryview]:
        is_copying.set()
        assert may_end.wait(10)
        return gather(ids)

    monkeypatch.setattr(store, "gather", slow_gather)
    handoff = pair.handoff([4])
    pair.puller.expect("r", handoff)
    pair.puller.start("r", handoff, [0], [11])
    assert is_copying.wait(5)
    with ThreadPoolExecutor(1) as step:
        assert step.submit(pair.handoff, [5]).result(timeout=5).ticket == handoff.ticket + 1
        assert step.submit(pair.server.take_ended).result(timeout=5) == []
        may_end.set()
    assert pair.finished().ok
    assert torch.equal(pair.target[11], pair.source[4])


def test_a_call_that_overtakes_the_order_to_hold_waits_for_it(
    make_pair: Callable[..., Pair],
) -> None:
    """A follower may hear of a ticket from its reader first."""
    pair = make_pair("tcp")
    pair.handoff([9])  # ticket 1
    early = pair.handoff([4])
    ahead = KVHandoff(
        **{name: getattr(early, name) for name in early.__struct_fields__ if name != "ticket"},
        ticket=early.ticket + 1,
    )
    pair.puller.expect("r", ahead)
    pair.puller.start("r", ahead, [0], [11])
    time.sleep(0.2)
    assert pair.puller.take_finished() == []
    assert pair.handoff([4]).ticket == ahead.ticket
    assert pair.finished().ok
    assert torch.equal(pair.target[11], pair.source[4])
