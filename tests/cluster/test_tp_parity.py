"""Several ranks, each a process of its own, generate what one rank generates."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cluster.channel_messages import StepFrame
from cluster.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from cluster.credentials import Credentials
from cluster.engine.engine import Engine
from cluster.engine.step_digest import StepDivergence
from cluster.messages import EngineOutput, GenerateRequest, Sampling, Submit
from cluster.rank import groups
from cluster.rank.follower import Follower
from cluster.rank.leader import Leader
from cluster.rank.rendezvous import LeaderEndpoints
from compile.config import CompilationConfig
from model.config import ModelConfig

HOST = "127.0.0.1"
CREDENTIALS = Credentials("test", b"s" * 32)
NUM_TOKENS = 64
BLOCK_SIZE, MAX_NUM_BATCHED_TOKENS = 4, 24

FOLLOWER = """
import pickle, sys
from cluster.rank.follower import Follower
while True:
    Follower(**pickle.load(sys.stdin.buffer)).run()
"""


class FollowerProcesses:
    """Processes that follow one leader after the other."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def follow(self, config: EngineConfig, endpoints: LeaderEndpoints) -> None:
        """Let as many processes as the group wants load and follow."""
        for tp_rank in range(1, config.parallel.tensor_parallel_size):
            if len(self._processes) < tp_rank:
                self._processes.append(self._start())
            stdin = self._processes[tp_rank - 1].stdin
            assert stdin is not None
            stdin.write(pickle.dumps(follower_arguments(config, endpoints, tp_rank)))
            stdin.flush()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        return subprocess.Popen(
            [sys.executable, "-c", FOLLOWER],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": root},
        )


@pytest.fixture(scope="module")
def followers() -> Iterator[FollowerProcesses]:
    processes = FollowerProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def other_followers() -> Iterator[FollowerProcesses]:
    """Processes that follow nobody else meanwhile: those of a shape do until the next shape."""
    processes = FollowerProcesses()
    yield processes
    processes.close()


def follower_arguments(
    config: EngineConfig, endpoints: LeaderEndpoints, tp_rank: int
) -> dict[str, Any]:
    return {
        "config": config,
        "dp_rank": 0,
        "tp_rank": tp_rank,
        "epoch": 0,
        "host": HOST,
        "credentials": CREDENTIALS,
        "rendezvous": endpoints.rendezvous,
    }


def window_of(oracle: Any) -> int | None:
    """Return how many of a sequence's tokens keep their blocks; None: all."""
    return ModelConfig.from_dir(oracle.path).kv_window


def config_for(oracle: Any, size: int) -> EngineConfig:
    # A pool of 60 blocks holds a longest sequence and little more; eight want to run. Where a
    # window bounds what a sequence holds, one of 12 holds the windows of three.
    num_kv_blocks = 60 if window_of(oracle) is None else 12
    return EngineConfig(
        model_path=str(oracle.path),
        max_model_len=220,
        cache=CacheConfig(BLOCK_SIZE, num_kv_blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        parallel=ParallelConfig(size),
    )


def prompts_for(oracle: Any) -> list[list[int]]:
    rng = random.Random(31)
    vocab = oracle.model.config.vocab_size
    head = [rng.randrange(vocab) for _ in range(24)]
    tails = [[rng.randrange(vocab) for _ in range(rng.randint(1, 60))] for _ in range(10)]
    prompts = [head + tail if i % 2 else tail for i, tail in enumerate(tails)]
    # Where a window bounds what a sequence holds, only short ones grow into one another.
    shorts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 4))] for _ in range(4)]
    return prompts[:5] + shorts + prompts[5:]


def run(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[list[EngineOutput]]:
    """Generate for all prompts, one of which arrives every third step."""
    outputs: dict[str, list[EngineOutput]] = {str(i): [] for i in range(len(prompts))}
    fields = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "num_logprobs": -1,
        "min_p": 0.0,
        "num_prompt_logprobs": -1,
        "rules": None,
        "max_tokens": NUM_TOKENS,
    }
    settings = Sampling(stop_token_ids=(), **{**fields, **sampling})
    step = 0
    while step < 3 * len(prompts) or engine.has_unfinished:
        if step % 3 == 0 and step < 3 * len(prompts):
            i = step // 3
            engine.submit(Submit(GenerateRequest(str(i), prompts[i], [], settings, ""), None))
        for output in engine.step():
            assert output.finish_reason in ("", "length"), output
            outputs[output.request_id].append(output)
        step += 1
        assert step < 5000
    return [outputs[str(i)] for i in range(len(prompts))]


def generate(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    results = run(engine, prompts, **sampling)
    return [[token for output in outputs for token in output.token_ids] for outputs in results]


def leader_for(config: EngineConfig, followers: FollowerProcesses) -> Leader:
    endpoints = LeaderEndpoints(config, host=HOST, credentials=CREDENTIALS)
    followers.follow(config, endpoints)
    return Leader(
        config, engine_id="test", epoch=0, host=HOST, credentials=CREDENTIALS, endpoints=endpoints
    )


def end(leader: Leader) -> None:
    leader.stop()
    leader.run()  # ends at once, and its followers with it


@dataclass
class Case:
    """One model on several ranks, and on one."""

    oracle: Any
    ranks: Engine
    alone: Engine


# Each family, on so many ranks, with the rows that it shows.
SHAPES = [
    ("one kv head", 2, "S01"),
    ("llama3 rope", 2, "S01 S05"),
    ("mistral window 13 wide heads", 2, "S01 S06"),
    ("qwen2 tied", 2, "S02"),  # with biases, and an odd vocabulary
    ("qwen3 wide heads", 2, "S02"),  # tied, with one KV head
    ("qwen3 window in every other layer", 4, "S02 S06"),  # two of which hold the same KV head
]
# With those above and the slow ones at least six of each family on two ranks; on one,
# `test_parity.py` has them all.
MORE_SHAPES = [
    ("mistral window 7", "S01 S06"),
    ("qwen2 yarn rope with mscale", "S02 S05"),
    ("qwen3 tied linear rope", "S02 S05"),
    ("mixtral window 11 wide heads", "S03 P15 S06"),
    ("qwen3moe many experts", "S03 P15"),  # 9 on each, and a KV head on both
]
SLOW_SHAPES = [
    ("wide heads", "S01"),
    ("tied", "S01"),
    ("odd vocabulary", "S01"),
    ("linear rope", "S01 S05"),
    ("mistral window 11 two kv heads", "S01 S06"),
    ("mistral window 20 tied", "S01 S06"),
    ("mistral window 16", "S01 S06"),
    ("mistral wide heads linear rope", "S01 S05"),
    ("qwen2 wide heads", "S02"),
    ("qwen2 eight heads", "S02"),
    ("qwen2 window in the last layers", "S02 S06"),
    ("qwen2 window in all layers", "S02 S06"),
    ("qwen3 eight heads", "S02"),
    ("qwen3 odd vocabulary", "S02"),
    ("qwen3 yarn rope without truncation", "S02 S05"),
    ("qwen3 window in every other layer", "S02 S06"),
]
"""Together they take minutes."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((shape, size), id=f"{shape}-{size}", marks=pytest.mark.feature(*rows.split()))
        for shape, size, rows in SHAPES
    ],
)
def case(
    request: pytest.FixtureRequest,
    make_oracle: Callable[[str], Any],
    followers: FollowerProcesses,
) -> Iterator[Case]:
    """Each shape's engines in turn; all tests of one shape share them."""
    shape, size = request.param
    oracle = make_oracle(shape)
    leaders = [leader_for(config_for(oracle, n), followers) for n in (size, 1)]
    yield Case(oracle, *(leader.engine for leader in leaders))
    for leader in leaders:
        end(leader)


def test_several_ranks_and_one_generate_what_transformers_does(case: Case) -> None:
    for engine in (case.ranks, case.alone):
        check_greedy(case.oracle, engine)
    case.oracle.report_ties()


@pytest.mark.parametrize(
    "shape",
    [
        *(
            pytest.param(shape, marks=pytest.mark.feature(*rows.split()))
            for shape, rows in MORE_SHAPES
        ),
        *(
            pytest.param(shape, marks=[pytest.mark.feature(*rows.split()), pytest.mark.slow])
            for shape, rows in SLOW_SHAPES
        ),
    ],
)
def test_two_ranks_generate_what_transformers_does(
    shape: str, make_oracle: Callable[[str], Any], other_followers: FollowerProcesses
) -> None:
    oracle = make_oracle(shape)
    leader = leader_for(config_for(oracle, 2), other_followers)
    try:
        check_greedy(oracle, leader.engine)
    finally:
        end(leader)
    oracle.report_ties()


def check_greedy(oracle: Any, engine: Engine) -> None:
    """Under mixed arrivals, chunked prompts, prefix hits and pre-emption, all at once."""
    prompts = prompts_for(oracle)
    longest, window = max(map(len, prompts)), window_of(oracle)
    assert longest > MAX_NUM_BATCHED_TOKENS
    before = engine.stats()
    results = generate(engine, prompts)
    num_hits = engine.stats().prefix_hits
    # And the second turn of a conversation, whose first one has just ended.
    turn = prompts[-1] + results[-1]
    results += generate(engine, [turn])
    for prompt, tokens in zip([*prompts, turn], results, strict=True):
        assert len(tokens) == NUM_TOKENS
        oracle.check_greedy(prompt, tokens)
    stats = engine.stats()
    assert stats.num_preemptions > before.num_preemptions
    assert stats.prefix_hits > num_hits
    if window is None:
        assert num_hits > before.prefix_hits
    else:  # the longest prompt fits because what the window has passed is freed
        assert longest > stats.num_blocks * BLOCK_SIZE
    assert stats.num_free_blocks == stats.num_blocks


def test_seeded_draws_are_those_of_one_rank(case: Case) -> None:
    """Temperature divides the logits' last bits away."""
    prompts = prompts_for(case.oracle)[:2]
    seeded = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2**63 + 1}
    assert generate(case.ranks, prompts, **seeded) == generate(case.alone, prompts, **seeded)


@torch.inference_mode()
def test_log_probabilities_of_a_prompt_are_those_of_transformers(case: Case) -> None:
    """Their logits are gathered on rank 0 too, chunk by chunk."""
    prompt = prompts_for(case.oracle)[1]
    [outputs] = run(case.ranks, [prompt], num_prompt_logprobs=0, max_tokens=1)
    logprobs = case.oracle.logits(prompt[:1], prompt[1:]).log_softmax(-1)
    wanted = logprobs.gather(1, torch.tensor(prompt[1:])[:, None]).flatten().tolist()
    found = [entry.logprob for entry in outputs[0].prompt_logprobs]
    assert found == pytest.approx(wanted, abs=1e-4)


class AlteringReceiver:
    """A follower's end of a channel that changes what comes through it."""

    def __init__(self, receiver: Any, alter: Callable[[StepFrame], StepFrame | None]) -> None:
        self._receiver = receiver
        self._alter = alter

    def receive(self) -> Any:
        frame = self._receiver.receive()
        return self._alter(frame) if isinstance(frame, StepFrame) else frame

    def close(self) -> None:
        self._receiver.close()


@pytest.mark.parametrize(
    ("field", "alter"),
    [
        ("token_ids", lambda plan: {"token_ids": [*plan.token_ids[:-1], plan.token_ids[-1] ^ 1]}),
        ("row_state", lambda plan: {"new_blocks": []}),
        ("step", lambda plan: {"step": plan.step + 1}),
    ],
)
def test_a_follower_whose_step_differs_does_not_run_it(
    make_oracle: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    alter: Callable[[Any], dict[str, Any]],
) -> None:
    """It names rank, step and field; its leader is left waiting, for the owner to kill."""
    # Longer than a busy machine may hold a thread up: earlier collectives have this bound too.
    monkeypatch.setattr(groups, "COLLECTIVE_TIMEOUT_S", 2.0)
    config = config_for(make_oracle("tied"), 2)
    endpoints = LeaderEndpoints(config, host=HOST, credentials=CREDENTIALS)
    made: list[Follower] = []
    arguments = follower_arguments(config, endpoints, 1)
    joining = threading.Thread(target=lambda: made.append(Follower(**arguments)))
    joining.start()
    leader = Leader(
        config, engine_id="", epoch=0, host=HOST, credentials=CREDENTIALS, endpoints=endpoints
    )
    joining.join()
    [follower] = made

    def alter_fourth(frame: StepFrame) -> StepFrame:
        if frame.plan.step < 4:  # which admits the second sequence
            return frame
        return msgspec.structs.replace(
            frame, plan=msgspec.structs.replace(frame.plan, **alter(frame.plan))
        )

    follower.loop.receiver = AlteringReceiver(follower._receiver, alter_fourth)
    lost: list[BaseException] = []

    def serve() -> None:
        try:
            generate(leader.engine, prompts_for(make_oracle("tied")))
        except RuntimeError as error:  # nobody comes to its collective
            lost.append(error)

    leading = threading.Thread(target=serve, daemon=True)
    leading.start()
    step = 5 if field == "step" else 4
    wanted = rf"rank dp=0 tp=1 epoch=0 step {step}: {field}: wanted \d+, found \d+"
    with pytest.raises(StepDivergence, match=wanted):
        follower.run()
    assert follower.stats(tp_rank=1, dp_rank=0, pid=0, node="").step == 3
    leading.join(timeout=0.2)
    assert leading.is_alive()
    leading.join(timeout=20)
    assert "imed out" in str(lost)
    follower.stop()
    follower.run()  # closes
    end(leader)


def test_graphs_are_let_go_of_before_their_group_ends(
    make_oracle: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits in vain for the end of graphs that talk over the group."""
    graphs = CompilationConfig(
        level=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=(1, 2)
    )
    config = dataclasses.replace(config_for(make_oracle("tied"), 2), compilation=graphs)
    endpoints = LeaderEndpoints(config, host=HOST, credentials=CREDENTIALS)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(Follower, **follower_arguments(config, endpoints, 1))
        leader = Leader(
            config, engine_id="", epoch=0, host=HOST, credentials=CREDENTIALS, endpoints=endpoints
        )
        ranks: list[Leader | Follower] = [leader, joining.result()]

    def num_graphs(rank: Leader | Follower) -> int:
        return sum(len(user._entries) for user in rank.runner.forward._pools._users)  # type: ignore[attr-defined]

    before = [num_graphs(rank) for rank in ranks]
    at_end: dict[int, int] = {}
    real = groups.GroupMembership.close

    def close(group: groups.GroupMembership) -> None:
        at_end[group.shard.rank] = num_graphs(ranks[group.shard.rank])
        real(group)

    monkeypatch.setattr(groups.GroupMembership, "close", close)
    following = threading.Thread(target=ranks[1].run)
    following.start()
    end(leader)
    following.join(timeout=20)
    assert not following.is_alive()
    assert (before, at_end) == ([2, 2], {0: 0, 1: 0})


@pytest.mark.slow
@pytest.mark.feature("G01")
def test_compiled_ranks_replay_the_same_graphs_and_generate_what_one_eager_rank_does(
    make_oracle: Callable[[str], Any], other_followers: FollowerProcesses, tmp_path: Path
) -> None:
    oracle = make_oracle("one kv head")
    compilation = CompilationConfig(
        level=3,
        cudagraph_mode="FULL_AND_PIECEWISE",
        cudagraph_capture_sizes=(1, 2, 4, 8),
        capture_num_tokens=(8, 16, MAX_NUM_BATCHED_TOKENS),
        cache_dir=str(tmp_path),
        poison_graph_pool=True,
        sealed="strict",
    )
    config = dataclasses.replace(config_for(oracle, 2), compilation=compilation)
    leader = leader_for(config, other_followers)
    try:
        prompts = prompts_for(oracle)
        for prompt, found in zip(prompts, generate(leader.engine, prompts), strict=True):
            oracle.check_greedy(prompt, found)
        oracle.report_ties()
        replays = leader.runner.forward.num_replays
        assert {key.num_seqs for key, times in replays.items() if times} == {1, 2, 4, 8}
    finally:
        end(leader)
    # Each rank has a directory of its own; artifacts are shared by their content.
    assert {path.name for path in tmp_path.glob("*/rank_*")} == {"rank_0_0", "rank_1_0"}
