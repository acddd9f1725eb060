"""Frames of a process that has the secret and sends nonsense: a leader serves on, and serves right.

Each frame is a good one that was altered in one place, by another value or in its bytes. Whatever
becomes of it, the leader runs on, good requests between them get the tokens that transformers
gives, and at the end nothing is left of any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import (
    CREDENTIALS,
    HANDSHAKE,
    Context,
    RunningLeader,
    config_of,
    tokens_of,
    wait_for,
)
from sim_check import check_scheduler
from wire_structs import request_of, rules_of

from cluster.config import EngineConfig, Role
from cluster.kv import reads as kv_reads
from cluster.rank import leader as leader_module
from cluster.rank.leader import MAX_INBOX_FRAMES
from cluster.wire.messages import (
    Abort,
    EngineOutput,
    GenerateRequest,
    Hello,
    KVHandoff,
    KVSource,
    LogitRules,
    RankProcess,
    Sampling,
    Submit,
    encode,
)
from cluster.wire.shared_memory import SharedMemory
from cluster.wire.sockets import connecting_socket, node_id, pack

VOCAB, NUM_TOKENS = 256, 6
PROMPT = [5, 99, 7, 31, 64]

NUM_FRAMES = 400


class Served(RunningLeader):
    """A leader and its ingress, and what is known of both."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.memory = SharedMemory(8 * self.leader.runner.kv_spec.block_bytes)
        """Blocks that a handoff may name."""
        self.wanted: list[int] = []
        self.ids = count()
        self.num_sent = 0

    def ask(self, asked: GenerateRequest) -> list[EngineOutput]:
        """Return a request's outputs; those of others are dropped."""
        self.send(encode(Submit(asked, None)))
        outputs: list[EngineOutput] = []
        deadline = time.monotonic() + 60
        while not outputs or not outputs[-1].finish_reason:
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, "no answer"
            found = self.ingress.receive(0.1)
            outputs += [output for output in found if output.request_id == asked.request_id]
        return outputs

    def request(self, request_id: str, **fields: Any) -> GenerateRequest:
        sampling = {"seed": 7, "max_tokens": NUM_TOKENS, **fields}
        return request_of(request_id, PROMPT, **sampling)

    def check(self) -> None:
        """A good request gets the right tokens."""
        outputs = self.ask(self.request(f"good {next(self.ids)}"))
        assert tokens_of(outputs) == self.wanted
        assert outputs[-1].finish_reason == "length"

    def check_rest(self) -> None:
        scheduler = self.leader.engine.scheduler
        wait_for(lambda: not scheduler.has_unfinished)
        check_scheduler(scheduler)
        assert scheduler.stats().num_free_blocks == scheduler.stats().num_blocks
        sender = self.leader._output_sender
        assert not sender._peers and not sender._given_up


@pytest.fixture(scope="module", params=[Role.MIXED, Role.DECODE], ids=lambda role: role.value)
def served(request: pytest.FixtureRequest, oracle: Any) -> Iterator[Served]:
    eager: dict[str, Any] = {"level": 0, "cudagraph_mode": "NONE"}
    config = config_of(oracle.path, 128, num_kv_blocks=64, role=request.param, **eager)
    timeout_s, kv_reads.ANSWER_TIMEOUT_S = kv_reads.ANSWER_TIMEOUT_S, 0.2
    logging.getLogger("lockstep").setLevel(logging.CRITICAL)  # a line for each frame
    made = Served(config)
    made.wanted = tokens_of(made.ask(made.request("first")))
    oracle.check_greedy(PROMPT, made.wanted)
    yield made
    made.close()
    logging.getLogger("lockstep").setLevel(logging.NOTSET)
    kv_reads.ANSWER_TIMEOUT_S = timeout_s


# --- nonsense -------------------------------------------------------------------------------------


NAME = "absurd 000000"


def good_frames(served: Served) -> list[Any]:
    """Return frames with something in every field; nobody answers where the handoff says."""
    rules = LogitRules(0.5, 0.5, 1.1, (3, 4), (1.0, -2.0), b"\xff" * 32, 2)
    sampling = Sampling(0.8, 40, 0.9, 0.05, 7, NUM_TOKENS, (9, 300), 2, 3, rules, None)
    asked = GenerateRequest(NAME, PROMPT, [8, 9], sampling, b"")
    process, spec = RankProcess(0, "nonce"), served.leader.runner.kv_spec
    memory = served.memory
    source = KVSource(0, node_id(), memory.pid, memory.fd, "tcp://127.0.0.1:9", process)
    handoff = KVHandoff(3, NAME, [source], [1, 2], [1, 1], 6, spec.block_bytes, "", 30.0)
    return [
        Submit(asked, None),
        Submit(asked, handoff),
        Abort([NAME, "good"]),
        Hello(served.leader.context.engine_id, 0),
    ]


NUMBERS = [-1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 0.5, 1e308]
NUMBERS += [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324]
OTHERS: list[Any] = [None, True, "", "x" * 300, "tcp://1.2.3.4:5", b"", b"\0" * 40, [], [[]], {}]
OTHERS += [[-1], [2**40], [float("nan")], [1] * 3000, [""], [None], {"a": 1}]
absurd = st.sampled_from(NUMBERS + OTHERS) | st.integers(-300, 300) | st.floats() | st.binary()


def places(node: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield where something stands in a frame, at any depth."""
    if isinstance(node, list):
        for i, inner in enumerate(node):
            yield (*path, i)
            yield from places(inner, (*path, i))


@st.composite
def altered_frames(draw: st.DrawFn, served: Served) -> bytes:
    frame = encode(draw(st.sampled_from(good_frames(served))))
    how = draw(st.sampled_from(["value"] * 6 + ["remove", "repeat", "bytes", "cut", "noise"]))
    if how == "noise":
        return draw(st.binary(max_size=200))
    if how == "cut":
        return frame[: draw(st.integers(0, len(frame)))]
    if how == "bytes":
        at = draw(st.integers(0, len(frame) - 1))
        return frame[:at] + draw(st.binary(min_size=1, max_size=3)) + frame[at + 1 :]
    content = msgspec.msgpack.decode(frame)
    *path, last = draw(st.sampled_from(list(places(content))))
    node = content
    for i in path:
        node = node[i]
    if how == "remove":
        del node[last]
    elif how == "repeat":
        node[last : last + 1] = [node[last]] * draw(st.sampled_from([2, 3, 600]))
    else:
        node[last] = draw(absurd)
    return msgspec.msgpack.encode(content)


def test_nonsense_ends_no_leader(served: Served, fuzz: Callable[[int], settings]) -> None:
    @fuzz(NUM_FRAMES)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        name = f"absurd {next(served.ids):06}".encode()
        served.send(data.draw(altered_frames(served)).replace(NAME.encode(), name))
        served.num_sent += 1
        if served.num_sent % 20 == 0:
            served.check()

    check()


def test_nothing_is_left_of_nonsense(served: Served) -> None:
    served.check()
    served.check_rest()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"seed": -1}, "Expected `int` >= 0 - at `$[1][3][4]`"),
        ({"temperature": float("nan")}, "Expected `float` >= 0.0"),
        ({"num_logprobs": 21}, "Expected `int` <= 20"),
        ({"bias_token_ids": (-1,), "biases": (1.0,)}, "Expected `int` >= 0"),
        ({"bias_token_ids": (VOCAB,), "biases": (1.0,)}, "rules.bias_token_ids: wanted ids below"),
        ({"bias_token_ids": (1, 2), "biases": (1.0,)}, "rules.biases: wanted 2, one per token"),
        ({"allowed_tokens": b"\0\0"}, "rules.allowed_tokens: wanted at least one token"),
        ({"allowed_tokens": b"\0" * 32 + b"\1"}, "rules.allowed_tokens: wanted tokens below 256"),
        (
            {"allowed_tokens": b"\6", "min_tokens": 1, "stop_token_ids": (1, 2, 3)},
            "rules.min_tokens: wanted a token that may come before it, found stop tokens alone",
        ),
        (
            {"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB + 9))},
            "rules.min_tokens: wanted a token that may come before it, found stop tokens alone",
        ),
    ],
)
def test_who_asks_for_the_impossible_is_told_what_was_wanted(
    served: Served, fields: dict[str, Any], error: str
) -> None:
    rules = {name: fields[name] for name in LogitRules.__struct_fields__ if name in fields}
    others = {name: value for name, value in fields.items() if name not in rules}
    if rules:
        others["rules"] = rules_of(**rules)
    [output] = served.ask(served.request(f"bad {next(served.ids)}", **others))
    assert output.finish_reason == "error" and error in output.error
    served.check()


def test_a_second_request_of_one_id_does_not_end_the_first(served: Served) -> None:
    name = f"twice {next(served.ids)}"
    for _ in range(3):
        served.send(encode(Submit(served.request(name), None)))
    outputs = served.ask(served.request(name))
    assert tokens_of(outputs) == served.wanted


# --- budgets --------------------------------------------------------------------------------------


def test_a_leader_steps_on_whatever_is_sent(served: Served, context: Context) -> None:
    """Two-byte frames of a process with the secret, and aborts of requests that nobody knows."""
    is_over = threading.Event()
    flood = connecting_socket(context, zmq.DEALER, HANDSHAKE, max_waiting=1000)
    flood.connect(served.leader.inbox)
    frames = [[b"x", b"y"], pack(encode(Abort(["nobody"])), CREDENTIALS), [b"\xc1"]]

    def send() -> None:
        while not is_over.is_set():
            for frame in frames:
                flood.send_multipart(frame)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        time.sleep(0.3)
        steps = served.leader.stats().step
        for _ in range(3):
            served.check()
        done = served.leader.stats().step - steps
    finally:
        is_over.set()
        thread.join(timeout=60)
        flood.close(linger=0)
    assert done >= 3 * NUM_TOKENS


def test_what_is_left_in_the_inbox_is_taken_without_a_knock(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than is taken between two steps, sent at once to a leader that sleeps."""
    was_ms = leader_module.MAX_SLEEP_MS
    monkeypatch.setattr(leader_module, "MAX_SLEEP_MS", 600_000)
    time.sleep(was_ms / 1000 + 0.1)  # now it sleeps for as long as that
    for _ in range(4 * MAX_INBOX_FRAMES):
        served.send(encode(Abort(["nobody"])))
    began = time.monotonic()
    served.check()
    assert time.monotonic() - began < 300, "less than a leader sleeps"
