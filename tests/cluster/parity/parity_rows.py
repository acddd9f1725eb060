"""What a row of the matrix is: a model, how it is run, and the requests that it gets."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from local_ranks import BLOCK_SIZE, config_of
from parity_process import Report
from wire_structs import request_of, rules_of

from cluster.config import EngineConfig, LoraModule, SpeculationConfig, TransferConfig
from cluster.wire.messages import (
    FIRST_LOADED_ID,
    EngineOutput,
    GenerateRequest,
    LoraAdapter,
    StepKind,
)
from compile.config import CUDAGraphMode
from compile.dispatch import BatchDescriptor
from model.config import ModelConfig, fingerprint
from model.quantization import WeightFormat

NUM_TOKENS = 40
SEEDED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2**63 + 1}


@dataclass(frozen=True)
class Request:
    """One request of a load, and when it comes and goes."""

    prompt: list[int]
    max_tokens: int = NUM_TOKENS
    at: int | None = 0
    """The step before which it comes, where steps are counted; None: when nothing is left."""
    leaves_after: int = 0
    """Outputs after which its client leaves; 0: it stays."""
    is_second_turn: bool = False
    """The prompt and the output of the request before it stand before its own prompt."""
    sampling: dict[str, Any] = field(default_factory=dict)
    lora: int = 0
    """The oracle's adapter, from 1 on; 0: none."""
    is_lora_loaded: bool = False
    """The engine did not start with it."""

    @property
    def is_greedy(self) -> bool:
        return not self.sampling.get("temperature")

    def message(self, i: int) -> GenerateRequest:
        request = request_of(str(i), self.prompt, max_tokens=self.max_tokens, **self.sampling)
        lora = self.lora + self.is_lora_loaded * FIRST_LOADED_ID
        return msgspec.structs.replace(request, adapter_id=lora)


@dataclass
class Run:
    """What came of a row. Requests and outputs are in the same order."""

    row: Row
    oracle: Any
    requests: list[Request]
    config: EngineConfig
    outputs: list[list[EngineOutput]]
    pools: dict[str, list[Report]]
    """Ranks by pool, each leader before its followers; `mixed` where there is one pool."""
    replays_by_step: list[int] | None = None
    """Where the engine of one leader was stepped by hand: graphs replayed in each step of its log;
    each piece is one."""
    num_pieces: int = 0

    @property
    def tokens(self) -> list[list[int]]:
        return [[token for o in outputs for token in o.token_ids] for outputs in self.outputs]

    @property
    def num_cached(self) -> list[int]:
        return [max(output.num_cached_tokens for output in outputs) for outputs in self.outputs]

    @property
    def leader(self) -> Report:
        """The first one, where its pool is the only one."""
        return self.pools["mixed"][0]

    @property
    def num_preemptions(self) -> int:
        ranks = [rank for pool in self.pools.values() for rank in pool]
        return sum(rank.stats.scheduler.num_preemptions for rank in ranks)


Requests = Callable[[Any], list[Request]]
"""Of an oracle's model."""


@dataclass(frozen=True)
class Load:
    """Requests, the room that they have, and what must come of that beside tokens."""

    requests: Requests
    num_kv_blocks: int | Callable[[int | None], int] = 600
    """Or what it is where a sequence's window has so many tokens."""
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int = 256
    graph_tokens: tuple[int, ...] = ()
    """Captured for steps of prompts."""
    expect: Callable[[Run], None] = lambda run: None
    features: str = ""

    @property
    def graph_bs(self) -> tuple[int, ...]:
        return tuple(
            sorted({*(n for n in (1, 2, 4, 8) if n < self.max_num_seqs), self.max_num_seqs})
        )


@dataclass(frozen=True)
class Row:
    """One case. Oracles: transformers for greedy tokens; one eager rank for drawn ones."""

    shape: str
    load: str
    tp: int = 1
    dp: int = 1
    kv: str = ""
    """The transport between a prefill and a decode pool; empty: one pool for both."""
    level: int = 0
    mode: CUDAGraphMode = CUDAGraphMode.NONE
    compiler: str = "auto"
    loses: int | None = None
    """The prefill rank that forgets the handoff of each request's first attempt."""
    overlap: bool = False
    scores: bool = False
    """Decode steps that replay a full graph replay one that scores the vocabulary too."""
    drafts: int = 0
    """Draft tokens of a sequence in a step, at most."""
    has_mtp: bool = False
    """Drafts are the MTP layer's."""
    has_fp8_kv: bool = False
    """The oracle is transformers with a cache of what e4m3 holds."""
    has_adapters: bool = False
    """Requests take turns: none, the first adapter, the second. The oracle has them merged."""
    loads_adapters: bool = False
    """The second one is loaded when the ranks are ready, into a slot that had another one."""
    held: WeightFormat = "none"
    """What linear layers hold. The oracle's have the numbers that it stands for."""

    @property
    def id(self) -> str:
        words = [self.shape, self.load]
        words += [f"{self.tp}x{self.dp}"] * (self.tp * self.dp > 1)
        words += [self.kv] * bool(self.kv) + [f"loses {self.loses}"] * (self.loses is not None)
        words += [f"O{self.level} {self.mode.name}"] * (self.level > 0 or self.has_graphs)
        words += ["overlapped"] * self.overlap + ["scored"] * self.scores
        words += [f"{self.drafts} drafts"] * (self.drafts > 0) + ["mtp"] * self.has_mtp
        words += ["fp8_kv"] * self.has_fp8_kv + ["adapters"] * self.has_adapters
        words += ["loaded"] * self.loads_adapters
        words += [self.held] * (self.held != "none")
        return "-".join([*words, *[self.compiler] * (self.compiler != "auto")]).replace(" ", "_")

    @property
    def has_graphs(self) -> bool:
        return self.mode is not CUDAGraphMode.NONE

    @property
    def is_eager(self) -> bool:
        return self.level == 0 and not self.has_graphs

    def alone(self) -> Row:
        """Return what has the same requests on one eager rank."""
        return Row(
            self.shape,
            self.load,
            has_fp8_kv=self.has_fp8_kv,
            has_adapters=self.has_adapters,
            held=self.held,
        )

    def requests(self, oracle: Any) -> list[Request]:
        requests = LOADS[self.load].requests(oracle)
        if self.has_adapters:
            # A second turn has the adapter of the first.
            turns = [(i - request.is_second_turn) % 3 for i, request in enumerate(requests)]
            requests = [
                replace(r, lora=turn, is_lora_loaded=self.loads_adapters and turn == 2)
                for r, turn in zip(requests, turns, strict=True)
            ]
        return requests

    def adapters_in_turn(self, oracle: Any) -> list[list[LoraAdapter]]:
        """Return what ranks have to have loaded, one after the other, before any request."""
        if not self.loads_adapters:
            return []
        return [
            [LoraAdapter(FIRST_LOADED_ID + lora, path.name, str(path), fingerprint(path))]
            for lora, path in enumerate(oracle.adapters, start=1)
        ]

    def config(self, oracle: Any, cache_dir: str) -> EngineConfig:
        load = LOADS[self.load]
        blocks = load.num_kv_blocks
        graphs: dict[str, Any] = {}
        if self.has_graphs:
            graphs["cudagraph_capture_sizes"] = load.graph_bs
            graphs["capture_num_tokens"] = load.graph_tokens or None
        config = config_of(
            oracle.path,
            load.max_model_len,
            num_kv_blocks=blocks if isinstance(blocks, int) else blocks(window_of(oracle)),
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            parallel=(self.tp, self.dp),
            level=self.level,
            cudagraph_mode=self.mode,
            compiler=self.compiler,
            cache_dir=f"{cache_dir}/{self.tp}x{self.dp}",
            poison_graph_pool=True,
            capture_logits=self.scores,
            sealed="strict",
            **graphs,
        )
        # The shortest run that may be looked for: drafts are many, and mostly wrong.
        speculation = SpeculationConfig(self.drafts, 3, 1) if self.drafts else None
        return replace(
            config,
            cache=replace(
                config.cache, dtype="fp8" if self.has_fp8_kv else "auto", has_mtp=self.has_mtp
            ),
            transfer=TransferConfig(self.kv or "auto"),
            overlap=self.overlap,
            speculation=speculation,
            quantization=self.held,
            lora_modules=tuple(
                LoraModule(path.name, str(path))
                for path in oracle.adapters[: 1 if self.loads_adapters else None]
            )
            if self.has_adapters
            else (),
            max_loras=2 if self.loads_adapters else 0,
            max_lora_rank=12,
        )


def window_of(oracle: Any) -> int | None:
    """Return how many of a sequence's tokens keep their blocks; None: all."""
    return ModelConfig.from_dir(oracle.path).kv_window


def prompts_for(oracle: Any, seed: int, n: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    vocab = oracle.model.config.vocab_size
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def drawn(seed: int, n: int, longest: int = 90, at: list[int | None] | None = None) -> Requests:
    """Return what draws so many random prompts, which come at these steps, or all at once."""

    def requests(oracle: Any) -> list[Request]:
        prompts = prompts_for(oracle, seed, n, longest)
        return [
            Request(prompt, at=when) for prompt, when in zip(prompts, at or [0] * n, strict=True)
        ]

    return requests


# --- the requests of each load, and what must come of them --------------------------------------


def arriving(oracle: Any) -> list[Request]:
    rng = random.Random(oracle.name)
    return [Request(prompt, at=rng.randint(0, 40)) for prompt in prompts_for(oracle, 2, 12)]


def prompts_came_in_chunks(run: Run) -> None:
    longest = max(len(request.prompt) for request in run.requests)
    assert longest > LOADS[run.row.load].max_num_batched_tokens


def with_one_head(oracle: Any) -> list[Request]:
    [head] = prompts_for(oracle, 4, 1, longest=1)
    head = head * 3 + list(range(40))
    prompts = [head + tail for tail in prompts_for(oracle, 5, 6, longest=20)]
    prompts.append(list(prompts[0]))  # the same again: all but its last token may be found
    return [Request(p, at=at) for p, at in zip(prompts, [0, 4, 4, 8, 12, 70, 90], strict=True)]


def the_head_was_found(run: Run) -> None:
    assert run.num_cached[0] == 0
    assert all(n >= 40 for n in run.num_cached[1:]), run.num_cached


def too_many(oracle: Any) -> list[Request]:
    # Where a window bounds what a sequence holds, only short ones that grow side by side want too
    # much.
    return drawn(6, 8, 90 if window_of(oracle) is None else 4)(oracle)


def some_were_pre_empted(run: Run) -> None:
    assert run.num_preemptions > 0 or window_of(run.oracle) == 1


def none_was_pre_empted(run: Run) -> None:
    assert run.num_preemptions == 0


def with_logprobs(oracle: Any) -> list[Request]:
    """Of all tokens of the vocabulary; and of a prompt's tokens, chunk by chunk."""
    [prompt] = prompts_for(oracle, 7, 1)
    [long] = prompts_for(oracle, 31, 1, longest=1)
    vocab = oracle.model.config.vocab_size
    return [
        Request(prompt, 8, sampling={"num_logprobs": vocab}),
        Request((long + list(range(200)))[:70], 1, None, sampling={"num_prompt_logprobs": 0}),
    ]


def long_prompt(oracle: Any) -> list[Request]:
    [prompt] = prompts_for(oracle, 8, 1)
    return [Request((prompt * 90)[:90])]


def two_heads(oracle: Any) -> list[Request]:
    # What the second writes evicts the head of the first, whose tail is found nevertheless.
    prompts = [list(range(80)), list(range(100, 160)), [*range(80), 7]]
    return [Request(prompt, at=None) for prompt in prompts]


def the_tail_was_found(run: Run) -> None:
    assert run.num_cached == [0, 0, 80]


RUN_DOWN_TOKENS = (4, 16, 32, 64)


def run_down(oracle: Any) -> list[Request]:
    """Every captured size is decoded, as sequences end one by one, and is a step of a prompt."""
    rng, vocab = random.Random(oracle.name), oracle.model.config.vocab_size
    shapes = [(rng.randint(1, 30), 4 + 3 * i, 0) for i in range(12)]
    shapes += [(num_tokens - 1, 2, None) for num_tokens in RUN_DOWN_TOKENS]
    return [Request([rng.randrange(vocab) for _ in range(n)], m, at) for n, m, at in shapes]


def every_size_was_run(run: Run) -> None:
    load, mode = LOADS[run.row.load], run.row.mode
    assert {step["kind"] for step in run.leader.log} == {StepKind.DECODE, StepKind.MIXED}
    full = CUDAGraphMode.FULL
    decodes = [BatchDescriptor(bs, bs, True) for bs in load.graph_bs]
    mixed = [BatchDescriptor(n, min(n, load.max_num_seqs), False) for n in load.graph_tokens]
    wanted = decodes * (mode.decode_mode() is full) + mixed * (mode.mixed_mode() is full)
    assert set(run.leader.replays) == set(wanted)
    if run.row.has_graphs:
        captured = run.leader.captured
        is_piecewise = mode.mixed_mode() is CUDAGraphMode.PIECEWISE
        assert captured.batch_sizes == load.graph_bs * (mode.decode_mode() is full)
        assert captured.token_counts == load.graph_tokens * is_piecewise


def at_random(oracle: Any) -> list[Request]:
    rng, vocab = random.Random(11), oracle.model.config.vocab_size
    return [
        Request([rng.randrange(vocab) for _ in range(rng.randint(1, 100))], rng.randint(1, 40), at)
        for at in range(1100)
        if rng.random() < 0.15
    ]


def steps_had_all_sizes(run: Run) -> None:
    sizes = {step["num_scheduled_tokens"][0] for step in run.leader.log}
    assert len(run.leader.log) >= 1000
    assert {1, 2, 64} <= sizes and len(sizes) > 40, sorted(sizes)


def everything(oracle: Any) -> list[Request]:
    """Mixed arrivals, chunked prompts, prefix hits and pre-emption, all at once."""
    rng, vocab = random.Random(31), oracle.model.config.vocab_size
    head = [rng.randrange(vocab) for _ in range(24)]
    tails = [[rng.randrange(vocab) for _ in range(rng.randint(1, 60))] for _ in range(10)]
    prompts = [head + tail if i % 2 else tail for i, tail in enumerate(tails)]
    # Where a window bounds what a sequence holds, only short ones grow into one another.
    shorts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 4))] for _ in range(4)]
    prompts = prompts[:5] + shorts + prompts[5:]
    requests = [Request(prompt, at=3 * i) for i, prompt in enumerate(prompts)]
    return [*requests, Request([], at=None, is_second_turn=True)]


def everything_happened(run: Run) -> None:
    prompts_came_in_chunks(run)
    stats = run.leader.stats.scheduler
    assert stats.num_preemptions > 0
    *earlier, second_turn = run.num_cached
    assert second_turn > 0
    if window_of(run.oracle) is None:
        assert sum(earlier) > 0
    else:  # the longest prompt fits because what the window has passed is freed
        longest = max(len(request.prompt) for request in run.requests[:-1])
        assert longest > stats.num_blocks * BLOCK_SIZE
    if run.row.mode.decode_mode() is CUDAGraphMode.FULL:
        decoded = {key.num_seqs for key in run.leader.replays if key.uniform_decode}
        assert decoded == set(LOADS[run.row.load].graph_bs)


def seeded(oracle: Any) -> list[Request]:
    """Temperature divides the logits' last bits away."""
    one, other = prompts_for(oracle, 13, 2)
    warm = SEEDED | {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 2**63 + 5}
    return [Request(one, sampling=SEEDED), Request(other, at=3, sampling=warm)]


def seeded_in_chunks(oracle: Any) -> list[Request]:
    """Where three decode and four tokens fit, a prompt goes on by a token, and samples nothing."""
    return [
        Request(prompt, sampling=SEEDED | {"seed": i})
        for i, prompt in enumerate(prompts_for(oracle, 14, 5, longest=24))
    ]


def repeating(oracle: Any) -> list[Request]:
    """Prompts that say one thing over and over. Half of the answers have three tokens to choose
    from, of which runs come again and again."""
    rng, vocab = random.Random(oracle.name), oracle.model.config.vocab_size
    requests = list[Request]()
    for i in range(10):
        said = [rng.randrange(vocab) for _ in range(rng.randint(1, 9))]
        allowed = sum(1 << token for token in rng.sample(range(vocab), 3)).to_bytes(vocab, "little")
        rules = {"allowed_tokens": allowed.rstrip(b"\0")}
        if i % 4 == 1:
            rules |= {"frequency_penalty": 0.3, "repetition_penalty": 1.1, "presence_penalty": -0.2}
        few = SEEDED | {"seed": i, "rules": rules_of(**rules)}
        sampling = few if i % 2 else {}
        prompt = (said * 30)[: rng.randint(8, 60)]
        requests.append(Request(prompt, 20 + 4 * i, i, sampling=sampling))
    return requests


def drafts_were_right_and_wrong(run: Run) -> None:
    stats = [rank.stats.scheduler for rank in run.pools["mixed"]]
    num_tokens, num_accepted = (
        sum(getattr(each, name) for each in stats)
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert 10 < num_accepted < num_tokens - 10


def uneven(oracle: Any) -> list[Request]:
    rng, vocab = random.Random(11), oracle.model.config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 60))] for _ in range(14)]
    # Before the ninth all ranks sleep, by agreement, and wake again.
    return [Request(p, rng.randint(4, 50), None if i == 8 else 0) for i, p in enumerate(prompts)]


def ranks_had_uneven_work(run: Run) -> None:
    """A rank without work ran along, sizes were not its own, and each of two ranks had the most."""
    log = run.leader.log
    across = [step["num_scheduled_tokens"] for step in log]
    assert any(tokens[0] < tokens[-1] for tokens in across)
    assert any(tokens[0] > tokens[-1] for tokens in across)
    assert any(0 in tokens for tokens in across)
    assert any(0 not in tokens and len(set(tokens)) > 1 for tokens in across)
    assert {step["kind"] for step in log} == {StepKind.DECODE, StepKind.MIXED}


def cut(seed: int, n: int, max_outputs: int) -> Requests:
    """Return what asks for long answers, each of which is left; the request after them is not."""

    def requests(oracle: Any) -> list[Request]:
        rng, prompts = random.Random(3), prompts_for(oracle, seed, n, 150)
        left = [Request(p, 100, leaves_after=rng.randint(1, max_outputs)) for p in prompts]
        return [*left, Request(prompts[0], at=None)]

    return requests


CHUNKS = Load(
    drawn(3, 8, at=[0, 0, 1, 5, 9, 9, 20, 30]), expect=prompts_came_in_chunks, features="T02"
)
REPEATING = Load(repeating, 500, 8, 96, 160, (16, 96), features="T05")
POOLS = Load(drawn(11, 10, 150), 150, max_num_batched_tokens=64)
LOADS = {
    "one at a time": Load(drawn(1, 4, at=[None] * 4)),
    "arriving": Load(arriving),
    "chunks of 16": replace(CHUNKS, max_num_batched_tokens=16),
    "chunks of 23": replace(CHUNKS, max_num_batched_tokens=23),
    "prefix": Load(with_one_head, expect=the_head_was_found, features="T01"),
    # 70 blocks of 4 tokens hold one longest sequence and little more; eight want to run.
    "tiny pool": Load(
        too_many,
        lambda window: 70 if window is None else (window - 2) // 4 + 4,
        8,
        64,
        expect=some_were_pre_empted,
        features="T03",
    ),
    "logprobs": Load(with_logprobs, max_num_batched_tokens=24),
    # 23 blocks of a prompt and its output go through the smallest pool, beside nothing else.
    "long prompt": Load(long_prompt, 4, 16, 16, expect=none_was_pre_empted),
    "two heads": Load(two_heads, 50, expect=the_tail_was_found),
    "run down": Load(
        run_down,
        500,
        12,
        64,
        160,
        graph_tokens=RUN_DOWN_TOKENS,
        expect=every_size_was_run,
        features="D01 D02 D03",
    ),
    "repeating": REPEATING,
    "drafted": replace(REPEATING, expect=drafts_were_right_and_wrong),
    "at random": Load(
        at_random,
        500,
        12,
        64,
        160,
        graph_tokens=RUN_DOWN_TOKENS,
        expect=steps_had_all_sizes,
        features="J04 X01",
    ),
    # A pool of 60 blocks holds a longest sequence and little more; eight want to run. Where a
    # window bounds what a sequence holds, one of 12 holds the windows of three.
    "everything": Load(
        everything,
        lambda window: 60 if window is None else 12,
        8,
        24,
        220,
        graph_tokens=(8, 16, 24),
        expect=everything_happened,
    ),
    "seeded": Load(seeded, 60, 8, 24, 220, graph_tokens=(8, 24)),
    "seeded chunks": Load(seeded_in_chunks, 100, 4, 4, features="T02"),
    # Three long sequences fill a pool: some are pre-empted. Prompts come in chunks.
    "uneven": Load(
        uneven,
        60,
        4,
        24,
        128,
        graph_tokens=(8, 24),
        expect=ranks_had_uneven_work,
        features="P01 P02 P04 P10 P13 P20 P21",
    ),
    # The decode pool holds 150 blocks of 4 tokens: ten sequences do not fit at once.
    "pools": POOLS,
    "roomy pools": replace(POOLS, num_kv_blocks=900, expect=none_was_pre_empted),
    "few": replace(POOLS, requests=drawn(17, 4, 150), num_kv_blocks=400),
    "cut": replace(POOLS, requests=cut(14, 40, 30), num_kv_blocks=400),
    "cut early": replace(POOLS, requests=cut(18, 12, 6)),
}
