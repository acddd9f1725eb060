"""Data-parallel leaders, each a process of its own, in lockstep: the tokens, steps and graphs."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from cluster.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from cluster.credentials import Credentials
from cluster.messages import (
    EngineOutput,
    GenerateRequest,
    OutputFrame,
    Sampling,
    Submit,
    decode,
    encode,
)
from cluster.rank.rendezvous import introduce
from cluster.wire.contexts import end_context
from cluster.wire.message_parts import join, pack
from cluster.wire.sockets import CurveHandshake, connecting_socket, listening_socket
from compile.config import CompilationConfig

HOST, EPOCH = "127.0.0.1", 5
CREDENTIALS = Credentials("test", b"s" * 32)
MAX_NUM_SEQS, BUDGET = 4, 24
DECODE_ONLY = "FULL_DECODE_ONLY"
EXPERTS = pytest.mark.feature("P15")

RANK = """
import pickle, sys, threading
from cluster.rank.follower import Follower
from cluster.rank.leader import Leader
from cluster.rank.rendezvous import LeaderEndpoints

def tell(what):
    pickle.dump(what, sys.stdout.buffer)
    sys.stdout.flush()

def hear():
    return pickle.load(sys.stdin.buffer)

config, place = hear()
common = {key: place[key] for key in ("host", "credentials", "dp_rank")}
epoch = place["epoch"]
if place["tp_rank"]:
    tp_rank = place["tp_rank"]
    rank = Follower(config, tp_rank=tp_rank, epoch=epoch, rendezvous=hear(), **common)
else:
    endpoints = LeaderEndpoints(config, **common)
    tell(endpoints.rendezvous)
    places = {"epoch": epoch, "endpoints": endpoints, "rendezvous": hear()}
    rank = Leader(config, engine_id="", **places, **common)
    threading.Thread(target=lambda: (hear(), rank.stop()), daemon=True).start()
tell(getattr(rank, "inbox", ""))
rank.run()
forward = rank.runner.forward
replays = {str(key): times for key, times in forward.num_replays.items() if times}
tell((rank.runner.steps.as_dicts(), replays, forward.captured))
"""


class Rank:
    """One rank's process, spoken to in pickles."""

    def __init__(self, config: EngineConfig, dp_rank: int, tp_rank: int) -> None:
        root = str(Path(__file__).resolve().parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": root},
        )
        place = {"host": HOST, "credentials": CREDENTIALS, "epoch": EPOCH}
        self.tell((config, {**place, "dp_rank": dp_rank, "tp_rank": tp_rank}))

    def tell(self, what: Any) -> None:
        assert self.process.stdin is not None
        pickle.dump(what, self.process.stdin)
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)


class Group:
    """All ranks of a group, loaded; `inboxes` are those of its leaders."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        size = parallel.tensor_parallel_size
        self.ranks = [
            Rank(config, dp_rank, tp_rank)
            for dp_rank in range(parallel.data_parallel_size)
            for tp_rank in range(size)
        ]
        self.leaders = self.ranks[::size]
        told = introduce([leader.hear() for leader in self.leaders])
        for i, rank in enumerate(self.ranks):
            rank.tell(told[i // size])
        self.inboxes = [rank.hear() for rank in self.ranks][::size]

    def stop(self) -> list[tuple[list[dict[str, Any]], dict[str, int], Any]]:
        """End all ranks at one step; return each one's step log, replays and captured graphs."""
        for leader in self.leaders:
            leader.tell("stop")
            time.sleep(0.05)  # not at once: who is told first waits for the others
        return [rank.hear() for rank in self.ranks]

    def kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.communicate()


@contextmanager
def running(config: EngineConfig) -> Iterator[Group]:
    group = Group(config)
    try:
        yield group
    finally:
        group.kill()


def config_for(oracle: Any, tp_size: int, mode: str) -> EngineConfig:
    return EngineConfig(
        model_path=str(oracle.path),
        max_model_len=128,
        # Three long sequences fill a pool: some are pre-empted. Prompts come in chunks.
        cache=CacheConfig(block_size=4, num_kv_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET),
        parallel=ParallelConfig(tp_size, data_parallel_size=2),
        compilation=CompilationConfig(
            level=0,
            cudagraph_mode=mode,
            capture_num_tokens=(8, BUDGET),
            sealed="strict",
            poison_graph_pool=True,
        ),
    )


def serve_at_random(
    group: Group, prompts: list[list[int]], num_tokens: list[int], seed: int
) -> list[list[int]]:
    """Submit at random moments to random leaders, seldom the second; return the tokens."""
    rng = random.Random(seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    handshake = CurveHandshake(CREDENTIALS.secret)
    replies = listening_socket(context, zmq.PULL, handshake, max_waiting=1000)
    port = replies.bind_to_random_port(f"tcp://{HOST}")
    leaders = []
    for inbox in group.inboxes:
        leaders.append(connecting_socket(context, zmq.PUSH, handshake, max_waiting=1000))
        leaders[-1].connect(inbox)
    tokens: list[list[int]] = [[] for _ in prompts]
    num_left = len(prompts)
    waiting = list(range(len(prompts)))
    deadline = time.monotonic() + 120
    try:
        while num_left:
            assert time.monotonic() < deadline, f"{num_left} requests have not ended"
            if waiting and rng.random() < 0.6:
                i = waiting.pop(0)
                sampling = Sampling(0.0, 0, 1.0, 0.0, 0, num_tokens[i], (), -1, -1, None)
                request = GenerateRequest(str(i), prompts[i], [], sampling, f"tcp://{HOST}:{port}")
                leader = leaders[int(rng.random() < 0.3)]
                leader.send_multipart(pack(encode(Submit(request, None)), CREDENTIALS))
            while replies.poll(rng.choice((0, 5, 20))):
                _, *parts = replies.recv_multipart()
                frame: OutputFrame = decode(join(parts, 1 << 20), OutputFrame)
                assert frame.epoch == EPOCH
                for data in frame.outputs:
                    output = decode(data, EngineOutput)
                    assert not output.error, output
                    tokens[int(output.request_id)] += output.token_ids
                    num_left -= bool(output.finish_reason)
    finally:
        end_context(context, "test", linger=0)
    return tokens


def check_logs(ends: list[tuple[list[dict[str, Any]], dict[str, int], Any]], mode: str) -> None:
    """All ranks ran the same steps, at the same sizes, through the same graphs."""
    logs = [log for log, _, _ in ends]
    assert len({str(captured) for _, _, captured in ends}) == 1
    decodes = []
    for steps in zip(*logs, strict=True):
        assert all(step == steps[0] for step in steps)
        if steps[0]["kind"] == 1:
            assert steps[0]["graph_bs"] >= max(steps[0]["num_scheduled_tokens"])
            decodes.append(steps[0])
    assert [step["epoch"] for step in logs[0]] == [EPOCH] * len(logs[0])
    # Every decode step is a replay of a whole graph on every rank, dummy steps included.
    assert all(step["mode"] == 2 for step in decodes)
    wanted: dict[int, int] = {}
    for step in decodes:
        wanted[step["graph_bs"]] = wanted.get(step["graph_bs"], 0) + 1
    for _, replays, _ in ends:
        whole = {key: times for key, times in replays.items() if "uniform_decode=True" in key}
        assert sorted(whole.values()) == sorted(wanted.values())
        num_mixed = sum(times for key, times in replays.items() if key not in whole)
        assert num_mixed == (len(logs[0]) - len(decodes) if mode == "FULL" else 0)
    # The load was uneven: a rank without work ran along, and sizes were not its own.
    across = [step["num_scheduled_tokens"] for step in logs[0]]
    assert any(0 in tokens for tokens in across)
    assert any(0 not in tokens and len(set(tokens)) > 1 for tokens in across)
    assert {step["kind"] for step in logs[0]} == {1, 2}


@pytest.mark.feature("P01", "P02", "P04", "P10", "P13", "P20", "P21")
@pytest.mark.parametrize(
    ("shape", "tp_size", "mode"),
    [
        pytest.param("odd vocabulary", 1, DECODE_ONLY, id="1x2"),
        pytest.param("odd vocabulary", 1, "FULL", id="1x2 mixed", marks=pytest.mark.feature("B03")),
        pytest.param("one kv head", 2, DECODE_ONLY, id="2x2", marks=pytest.mark.slow),
        pytest.param("mixtral tied eight experts", 1, DECODE_ONLY, id="1x2 experts", marks=EXPERTS),
        pytest.param("mixtral tied eight experts", 2, DECODE_ONLY, id="2x2 experts", marks=EXPERTS),
    ],
)
def test_ranks_in_lockstep_generate_what_one_rank_does_through_the_same_graphs(
    make_oracle: Callable[[str], Any],
    shape: str,
    tp_size: int,
    mode: str,
) -> None:
    oracle, rng = make_oracle(shape), random.Random(11)
    vocab = oracle.model.config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 60))] for _ in range(14)]
    num_tokens = [rng.randint(4, 50) for _ in prompts]
    with running(config_for(oracle, tp_size, mode)) as group:
        results = serve_at_random(group, prompts[:8], num_tokens[:8], 1)
        time.sleep(0.1)  # all sleep, by agreement, and wake again
        results += serve_at_random(group, prompts[8:], num_tokens[8:], 2)
        ends = group.stop()
        for rank in group.ranks:
            assert rank.process.wait(timeout=20) == 0
    for prompt, tokens, number in zip(prompts, results, num_tokens, strict=True):
        assert len(tokens) == number
        oracle.check_greedy(prompt, tokens)
    oracle.report_ties()
    check_logs(ends, mode)
