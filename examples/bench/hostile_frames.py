"""Frames of strangers, and absurd ones of processes with the secret, against internal sockets.

    python examples/bench/hostile_frames.py [--seconds 4] [--only NAME,...] [--out FILE]

Three processes are attacked in turn: a leader that decodes for honest requests without a break (its
inbox), a leader of a prefill pool (its KV server as well), and an ingress to which an honest engine
delivers every five milliseconds, and which connects again and again to another leader's port, where
the attacker is. An attacker's process sends as much as it can. `nothing` is the process left alone;
`busy` is an attacker that only computes and sends nothing: on two cores that alone takes time from
the process. Printed are, by attack:

    sent      frames or connections, in thousands
    delay     the longest that a step took, or the ingress's loop, above the median of
              `nothing`, in milliseconds
    cpu       the same in the thread's own processor time, without waiting
    rate      steps or deliveries in a second, as a share of those of `nothing`
    memory    MiB that the process grew by
    verdict   a process that ended, an answer that was not the same, a delay of 20 ms (of the
              ingress's loop 100 ms) beyond that of `busy`, or growth above 128 MiB

The exit code is 1 if a row fails.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import multiprocessing
import os
import platform
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.actors.reports import LeaderReport
from cluster.config import CacheConfig, EngineConfig, Role, SchedulerConfig
from cluster.group.context import RankContext
from cluster.observe.load_progress import keep_what_is_loaded
from cluster.rank.leader import Inbox, Leader
from cluster.rank.output_sender import OutputSender
from cluster.wire.credentials import Credentials, Hashes
from cluster.wire.messages import (
    MAX_ABORTS,
    Abort,
    EngineOutput,
    FinishReason,
    GenerateRequest,
    Hello,
    KVHandoff,
    KVSource,
    LogitRules,
    OutputFrame,
    RankProcess,
    Sampling,
    Submit,
    decode,
    encode,
)
from cluster.wire.sockets import (
    CurveHandshake,
    connecting_socket,
    join,
    listening_socket,
    pack,
    split,
)
from compile.config import CompilationConfig, CUDAGraphMode
from serve.event_loop import StreamBatcher
from serve.pools.chooser import Routing
from serve.pools.directory import Directory
from serve.pools.leader_load import Stage
from serve.pools.links import LeaderLinks
from serve.pools.mailbox import Mailbox

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
CREDENTIALS = Credentials("bench", b"of a benchmark, no secret at all")
OURS, OTHERS = (
    CurveHandshake(CREDENTIALS.secret),
    CurveHandshake(b"of somebody else, thirty-two byt"),
)

MAX_DELAYS_S = {"inbox": 0.020, "kv server": 0.020, "ingress": 0.100}
MAX_GROWTH_BYTES = 128 << 20
"""A sender may have 64 frames in the inbox, each as long as a submission may be."""
MIB = 1 << 20
DELIVERY_PERIOD_S = 0.005
REPORT_PERIOD_S = 0.25
NUM_HONEST = 4
"""Requests that are always under way."""
PROMPT = [5, 99, 7, 31, 64]
TIMEOUT_S = 60.0

NOWHERE = "tcp://127.0.0.1:9"
spawn = multiprocessing.get_context("spawn")


class Turn(NamedTuple):
    """One turn of what is watched: a step of a leader, or a round of a loop."""

    seconds: float
    cpu_s: float


class Measured(msgspec.Struct):
    """A row of the table."""

    target: str
    name: str
    num_sent: int
    delay_s: float
    cpu_delay_s: float
    rate: float
    growth_bytes: int
    failures: list[str]


class Report(msgspec.Struct):
    """All rows of a run."""

    machine: str
    seconds: float
    rows: list[Measured]


# --- what is attacked -----------------------------------------------------------------------------


def serve_leader(pipe: Connection, role: str) -> None:
    """Run a leader on the bundled model; tell its addresses, then its turns whenever asked."""
    config = EngineConfig(
        model_path=str(ROOT / "examples" / "tiny"),
        max_model_len=512,
        role=Role(role),
        threads=1,
        cache=CacheConfig(block_size=16, num_kv_blocks=512),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
        compilation=CompilationConfig(level=0, cudagraph_mode=CUDAGraphMode.NONE),
    )
    leader = Leader(RankContext(config, credentials=CREDENTIALS, engine_id="e"))
    turns: list[Turn] = []
    step = leader.step

    def timed() -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        step()
        turns.append(Turn(time.perf_counter() - began, time.thread_time() - cpu))

    leader.step = timed  # type: ignore[method-assign]
    server = leader.transfer.server
    addresses = [leader.inbox] if server is None else [server.address, leader.inbox]
    threading.Thread(target=_tell_turns, args=(pipe, addresses, turns), daemon=True).start()
    keep_what_is_loaded()
    leader.run()


def serve_ingress(pipe: Connection, honest: str, hostile: str) -> None:
    """Run an ingress that has a request at the honest leader, and connects to the hostile one
    whenever that is not connected, as the status board would have it."""
    asyncio.run(_receive_tokens(pipe, honest, hostile))


async def _receive_tokens(pipe: Connection, honest: str, hostile: str) -> None:
    links = LeaderLinks(CREDENTIALS)
    routings = dict.fromkeys(("honest", "hostile"), Routing.LEAST_REQUESTS)
    directory = Directory(routings, links.connect, numerics_hash="bench", max_wait_s=TIMEOUT_S)
    reports = [
        LeaderReport(pool, "r", 0, 0, "ready", inbox, Hashes("bench"), "")
        for pool, inbox in (("honest", honest), ("hostile", hostile))
    ]

    async def poll() -> None:
        while True:
            directory.see(reports)
            await asyncio.sleep(REPORT_PERIOD_S)

    polling = asyncio.create_task(poll())
    mailbox = Mailbox("honest", StreamBatcher())
    stage = Stage(request("honest"), None, 16)
    (await directory.choose("honest", stage)).leader.submit(stage, mailbox)
    turns: list[Turn] = []
    threading.Thread(target=_tell_turns, args=(pipe, [hostile], turns), daemon=True).start()
    keep_what_is_loaded()
    began, cpu = time.perf_counter(), time.thread_time()
    while not polling.done():
        # A turn of the loop is a delivery: what an honest client would wait for its next token.
        await mailbox.get()
        now, cpu_now = time.perf_counter(), time.thread_time()
        turns.append(Turn(now - began, cpu_now - cpu))
        began, cpu = now, cpu_now


def _tell_turns(pipe: Connection, addresses: list[str], turns: list[Turn]) -> None:
    pipe.send(addresses)
    while True:
        pipe.recv()
        taken = turns[:]
        del turns[: len(taken)]
        pipe.send(taken)


class Target:
    """A process that listens, and how to ask it for its turns since the last time."""

    def __init__(self, serve: Callable[..., None], *args: object) -> None:
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, *args), daemon=True)
        self._process.start()
        if not self._pipe.poll(TIMEOUT_S):
            raise SystemExit(f"{serve.__name__}: wanted it to listen, found nothing")
        self.addresses: list[str] = self._pipe.recv()
        self._memory = psutil.Process(self._process.pid)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def turns(self) -> list[Turn]:
        """Return what was done since the last call; empty where the process is gone."""
        with suppress(OSError, EOFError):
            self._pipe.send(None)
            if self._pipe.poll(TIMEOUT_S):
                taken: list[Turn] = self._pipe.recv()
                return taken
        return []

    def rss_bytes(self) -> int:
        """Return the memory of the process; 0 where it is gone."""
        with suppress(psutil.Error):
            return int(self._memory.memory_info().rss)
        return 0

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


# --- honest work ----------------------------------------------------------------------------------


class Honest:
    """Keeps so many requests under way at a leader and compares their tokens."""

    def __init__(self, inbox: str, max_tokens: int) -> None:
        self.num_wrong = 0
        self._wanted: list[int] | None = None
        self._max_tokens = max_tokens
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._leader = connecting_socket(self._context, zmq.DEALER, OURS, max_waiting=1000)
        self._leader.connect(inbox)
        self._ids = itertools.count()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _ask(self) -> str:
        name = f"honest {next(self._ids)}"
        body = encode(Submit(request(name, max_tokens=self._max_tokens), None))
        self._leader.send_multipart(pack(body, CREDENTIALS))
        return name

    def _run(self) -> None:
        tokens: dict[str, list[int]] = {self._ask(): [] for _ in range(NUM_HONEST)}
        while not self._is_over.is_set():
            if not self._leader.poll(100):
                continue
            frame = join(self._leader.recv_multipart(), 1 << 24)
            for data in decode(frame, OutputFrame).outputs:
                output = decode(data, EngineOutput)
                if output.request_id not in tokens:
                    continue
                tokens[output.request_id] += output.token_ids
                if output.finish_reason:
                    self._judge(tokens.pop(output.request_id), output)
                    tokens[self._ask()] = []

    def _judge(self, found: list[int], output: EngineOutput) -> None:
        if self._wanted is None:
            self._wanted = found
        self.num_wrong += found != self._wanted or output.finish_reason != "length"

    def end(self) -> None:
        """Ask for nothing more."""
        self._is_over.set()
        self._thread.join()
        self._context.destroy(linger=0)


class Deliveries:
    """An honest engine that delivers a token every few milliseconds."""

    num_wrong = 0

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        config = EngineConfig("", max_model_len=512)
        rank = RankContext(config, host=HOST, credentials=CREDENTIALS, engine_id="honest/r/0")
        self._inbox = Inbox(rank, self._context, vocab_size=512)
        self.address = self._inbox.address
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        sender = OutputSender(self._inbox.socket)
        while not self._is_over.wait(DELIVERY_PERIOD_S):
            for peer, message in self._inbox.take():
                if isinstance(message, Submit):
                    sender.expect(message.request.request_id, peer)
            sender.send([output("honest")])

    def end(self) -> None:
        """Deliver nothing more."""
        self._is_over.set()
        self._thread.join()
        self._context.destroy(linger=0)


def request(name: str, max_tokens: int = 6, **fields: Any) -> GenerateRequest:
    """Return a greedy request that ends with so many tokens."""
    sampling = Sampling(0.0, 0, 1.0, 0.0, 7, max_tokens, (), -1, -1, None, None)
    return GenerateRequest(name, PROMPT, [], msgspec.structs.replace(sampling, **fields), b"")


def output(request_id: str) -> EngineOutput:
    """Return an output with one token."""
    ended = EngineOutput.ended(request_id, FinishReason.NONE)
    return msgspec.structs.replace(ended, token_ids=[5])


# --- attacks --------------------------------------------------------------------------------------

Send = Callable[[str], Iterator[int]]
"""Attacks an address; yields how many frames or connections each round was."""


def busy(address: str) -> Iterator[int]:
    """Compute and send nothing."""
    while True:
        sum(range(10_000))
        yield 0


def _dial(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").partition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def knocks(address: str) -> Iterator[int]:
    """Connect and hang up."""
    while True:
        _dial(address).close()
        yield 1


def _greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def said(data: bytes, num_held: int = 0) -> Send:
    """Say something on many connections, of which so many stay open."""

    def send(address: str) -> Iterator[int]:
        held: list[socket.socket] = []
        while True:
            end = _dial(address)
            with suppress(OSError):
                end.sendall(data)
            held.append(end)
            if len(held) > num_held:
                held.pop(0).close()
            yield 1

    return send


def stranger(handshake: CurveHandshake | None) -> Send:
    """Send two-byte frames with ZeroMQ, unlocked or with another secret, on 20 sockets."""

    def send(address: str) -> Iterator[int]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        while True:
            sockets = [context.socket(zmq.DEALER) for _ in range(20)]
            for made in sockets:
                made.linger = 0
                if handshake is not None:
                    handshake.offer(made)
                made.connect(address)
                for _ in range(50):
                    with suppress(zmq.Again):
                        made.send(b"xy", zmq.NOBLOCK)
            time.sleep(0.05)
            for made in sockets:
                made.close()
            yield 1000

    return send


def member(*bodies: Callable[[int], bytes], is_packed: bool = True) -> Send:
    """Send frames as a process that has the secret."""

    def send(address: str) -> Iterator[int]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        made = connecting_socket(context, zmq.DEALER, OURS, max_waiting=1000)
        made.linger = 0
        made.connect(address)
        for i in itertools.count():
            for body in bodies:
                frame = body(i)
                made.send_multipart(pack(frame, CREDENTIALS) if is_packed else [frame])
            yield len(bodies)

    return send


@functools.cache
def endless_submit(_: int) -> bytes:
    """Return a submission of a prompt as long as a frame may be."""
    asked = request("long")
    return encode(Submit(msgspec.structs.replace(asked, prompt_token_ids=[300] * 84_000), None))


@functools.cache
def wide_rules(_: int) -> bytes:
    """Return a submission with as many rules as one may have."""
    ids = tuple(range(1024))
    rules = LogitRules(1.0, 1.0, 2.0, ids, tuple(1.0 for _ in ids), b"\xff" * (200 << 10), 5)
    return encode(Submit(request("rules", rules=rules), None))


def bad_seed(i: int) -> bytes:
    """Return a submission that no engine takes."""
    return encode(Submit(request(f"bad {i}", seed=-1), None))


def no_model_takes(i: int) -> bytes:
    """Return a submission that this engine does not take."""
    asked = msgspec.structs.replace(request(f"{i}"), prompt_token_ids=[2**30])
    return encode(Submit(asked, None))


def nobodys_handoff(i: int) -> bytes:
    """Return a submission with a handoff of nobody."""
    source = KVSource(0, "n", 1, 1, NOWHERE, RankProcess(0, "nonce"))
    handoff = KVHandoff(3, f"{i}", [source], [1], [1], 5, 4096, "kv", 30.0)
    return encode(Submit(request(f"{i}"), handoff))


def aborted(i: int) -> bytes:
    """Return, in turn, a good submission and its abort."""
    name = f"short {i // 2}"
    return encode(Abort([name]) if i % 2 else Submit(request(name), None))


def anothers_hello(i: int) -> bytes:
    """Return a hello to another engine."""
    return encode(Hello(f"another {i}", 0))


def come_and_go(address: str) -> Iterator[int]:
    """Submit from 20 ingresses that are gone before the first token."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for i in itertools.count():
        sockets = [connecting_socket(context, zmq.DEALER, OURS, max_waiting=9) for _ in range(20)]
        for number, made in enumerate(sockets):
            made.linger = 50
            made.connect(address)
            body = encode(Submit(request(f"gone {i} {number}", max_tokens=400), None))
            made.send_multipart(pack(body, CREDENTIALS))
        time.sleep(0.05)
        for made in sockets:
            made.close()
        yield len(sockets)


@functools.cache
def many_aborts(_: int) -> bytes:
    """Return as many aborts as a frame may hold."""
    return encode(Abort([f"nobody {i}" for i in range(MAX_ABORTS)]))


STRANGERS: dict[str, Send] = {
    "knocks": knocks,
    "noise": said(os.urandom(4096)),
    "half a handshake": said(_greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + bytes(194)),
    "PLAIN, wrong password": said(_greeting(b"PLAIN") + b"\x04\x0e\x05HELLO\x03abc\x03def"),
    "2 GiB announced": said(
        _greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 2 << 30) + bytes(1 << 16)
    ),
    "800 that say nothing": said(b"", num_held=800),
    "800 that greet": said(_greeting(b"CURVE"), num_held=800),
    "no lock": stranger(None),
    "another secret": stranger(OTHERS),
}

NONSENSE: dict[str, Send] = {
    "two bytes": member(lambda _: b"xy", is_packed=False),
    "noise in a frame": member(lambda _: b"\xc1" * 100),
    "64 KiB of noise": member(lambda _: bytes(1 << 16)),
}

TO_LEADERS: dict[str, Send] = {
    "a bad seed": member(bad_seed),
    "tokens of no model": member(no_model_takes),
    "handoffs of nobody": member(nobodys_handoff),
    "84,000 tokens": member(endless_submit),
    "all rules": member(wide_rules),
    "aborts of nobody": member(many_aborts),
    "submit and abort": member(aborted),
    "hellos to another": member(anothers_hello),
    "come and go": come_and_go,
}


def listens(data: bytes) -> Send:
    """Say something to whoever connects; the last hundred stay connected."""

    def send(address: str) -> Iterator[int]:
        host, _, port = address.removeprefix("tcp://").partition(":")
        held: list[socket.socket] = []
        with socket.create_server((host, int(port))) as server:
            server.settimeout(0.1)
            while True:
                with suppress(OSError):
                    end, _ = server.accept()
                    held.append(end)
                    end.sendall(data)
                if len(held) > 100:
                    held.pop(0).close()
                yield 1

    return send


def leads(body: bytes) -> Send:
    """Send a frame to an ingress that connects, as often as it is taken."""

    def send(address: str) -> Iterator[int]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        made = listening_socket(context, zmq.ROUTER, OURS, max_waiting=1000)
        made.router_mandatory = True
        made.linger = 0
        made.bind(address)
        peers: list[bytes] = []
        while True:
            while made.poll(0 if peers else 100):
                peers = [made.recv_multipart()[0]]
            for peer in list(peers):
                try:
                    made.send_multipart((peer, *split(body)), zmq.NOBLOCK)
                except zmq.Again:
                    time.sleep(0.001)
                except zmq.ZMQError:  # it has hung up
                    peers.remove(peer)
            yield len(peers)

    return send


def outputs(num: int) -> bytes:
    """Return a frame of outputs for nobody."""
    return encode(OutputFrame([encode(output("nobody"))] * num))


TO_INGRESS: dict[str, Send] = {
    "noise": listens(os.urandom(4096)),
    "a greeting": listens(_greeting(b"CURVE")),
    "2 GiB announced": listens(_greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 2 << 30)),
    "two bytes": leads(b"xy"),
    "64 KiB of noise": leads(bytes(1 << 16)),
    "outputs of nobody": leads(outputs(100)),
    "10,000 in a frame": leads(outputs(10_000)),
}


def attack(pipe: Connection, kind: str, name: str, address: str, seconds: float) -> None:
    """Attack for so long; tell how much was sent."""
    num_sent = 0
    began = time.monotonic()
    sending = ATTACKS[kind][name](address)
    while time.monotonic() - began < seconds:
        try:
            num_sent += next(sending)
        except OSError:  # the backlog is full, say
            time.sleep(0.01)
            sending = ATTACKS[kind][name](address)
    pipe.send(num_sent)


ATTACKS: dict[str, dict[str, Send]] = {
    "inbox": {"busy": busy, **STRANGERS, **NONSENSE, **TO_LEADERS},
    "kv server": {"busy": busy, **STRANGERS},
    "ingress": {"busy": busy, **TO_INGRESS},
}


# --- the run --------------------------------------------------------------------------------------


@contextmanager
def attacked(kind: str) -> Iterator[tuple[Target, Honest | Deliveries]]:
    """Start what listens, and honest work for it."""
    if kind == "ingress":
        with socket.create_server((HOST, 0)) as found:
            hostile = f"tcp://{HOST}:{found.getsockname()[1]}"
        honest: Honest | Deliveries = Deliveries()
        target = Target(serve_ingress, honest.address, hostile)
    else:
        role = Role.MIXED if kind == "inbox" else Role.PREFILL
        target = Target(serve_leader, role.value)
        # What ends with its first token is not handed over.
        honest = Honest(target.addresses[-1], 400 if role is Role.MIXED else 1)
    try:
        yield target, honest
    finally:
        target.end()
        honest.end()


class Seen(NamedTuple):
    """What became of one attack."""

    num_sent: int
    turns: list[Turn]
    rate: float
    """Turns in a second."""
    growth_bytes: int


def measure(target: Target, kind: str, name: str, seconds: float) -> Seen:
    """Attack and return what was seen meanwhile."""
    target.turns()
    began = time.monotonic()
    before = most = target.rss_bytes()
    num_sent = 0
    if name == "nothing":
        time.sleep(seconds)
    else:
        ours, theirs = spawn.Pipe()
        args = (theirs, kind, name, target.addresses[0], seconds)
        process = spawn.Process(target=attack, args=args, daemon=True)
        process.start()
        deadline = time.monotonic() + seconds + TIMEOUT_S
        while process.is_alive() and time.monotonic() < deadline:
            most = max(most, target.rss_bytes())
            process.join(0.05)
        process.kill()
        num_sent = ours.recv() if ours.poll() else 0
    turns = target.turns()
    growth = max(most, target.rss_bytes()) - before
    return Seen(num_sent, turns, len(turns) / (time.monotonic() - began), growth)


def longest(turns: list[Turn]) -> Turn:
    """Return the longest by either clock."""
    turns = turns or [Turn(0.0, 0.0)]
    return Turn(max(t.seconds for t in turns), max(t.cpu_s for t in turns))


def run(kind: str, names: list[str], seconds: float) -> Iterator[Measured]:
    """Attack one that listens in all ways."""
    with attacked(kind) as (target, honest):
        time.sleep(2)
        idle = measure(target, kind, "nothing", seconds)
        usual_s = statistics.median(turn.seconds for turn in idle.turns)
        usual_cpu_s = statistics.median(turn.cpu_s for turn in idle.turns)
        allowed_s = MAX_DELAYS_S[kind]
        for name in ["nothing", "busy", *names]:
            wrong = honest.num_wrong
            seen = measure(target, kind, name, seconds)
            failures = []
            if not target.is_alive or not seen.turns:
                failures.append("ended")
            if honest.num_wrong > wrong:
                failures.append(f"wrong {honest.num_wrong - wrong}")
            worst = longest(seen.turns)
            delay_s = worst.seconds - usual_s
            if name == "busy":
                allowed_s += max(delay_s, 0.0)
            elif name != "nothing" and delay_s > allowed_s:
                failures.append(f"delay {delay_s * 1e3:.0f} ms")
            if seen.growth_bytes > MAX_GROWTH_BYTES:
                failures.append(f"+{seen.growth_bytes // MIB} MiB")
            yield Measured(
                target=kind,
                name=name,
                num_sent=seen.num_sent,
                delay_s=delay_s,
                cpu_delay_s=worst.cpu_s - usual_cpu_s,
                rate=seen.rate / idle.rate,
                growth_bytes=seen.growth_bytes,
                failures=failures,
            )


def main() -> int:
    """Print a row per attack."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", help="attacks, with commas")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    only = options.only.split(",") if options.only else None
    rows = []
    head = (
        f"{'target':13} {'attack':22} {'sent':>8} {'delay':>8} {'cpu':>8} {'rate':>6} {'memory':>7}"
    )
    print(f"{head}  verdict", flush=True)
    for kind, attacks in ATTACKS.items():
        names = [n for n in attacks if n != "busy" and (only is None or n in only)]
        for row in run(kind, names, options.seconds):
            rows.append(row)
            verdict = f"FAIL {'; '.join(row.failures)}" if row.failures else "PASS"
            print(
                f"{row.target:13} {row.name:22} {row.num_sent / 1000:8.1f} "
                f"{row.delay_s * 1e3:8.1f} {row.cpu_delay_s * 1e3:8.1f} {row.rate:6.2f} "
                f"{row.growth_bytes / MIB:7.1f}  {verdict}",
                flush=True,
            )
    if options.out:
        report = Report(f"{platform.processor()} {os.cpu_count()} cores", options.seconds, rows)
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return int(any(row.failures for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
