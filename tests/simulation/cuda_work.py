"""What is served on the simulated CUDA device: by one engine, or by two that hand KV over.

Every model family is served in every graph mode. What a run must give are the tokens of a plain
engine on the CPU, and as many copies and waits as its plans call for.

On the simulated device each engine of a pair computes on a stream of its own, as two processes
would, and KV crosses by way of both block stores. Real are engines, handoffs and reads; instead of
two threads and their sockets, calls are answered between steps, in an order that the seed chooses.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from cuda_device import DEVICE_WAITS, EVENT_WAITS, PAGEABLE, PINNED, STREAM_WAITS, Order
from cuda_torch import simulated

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
from serve.config import offline_pool
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


# --- one engine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
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
        metadata = HandoffMetadata([_SOURCE], spec.block_bytes, "", LEASE_S)
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
    def __init__(self, model: Path, device: str, options: dict[str, Any]) -> None:
        config = offline_pool({"model": str(model), "device": device, **options}).engine
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
        return GenerateRequest(name, request.prompt, [], sampling, b"")

    def called(self) -> Counter[str]:
        return sum((side.watched.called for side in self._sides), self._handover.called.copy())

    def close(self) -> None:
        for side in self._sides:
            side.runner.close()


# --- models, modes and requests -------------------------------------------------------------------

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny"
"""Its tokenizer serves all families."""
SHAPE: dict[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # So wide that outputs of different prompts differ.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4, **_EXPERTS},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 12, **_EXPERTS},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "kv_lora_rank": 20,
        "q_lora_rank": 28,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        **_EXPERTS,
    },
}
SIZES: dict[str, Any] = {
    "max_model_len": 80,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 60,
    "dtype": "float32",
    "threads_per_rank": 1,
}
_GRAPHS: dict[str, Any] = {
    "cudagraph_capture_sizes": (1, 2, 4, 6),
    "capture_num_tokens": (8, 16, 32),
}
_PIECES: dict[str, Any] = {"level": 3, "compiler": "eager", **_GRAPHS}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "0-FULL": {"compilation": {"level": 0, "cudagraph_mode": "FULL", **_GRAPHS}},
    "0-FULL_AND_PIECEWISE": {
        "compilation": {"level": 0, "cudagraph_mode": "FULL_AND_PIECEWISE", **_GRAPHS}
    },
    "3-PIECEWISE": {"compilation": {"cudagraph_mode": "PIECEWISE", **_PIECES}},
    "3-FULL": {"compilation": {"cudagraph_mode": "FULL", **_PIECES}},
    "3-FULL_AND_PIECEWISE, 3 streams": {
        "compilation": {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "max_num_streams": 3,
            **_PIECES,
        }
    },
}
NUM_REQUESTS = 8
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0, "frequency_penalty": 0.5, "logit_bias": {5: 2.0, 9: -3.0}},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1},
)


@dataclass(frozen=True)
class Case:
    family: str
    mode: str
    is_overlapped: bool = False
    is_pair: bool = False

    @property
    def options(self) -> dict[str, Any]:
        overlap = "on" if self.is_overlapped else "off"
        return {**SIZES, **MODES[self.mode], "overlap": overlap}

    def __str__(self) -> str:
        words = [self.family, self.mode, "overlapped" if self.is_overlapped else "plain"]
        return " ".join(words + ["pair"] * self.is_pair)


def all_ways() -> list[Case]:
    family = next(iter(FAMILIES))
    return [Case(family, *way) for way in product(MODES, (False, True), (False, True))]


def drawn_cases(seed: int) -> list[Case]:
    """Return a case for each family, with every mode; half overlap, and half are pairs."""
    drawn = random.Random(seed)
    num = len(FAMILIES)
    modes = [*MODES, *drawn.choices([*MODES], k=num - len(MODES))]
    halves = [[index < num // 2 for index in range(num)] for _ in range(2)]
    for each in (modes, *halves):
        drawn.shuffle(each)
    return [Case(*each) for each in zip(FAMILIES, modes, *halves, strict=True)]


@cache
def checkpoint(root: Path, family: str) -> Path:
    """Return a directory below `root` with a small random model."""
    import transformers

    path = root / family
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES[family]))
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path)
    assert json.loads((path / "config.json").read_text())["vocab_size"] == SHAPE["vocab_size"]
    return path


def trace(seed: int) -> list[Request]:
    """Return mixed requests. The first prompt takes two steps, and the first of them draws none."""
    drawn = random.Random(seed)
    requests = []
    for index in range(NUM_REQUESTS):
        length = drawn.randint(1, 20) if index else drawn.randint(40, 60)
        prompt = [drawn.randrange(SHAPE["vocab_size"]) for _ in range(length)]
        kind = KINDS[(index + seed) % len(KINDS)]
        max_tokens = drawn.randint(1, 8)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=7 * index, **kind)
        requests.append(Request(prompt, params))
    return requests


# --- runs -----------------------------------------------------------------------------------------


def start(case: Case, model: Path, device: str = "cuda") -> Single | Pair:
    torch._dynamo.reset()
    return (Pair if case.is_pair else Single)(model, device, case.options)


class Oracle:
    """A plain engine of each family on the CPU."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._engines: dict[str, Single | Pair] = {}
        self._tokens: dict[tuple[str, int], list[list[int]]] = {}

    def tokens(self, family: str, seed: int) -> list[list[int]]:
        if family not in self._engines:
            model = checkpoint(self.root, family)
            self._engines[family] = start(Case(family, "eager"), model, "cpu")
        if (family, seed) not in self._tokens:
            self._tokens[family, seed] = self._engines[family].generate(trace(seed))
        return self._tokens[family, seed]


def findings(wanted: list[list[int]], found: list[list[int]]) -> list[str]:
    pairs = enumerate(zip(wanted, found, strict=True))
    return [f"tokens of request {i}: wanted {w}, found {f}" for i, (w, f) in pairs if w != f]


def count_findings(called: Counter[str], counts: Counter[str]) -> list[str]:
    """Return what was waited for or copied more or less often than it was called for."""
    wanted = {
        EVENT_WAITS: EVENT_WAITS_PER_STEP * called[STEPS],
        STREAM_WAITS: called[TRANSFERS],
        PINNED: called[COPIES],
        PAGEABLE: 0,
    }
    waits = [name for name in counts if "wait" in name or "hidden" in name]
    return [
        f"{name}: wanted {wanted.get(name, 0)}, found {counts[name]}"
        for name in sorted({*wanted, *waits})
        if counts[name] != wanted.get(name, 0)
    ]


def serve(case: Case, oracle: Oracle, orders: Sequence[tuple[Order, int]]) -> Iterator[list[str]]:
    """Start a case in the first order and serve a trace in each; yield what was found wrong.

    The seed of an order is that of its trace too: none finds its own KV in the pool.
    """
    wanted = [oracle.tokens(case.family, seed) for _, seed in orders]
    model = checkpoint(oracle.root, case.family)
    with simulated(*orders[0]) as device:
        serving = start(case, model)
        for order, tokens in zip(orders, wanted, strict=True):
            device.reorder(*order)
            called, counts = serving.called(), Counter(device.counts)
            found = serving.generate(trace(order[1]))
            device.synchronize()
            called, counts = serving.called() - called, device.counts - counts
            counts[DEVICE_WAITS] -= 1
            yield findings(tokens, found) + count_findings(called, counts)
        serving.close()


def found_by(case: Case, oracle: Oracle, order: tuple[Order, int]) -> list[str]:
    """Return what is found wrong in one run, an error included."""
    try:
        [found] = serve(case, oracle, [order])
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return found


torch.set_num_threads(1)
