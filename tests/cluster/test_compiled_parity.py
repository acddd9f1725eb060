"""Compiled and replayed steps generate what transformers generates, at every captured size.

All engines of a module share one compile cache, so a family is compiled once, whatever the mode.
Graphs are captured on poisoned memory and the seal is strict: a step that compiles, captures or
reads what a graph let go of fails.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.engine.engine import Engine
from cluster.messages import EngineOutput, GenerateRequest, Sampling, StepKind, Submit
from cluster.rank.assembly import assemble_engine
from cluster.rank.runner import ModelRunner
from compile.config import CompilationConfig, CUDAGraphMode
from compile.context import BatchDescriptor
from compile.counters import counter
from model.layers.attention import Attention

MAX_NUM_SEQS = 12
GRAPH_BS = (1, 2, 4, 8, 12)
GRAPH_TOKENS = (4, 16, 32, 64)
SHAPES = (
    "six heads",
    "mistral window 13 wide heads",
    "qwen2 tied",
    "qwen3 window in every other layer",
    "mixtral tied eight experts",
    "qwen3moe many experts",
)
"""One of each family."""
SLOW_SHAPES = {"mistral window 13 wide heads", "qwen2 tied", "mixtral tied eight experts"}
"""Left out by default: what they compile takes minutes together."""

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compile-cache")


def make_engine(
    oracle: Any, cache_dir: Path, level: int, mode: CUDAGraphMode, **compilation: Any
) -> tuple[Engine, ModelRunner]:
    graphs = {} if mode is NONE else {"cudagraph_capture_sizes": GRAPH_BS}
    pieces = {"capture_num_tokens": GRAPH_TOKENS} if mode in (PIECEWISE, FULL, BOTH) else {}
    config = EngineConfig(
        model_path=str(oracle.path),
        max_model_len=160,
        cache=CacheConfig(block_size=4, num_kv_blocks=500),
        scheduler=SchedulerConfig(MAX_NUM_SEQS, 64),
        compilation=CompilationConfig(
            level=level,
            cudagraph_mode=mode,
            cache_dir=str(cache_dir),
            poison_graph_pool=True,
            sealed="strict",
            **graphs,
            **pieces,
            **compilation,
        ),
    )
    runner = ModelRunner(config)
    return assemble_engine(config, runner), runner


def greedy(max_tokens: int) -> Sampling:
    return Sampling(0.0, 0, 1.0, 0.0, 0, max_tokens, (), -1, -1, None)


def run_down(engine: Engine, oracle: Any) -> set[tuple[StepKind, int, int]]:
    """Run a full batch whose sequences end one after the other, and prompts of each size alone.

    So every captured size is decoded, and every one is a step of a prompt. Returns the kinds of
    steps with their modes and the graphs that each replayed.
    """
    rng = random.Random(oracle.name)
    batch = [(rng.randint(1, 30), 4 + 3 * i) for i in range(MAX_NUM_SEQS)]
    steps = set()
    for requests in (batch, *([(num_tokens - 1, 2)] for num_tokens in GRAPH_TOKENS)):
        steps |= run(engine, oracle, rng, requests)
    oracle.report_ties()
    return steps


def run(
    engine: Engine, oracle: Any, rng: random.Random, requests: list[tuple[int, int]]
) -> set[tuple[StepKind, int, int]]:
    """Run requests, each of a prompt and an output of so many tokens, from one step on."""
    vocab = oracle.model.config.vocab_size
    prompts = {
        str(i): [rng.randrange(vocab) for _ in range(n)] for i, (n, _) in enumerate(requests)
    }
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    for (name, prompt), (_, max_tokens) in zip(prompts.items(), requests, strict=True):
        engine.submit(Submit(GenerateRequest(name, prompt, [], greedy(max_tokens), ""), None))
    steps = set()
    while engine.has_unfinished:
        num_replayed = counter.num_cudagraph_replayed
        for output in engine.step():
            assert output.finish_reason in ("", "length"), output
            outputs[output.request_id] += output.token_ids
        agreed = engine.agreed
        assert agreed is not None
        steps.add((agreed.kind, agreed.mode, counter.num_cudagraph_replayed - num_replayed))
    for (name, prompt), (_, max_tokens) in zip(prompts.items(), requests, strict=True):
        assert len(outputs[name]) == max_tokens
        oracle.check_greedy(prompt, outputs[name])
    return steps


def wanted_steps(runner: ModelRunner) -> set[tuple[StepKind, int, int]]:
    """Return kinds of steps with the mode and the number of replays that each must have."""
    mode = runner.forward.config.graph_mode
    num_pieces = len(runner.model.attention_layers()) + 1
    num_replays = {NONE: 0, PIECEWISE: num_pieces, FULL: 1}
    modes = {StepKind.DECODE: mode.decode_mode(), StepKind.MIXED: mode.mixed_mode()}
    return {(kind, each.value, num_replays[each]) for kind, each in modes.items()}


# What is not split is compiled for one family: that takes four times as long as pieces do. What
# level 0 replays in mode FULL for every family, level 3 does for one.
MODES = [
    pytest.param(0, FULL, marks=pytest.mark.feature("B03", "Q02")),
    pytest.param(1, NONE, marks=pytest.mark.feature("A02")),
    pytest.param(2, NONE, marks=pytest.mark.feature("A03")),
    pytest.param(2, DECODE_ONLY),
    pytest.param(3, NONE, marks=pytest.mark.feature("A04")),
    pytest.param(3, PIECEWISE, marks=[pytest.mark.feature("B02"), pytest.mark.feature("N02")]),
    pytest.param(3, DECODE_ONLY, marks=pytest.mark.feature("B04")),
    pytest.param(3, FULL, marks=pytest.mark.feature("B03", "Q02")),
    pytest.param(3, BOTH, marks=pytest.mark.feature("B05")),
]


CASES = [
    pytest.param(
        *case.values, shape, marks=[*case.marks, *[pytest.mark.slow] * (shape in SLOW_SHAPES)]
    )
    for case in MODES
    for shape in (SHAPES if case.values[0] in (0, 3) and case.values != (3, FULL) else SHAPES[:1])
]


@pytest.mark.feature("D01")
@pytest.mark.feature("D02")
@pytest.mark.feature("D03")
@pytest.mark.parametrize(("level", "mode", "shape"), CASES)
def test_every_captured_size_generates_what_transformers_does(
    make_oracle: Callable[[str], Any],
    cache_dir: Path,
    level: int,
    mode: CUDAGraphMode,
    shape: str,
) -> None:
    oracle = make_oracle(shape)
    engine, runner = make_engine(oracle, cache_dir, level, mode)
    ready = {"num_backend_compilations": 0, "num_graphs_seen": 0, "num_cpp_builds": 0}
    with counter.expect(**ready, num_cudagraph_captured=0, num_late_captures=0):
        steps = run_down(engine, oracle)
    assert steps == wanted_steps(runner)
    replayed = {key for key, times in runner.forward.num_replays.items() if times}
    graphs = runner.forward.config.graph_mode
    decodes = [BatchDescriptor(bs, bs, True) for bs in GRAPH_BS]
    mixed = [BatchDescriptor(n, min(n, MAX_NUM_SEQS)) for n in GRAPH_TOKENS]
    wanted = decodes * (graphs.decode_mode() is FULL) + mixed * (graphs.mixed_mode() is FULL)
    assert replayed == set(wanted)


@pytest.mark.feature("B05")
@pytest.mark.feature("B07")
def test_both_graph_sets_exist_and_each_kind_of_step_takes_its_own(
    make_oracle: Callable[[str], Any], cache_dir: Path
) -> None:
    oracle = make_oracle("six heads")
    engine, runner = make_engine(oracle, cache_dir, 3, BOTH)
    assert runner.forward.captured.graph_bs == GRAPH_BS
    assert runner.forward.captured.num_tokens == GRAPH_TOKENS
    modes = []
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6, 7])):
        engine.submit(Submit(GenerateRequest(name, prompt, [], greedy(3), ""), None))
    while engine.has_unfinished:
        engine.step()
        assert engine.agreed is not None
        agreed = engine.agreed
        modes.append((CUDAGraphMode(agreed.mode), agreed.num_tokens, agreed.graph_bs))
    assert modes[0] == (PIECEWISE, 16, 0)
    assert set(modes[1:]) == {(FULL, 2, 2)}


@pytest.mark.feature("N09")
def test_each_step_of_pieces_reports_what_it_spends_between_them(
    make_oracle: Callable[[str], Any], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = make_oracle("six heads")
    engine, runner = make_engine(oracle, cache_dir, 3, BOTH)
    gaps, shares = runner.forward.gaps, []

    def prefill(name: str) -> None:
        engine.submit(Submit(GenerateRequest(name, [1, 2, 3], [], greedy(3), ""), None))
        while engine.has_unfinished:
            engine.step()
        shares.append(gaps.last_share)

    attend = Attention.attend
    frames = dict(torch._dynamo.utils.counters["frames"])
    prefill("as it is")
    assert gaps.num_steps == 1  # the two steps of decodes replay whole graphs
    monkeypatch.setattr(Attention, "attend", lambda *args: (time.sleep(0.02), attend(*args)))
    prefill("slow between pieces")
    assert gaps.num_steps == 2
    assert 0 < shares[0] < shares[1] < 1
    assert shares[1] > 0.5
    assert shares[0] < gaps.share < shares[1]
    # Attention holds nothing that compiles while pieces are replayed.
    assert dict(torch._dynamo.utils.counters["frames"]) == frames


@pytest.mark.feature("A01")
@pytest.mark.feature("A09")
@pytest.mark.feature("B01")
def test_eager_engines_trace_compile_and_capture_nothing(
    make_oracle: Callable[[str], Any], cache_dir: Path
) -> None:
    nothing = {"num_graphs_seen": 0, "num_backend_compilations": 0, "num_cudagraph_captured": 0}
    with counter.expect(**nothing, num_cudagraph_replayed=0):
        engine, _ = make_engine(make_oracle("six heads"), cache_dir, 0, NONE)
        run_down(engine, make_oracle("six heads"))


@pytest.mark.feature("E05")
def test_a_model_of_l_layers_is_2l_plus_1_pieces_and_3_compilations(
    make_oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    layers = make_oracle("six heads").model.config.num_hidden_layers
    with counter.expect(
        num_piecewise_graphs_seen=2 * layers + 1,
        num_piecewise_capturable_graphs_seen=layers + 1,
        num_backend_compilations=3,
    ):
        make_engine(make_oracle("six heads"), tmp_path, 3, NONE, use_inductor=False)


@pytest.mark.feature("G05")
def test_a_warm_engine_traces_compiles_and_builds_nothing(
    make_oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    make_engine(make_oracle("six heads"), tmp_path, 3, NONE)
    with counter.expect(
        num_graphs_seen=0,
        num_backend_compilations=0,
        num_inductor_compiles=0,
        num_cpp_builds=0,
        num_compiled_artifacts_loaded=3,
    ):
        engine, _ = make_engine(make_oracle("six heads"), tmp_path, 3, DECODE_ONLY)
    run_down(engine, make_oracle("six heads"))


@pytest.mark.feature("J04")
@pytest.mark.feature("X01")
def test_a_thousand_random_batches_compile_and_capture_nothing(
    make_oracle: Callable[[str], Any], cache_dir: Path
) -> None:
    oracle = make_oracle("qwen2 tied")
    engine, _ = make_engine(oracle, cache_dir, 3, BOTH)
    rng, vocab = random.Random(11), oracle.model.config.vocab_size
    sizes: set[int] = set()
    finished: list[EngineOutput] = []
    num_submitted = num_steps = 0
    with counter.expect(
        num_graphs_seen=0,
        num_backend_compilations=0,
        num_cpp_builds=0,
        num_cudagraph_captured=0,
        num_late_compilations=0,
        num_late_captures=0,
    ):
        while num_steps < 1000 or engine.has_unfinished:
            if num_steps < 1000 and (rng.random() < 0.15 or not engine.has_unfinished):
                prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 100))]
                sampling = greedy(rng.randint(1, 40))
                request = GenerateRequest(str(num_submitted), prompt, [], sampling, "")
                engine.submit(Submit(request, None))
                num_submitted += 1
            finished += [output for output in engine.step() if output.finish_reason]
            num_steps += 1
            assert engine.agreed is not None
            sizes.add(engine.agreed.num_scheduled_tokens[0])
    assert len(finished) == num_submitted
    assert {1, 2, 64} <= sizes and len(sizes) > 40, sorted(sizes)
