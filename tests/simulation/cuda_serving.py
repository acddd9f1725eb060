"""One engine, or a prefill and a decode engine, with what their plans call for.

On the simulated device each engine of a pair computes on a stream of its own, as two processes
would, and KV crosses by way of both block stores. Real are engines, handoffs and reads; instead of
two threads and their sockets, calls are answered between steps, in an order that the seed chooses.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from cluster.config import EngineConfig, Role
from cluster.engine.engine import Engine
from cluster.group.context import RankContext
from cluster.kv.handoff import HandoffMetadata, KVHolder
from cluster.kv.reads import KVPulls, max_chunk_blocks
from cluster.kv.transport.puller import KVPuller
from cluster.kv.transport.store import BlockStore
from cluster.rank.leader import assemble_engine
from cluster.rank.runner import ModelRunner
from cluster.wire.group_messages import ReadEnded
from cluster.wire.messages import (
    EngineOutput,
    GenerateRequest,
    KVAnswer,
    KVCall,
    KVRead,
    KVSource,
    RankProcess,
    RowAdmission,
    StepPlan,
    Submit,
)
from serve.config import engine_config
from serve.llm import LLM
from serve.requests.sampling import Resolver, SamplingParams

COPIES_PER_STEP = 3
"""To the device: token ids, positions, and everything else that a step fills anew."""
SAMPLED_COPIES = 1
"""One more where other rows are sampled than in the step before, or a sequence has come."""
EVENT_WAITS_PER_STEP = 1
STEPS, COPIES, TRANSFERS = "steps", "copies", "transfers"
"""What is called for: copies of pinned memory to the device, and times that a KV store copies
blocks, in either direction."""
LEASE_S = 30.0
"""Of a clock that stands still."""


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    prompt: list[int]
    params: SamplingParams


class Watched:
    """Counts what the plans call for that a runner launches from now on."""

    def __init__(self, runner: ModelRunner) -> None:
        self.called: Counter[str] = Counter()
        self._sampled: list[int] | None = None
        """The rows whose parameters are on the device."""
        launch = runner.launch

        def watched(plan: StepPlan, *rest: Any) -> Any:
            self.called.update({STEPS: 1, COPIES: self._num_copies(plan)})
            return launch(plan, *rest)

        runner.launch = watched  # type: ignore[method-assign]

    def _num_copies(self, plan: StepPlan) -> int:
        num_copies = COPIES_PER_STEP + sum(map(_num_rule_copies, plan.admitted))
        if plan.admitted:
            self._sampled = None
        rows = [row for row, i in zip(plan.rows, plan.output_index, strict=True) if i >= 0]
        if not rows or rows == self._sampled:
            return num_copies
        self._sampled = rows
        return num_copies + SAMPLED_COPIES


def _num_rule_copies(admission: RowAdmission) -> int:
    if admission.rules is None:
        return 0
    return 2 * bool(admission.rules.rules.biases) + bool(admission.rules.computed_token_ids)


class Single:
    """One engine: `LLM`."""

    def __init__(self, model: Path, device: str, options: dict[str, Any]) -> None:
        self._llm = LLM(model, device=device, **options)
        self._watched = Watched(self._llm.runner)

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        prompts = [request.prompt for request in requests]
        outputs = self._llm.generate(prompts, [request.params for request in requests])
        return [output.outputs[0].token_ids for output in outputs]

    def called(self) -> Counter[str]:
        return self._watched.called.copy()

    def close(self) -> None:
        self._llm.runner.close()


# --- two engines ----------------------------------------------------------------------------------

_SOURCE = KVSource(0, "boot", 1, -1, "tcp://prefill", RankProcess(0, "prefill"))


class Handover(KVPuller):
    """The real reader, but for its thread, what its reads need of the world, and the holder."""

    def __init__(self, source: BlockStore, target: BlockStore) -> None:
        self.called: Counter[str] = Counter()
        self.holder = KVHolder(LEASE_S, _no_time)
        self._source, self._target = source, target
        block_bytes = self._target.block_bytes
        self.reads = KVPulls(self, tp_rank=0, block_bytes=block_bytes, clock=_no_time)
        self._todo: deque[Callable[[], None]] = deque()

    def run_one(self) -> None:
        """Do what a thread would have done next."""
        if self._todo:
            self._todo.popleft()()

    def take_finished(self) -> list[ReadEnded]:
        return self.reads.take_finished()

    def _post(self, command: Callable[[], None]) -> None:
        self._todo.append(command)

    # --- what the reads need of the world ---

    def send(self, source: KVSource, call: KVCall) -> None:
        self._todo.append(lambda: self._answer(call))

    def _answer(self, call: KVCall) -> None:
        alive = self.holder.answer(call, max_chunk_blocks(self._target.block_bytes))
        blocks: list[memoryview] = []
        if isinstance(call, KVRead):
            assert alive, f"handoff {call.handoff_id}: wanted it alive"
            blocks = self._source.gather(call.block_ids)
            self.called[TRANSFERS] += 1
        # As it leaves the sender: what is written into its memory later does not show.
        sent = [memoryview(bytes(block)) for block in blocks]
        answer = KVAnswer(call.handoff_id, type(call).__name__, alive)
        self._todo.append(lambda: self.reads.on_answer(_SOURCE, answer, sent))

    def is_mapped(self, source: KVSource) -> bool:
        return False

    def copy(self, source: KVSource, source_ids: list[int], ids: list[int]) -> None:
        raise OSError("wanted a mapped source")

    def write(self, ids: list[int], blocks: list[memoryview]) -> None:
        self._target.scatter(ids, blocks)
        self.called.update({COPIES: len(ids), TRANSFERS: 1})

    def forget(self, source: KVSource) -> None:
        """Nothing is open."""


def _no_time() -> float:
    return 0.0


class _Side:
    """One engine of a pair, and the stream that it computes on."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._stream = torch.cuda.Stream() if config.device == "cuda" else None
        with self.computing():
            self.runner = ModelRunner(RankContext(config))
            self.store = BlockStore(self.runner.kv_pool)
        self.watched = Watched(self.runner)
        self.engine: Engine

    @contextmanager
    def computing(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def assemble(self, handover: Handover) -> None:
        spec = self.runner.kv_spec
        metadata = HandoffMetadata([_SOURCE], spec.block_bytes, spec.layout, LEASE_S)
        is_prefill = self.config.role is Role.PREFILL
        self.engine = assemble_engine(
            self.config,
            self.runner,
            holder=handover.holder if is_prefill else None,
            metadata=metadata,
            reader=None if is_prefill else handover,
        )

    def step(self) -> list[EngineOutput]:
        with self.computing():
            return self.engine.step()


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, model: Path, device: str, options: dict[str, Any]) -> None:
        config = engine_config({"model": str(model), "device": device, **options})
        self._prefill = _Side(replace(config, role=Role.PREFILL))
        self._decode = _Side(replace(config, role=Role.DECODE))
        self._sides = (self._prefill, self._decode)
        self._handover = Handover(self._prefill.store, self._decode.store)
        for side in self._sides:
            side.assemble(self._handover)
        self._random = random.Random(0)
        self._num_requests = 0

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        asked = [self._message(request) for request in requests]
        tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
        self._random.seed(str(requests))
        for request in asked:
            self._prefill.engine.submit(Submit(request, None))
        by_id = {request.request_id: request for request in asked}
        while any(side.engine.has_unfinished for side in self._sides):
            for side in self._sides:
                for output in side.step():
                    assert not output.error, output.error
                    tokens[output.request_id] += output.token_ids
                    if output.handoff is not None:
                        self._resume(by_id[output.request_id], output)
            for _ in range(self._random.randint(0, 3)):
                self._handover.run_one()
        return list(tokens.values())

    def _resume(self, request: GenerateRequest, output: EngineOutput) -> None:
        resumed = msgspec.structs.replace(request, output_token_ids=output.token_ids)
        self._decode.engine.submit(Submit(resumed, output.handoff))

    def _message(self, request: Request) -> GenerateRequest:
        config = self._prefill.config
        resolver = Resolver(
            request.params,
            max_model_len=config.max_model_len,
            vocab_size=self._prefill.runner.model_config.vocab_size,
            eos_token_ids=(),
            grammar_text=str,
        )
        self._num_requests += 1
        [sampling] = resolver.choices(len(request.prompt))
        name = str(self._num_requests)
        return GenerateRequest(name, request.prompt, [], sampling, "", b"")

    def called(self) -> Counter[str]:
        return sum((side.watched.called for side in self._sides), self._handover.called.copy())

    def close(self) -> None:
        for side in self._sides:
            side.runner.close()
