"""The engine parts of gpu_check.py: the overlapped loop against the plain one, drafts of a model's
own layer, and a strict seal."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_check_models import BLOCK_SIZE, save_random_checkpoint, save_random_mtp
from gpu_check_rows import Row, Setting, attempts

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from cluster.group.context import RankContext
from cluster.rank.leader import assemble_engine
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import GenerateRequest, Sampling, StepKind, Submit
from compile.config import CompilationConfig
from compile.counters import counter

PROMPT, LIMIT = 16, 96
NUM_DRAFTS = 3
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0, 32, (), -1, -1, None, None)


def engine_config(at: Setting, path: str, many: int, **fields: Any) -> EngineConfig:
    """Return a configuration for `many` sequences in a pool that holds all of them."""
    return EngineConfig(
        model_path=path,
        max_model_len=LIMIT,
        device=at.device.type,
        cache=CacheConfig(BLOCK_SIZE, num_kv_blocks=many * LIMIT // BLOCK_SIZE),
        scheduler=SchedulerConfig(many, many * PROMPT),
        **fields,
    )


def generate(config: EngineConfig, runner: ModelRunner, samplings: list[Sampling]) -> list[Any]:
    """Return the tokens of one request for each sampling, through the engine that serves.

    Raises:
        RuntimeError: the engine refused one.
    """
    engine = assemble_engine(config, runner)
    tokens: list[list[int]] = [[] for _ in samplings]
    for i, sampling in enumerate(samplings):
        prompt = [(7 * i + j) % 512 for j in range(PROMPT)]
        engine.submit(Submit(GenerateRequest(str(i), prompt, [], sampling, b""), None))
    while engine.has_unfinished:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            tokens[int(output.request_id)] += output.token_ids
    return tokens


class Gaps:
    """Times what lies between one decode step's forward and the next one's."""

    def __init__(self, runner: ModelRunner, num_tokens: int) -> None:
        self._run, self._wait, self._num_tokens = runner.forward.run, runner.wait, num_tokens
        self._is_cuda = runner.device.type == "cuda"
        self._marks: list[tuple[Any, Any, float, float, float]] = []
        self._waited_s = 0.0
        runner.forward.run, runner.wait = self.run, self.wait  # type: ignore[method-assign]

    def run(self, batch: Any, agreed: Any, *args: Any) -> Any:
        if agreed.kind is not StepKind.DECODE or agreed.batch.num_tokens != self._num_tokens:
            return self._run(batch, agreed, *args)
        began, begin = time.perf_counter(), self._mark()
        output = self._run(batch, agreed, *args)
        self._marks.append((begin, self._mark(), began, time.perf_counter(), self._waited_s))
        return output

    def wait(self, launched: Any) -> Any:
        if launched.ended is not None:
            began = time.perf_counter()
            launched.ended.synchronize()
            self._waited_s += time.perf_counter() - began
        return self._wait(launched)

    def medians_us(self) -> tuple[float, float, float]:
        """Return the gap on the device, the host's work in it, and a whole step."""
        if self._is_cuda:
            torch.cuda.synchronize()
        gaps, hosts, steps = [], [], []
        for one, two in zip(self._marks, self._marks[1:], strict=False):
            host = two[2] - one[3]
            gaps.append(one[1].elapsed_time(two[0]) / 1e3 if self._is_cuda else host)
            hosts.append(host - (two[4] - one[4]))
            steps.append(two[2] - one[2])
        gap, host, step = (1e6 * statistics.median(each) for each in (gaps, hosts, steps))
        return gap, host, step

    def _mark(self) -> Any:
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def part_overlap(at: Setting) -> Iterator[Row]:
    """The overlapped loop and the plain one: equal tokens, and what lies between two steps."""
    many = at.pick(64, 4)
    rules = [GREEDY, replace_sampling(temperature=0.8, top_p=0.9, seed=3)]
    mixed = [
        replace_sampling(rules[i % 2], max_tokens=5 + 11 * i % 40) for i in range(min(many, 16))
    ]
    sizes = tuple(2**i for i in range(many.bit_length()))
    full = CompilationConfig(cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=sizes)
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as path:
        save_random_checkpoint(at, Path(path))
        for name, overlap in (("plain", False), ("overlapped", True)):
            config = engine_config(at, path, many, overlap=overlap, compilation=full)
            runner = ModelRunner(RankContext(config))
            found[name] = generate(config, runner, mixed)
            del runner
            config = replace(config, dtype="bfloat16")
            runner = ModelRunner(RankContext(config))
            gaps = Gaps(runner, many)
            generate(config, runner, [replace_sampling(max_tokens=64)] * many)
            figures = zip(
                ("gap between replays", "host time of a step", "engine's step"),
                gaps.medians_us(),
                strict=True,
            )
            for what, value in figures:
                yield Row(f"{what}, {name}: {many}", value=value, unit="us")
    differ = sum(a != b for a, b in zip(*found.values(), strict=True))
    note = f"{differ} of {len(mixed)} requests differ"
    yield Row("tokens, overlapped against plain", error=differ, limit=0.0, note=note)


class Drafts:
    """Keeps what a runner drafts, and times its steps of a number of tokens."""

    def __init__(self, runner: ModelRunner, num_tokens: int) -> None:
        self.found: list[list[list[int]]] = []
        self._execute, self._num_tokens = runner.execute, num_tokens
        self._times: list[float] = []
        runner.execute = self.execute  # type: ignore[method-assign]

    def execute(self, plan: Any, agreed: Any, *args: Any) -> Any:
        began = time.perf_counter()
        sampled = self._execute(plan, agreed, *args)
        if agreed.num_scheduled_tokens == (self._num_tokens,):
            self._times.append(time.perf_counter() - began)
        self.found.append(sampled.drafts)
        return sampled

    def median_us(self) -> float:
        return 1e6 * statistics.median(self._times)


def part_drafts(at: Setting) -> Iterator[Row]:
    """Drafts of the model's own layer, replayed and eager: equal, and right tokens."""
    many = at.pick(16, 4)
    sizes = tuple(2**i for i in range(many.bit_length()))
    samplings = [replace_sampling(max_tokens=24)] * many
    full = CompilationConfig(cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=sizes)
    tokens, drafts = dict[str, list[Any]](), dict[str, list[Any]]()
    with tempfile.TemporaryDirectory() as path:
        save_random_mtp(at, Path(path))
        for name, compilation, num_drafts in (
            ("no drafts", full, 0),
            ("eager", CompilationConfig(cudagraph_mode="NONE"), NUM_DRAFTS),
            ("replayed", full, NUM_DRAFTS),
        ):
            config = engine_config(at, path, many, compilation=compilation)
            if num_drafts:
                cache = replace(config.cache, has_mtp=True)
                config = replace(config, cache=cache, speculation=SpeculationConfig(num_drafts))
            runner = ModelRunner(RankContext(config))
            kept = Drafts(runner, many * (1 + num_drafts))
            tokens[name], drafts[name] = generate(config, runner, samplings), kept.found
            title = f"step of {1 + num_drafts} tokens a sequence, {name}: {many}"
            yield Row(title, value=kept.median_us(), unit="us")
    for kind, found, one, two in (
        ("drafts", drafts, "replayed", "eager"),
        ("tokens", tokens, "replayed", "eager"),
        ("tokens", tokens, "replayed", "no drafts"),
    ):
        differ = sum(a != b for a, b in zip(found[one], found[two], strict=True))
        # A step of several tokens of a sequence may round unlike one of a single token.
        limit = many / 8 if two == "no drafts" else 0.0
        note = f"{differ} of {len(found[one])} differ"
        yield Row(f"{kind}, {one} against {two}", error=differ, limit=limit, note=note)


def replace_sampling(sampling: Sampling = GREEDY, **fields: Any) -> Sampling:
    """Return a sampling with other fields."""
    names = Sampling.__struct_fields__
    return Sampling(**({name: getattr(sampling, name) for name in names} | fields))


def part_sealed(at: Setting) -> Iterator[Row]:
    """Every way to sample, with a pool of a given size and a strict seal: nothing is built late."""
    cases = [
        ("greedy", {}),
        ("top-p", {"temperature": 0.8, "top_p": 0.9}),
        ("top-k", {"temperature": 0.8, "top_k": 20}),
        ("min-p", {"temperature": 0.8, "min_p": 0.1}),
        ("logprobs", {"num_logprobs": 3, "num_prompt_logprobs": 1}),
    ]
    with tempfile.TemporaryDirectory() as path:
        # A kernel that another part left in Triton's cache would not count as built.
        os.environ["TRITON_CACHE_DIR"] = str(Path(path) / "triton")
        save_random_checkpoint(at, Path(path))
        config = engine_config(at, path, 4, compilation=CompilationConfig(sealed="strict"))
        runner = ModelRunner(RankContext(config))

        def sealed(name: str, fields: dict[str, Any]) -> Row:
            generate(config, runner, [replace_sampling(max_tokens=4, **fields)])
            return Row(f"sealed, {name}", error=0.0, limit=0.0)

        yield from attempts(sealed, cases)
    yield Row("late compilations", error=float(counter.num_late_compilations), limit=0.0)
