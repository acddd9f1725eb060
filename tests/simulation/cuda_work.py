"""What runs on the simulated CUDA device: one engine, or two that hand KV over, and requests.

Every model family runs in every graph mode. What a run must give are the tokens of a plain engine
on the CPU, and as many copies and waits as its plans call for.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from cuda_device import DEVICE_WAITS, EVENT_WAITS, PAGEABLE, PINNED, STREAM_WAITS, Order
from cuda_serving import COPIES, EVENT_WAITS_PER_STEP, STEPS, TRANSFERS, Pair, Request, Single
from cuda_torch import simulated

from serve.requests.sampling import SamplingParams

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
    "3-PIECEWISE": {"compilation": {"cudagraph_mode": "PIECEWISE", **_PIECES}},
    "3-FULL": {"compilation": {"cudagraph_mode": "FULL", **_PIECES}},
    "3-FULL_AND_PIECEWISE": {"compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE", **_PIECES}},
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
    """One way to serve."""

    family: str
    mode: str
    is_overlapped: bool = False
    is_pair: bool = False
    """A prefill and a decode engine."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `LLM`."""
        overlap = "on" if self.is_overlapped else "off"
        return {**SIZES, **MODES[self.mode], "overlap": overlap}

    @property
    def name(self) -> str:
        """Everything but the family."""
        words = [self.mode, "overlapped" if self.is_overlapped else "plain"]
        return " ".join(words + ["pair"] * self.is_pair)

    def __str__(self) -> str:
        return f"{self.family} {self.name}"


def all_ways() -> list[Case]:
    """Return every way to serve, for one family."""
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
    """Start what a case says."""
    torch._dynamo.reset()
    return (Pair if case.is_pair else Single)(model, device, case.options)


class Oracle:
    """A plain engine of each family on the CPU."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._engines: dict[str, Single | Pair] = {}
        self._tokens: dict[tuple[str, int], list[list[int]]] = {}

    def tokens(self, family: str, seed: int) -> list[list[int]]:
        """Return the tokens of a trace."""
        if family not in self._engines:
            model = checkpoint(self.root, family)
            self._engines[family] = start(Case(family, "eager"), model, "cpu")
        if (family, seed) not in self._tokens:
            self._tokens[family, seed] = self._engines[family].generate(trace(seed))
        return self._tokens[family, seed]


def findings(wanted: list[list[int]], found: list[list[int]]) -> list[str]:
    """Return which requests got other tokens than they should."""
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
