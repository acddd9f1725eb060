"""What runs on the simulated CUDA device: the engine, with requests of every kind."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cuda_device import CudaDevice, Order
from cuda_torch import simulated

from serve.llm import LLM
from serve.sampling import SamplingParams

SIZES: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_kv_blocks": 60,
    "dtype": "float32",
}
NUM_REQUESTS = 8
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.5, "logit_bias": {5: 2.0, 9: -3.0}},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1},
)
_BATCHES = (1, 2, 4, 8)
_FULL = {"level": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": _BATCHES}
_PIECES = {
    "level": 3,
    "compiler": "eager",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": _BATCHES,
    "capture_num_tokens": (8, 16, 48),
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "eager-plain": {"enforce_eager": True, "overlap": "off"},
    "eager-overlapped": {"enforce_eager": True, "overlap": "on"},
    "full-plain": {"compilation": _FULL, "overlap": "off"},
    "full-overlapped": {"compilation": _FULL, "overlap": "on"},
    "pieces-plain": {"compilation": _PIECES, "overlap": "off"},
    "pieces-overlapped": {"compilation": _PIECES, "overlap": "on"},
}


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    token_ids: list[list[int]]
    """Per request."""
    num_steps: int = 0
    counts: Counter[str] | None = None
    """Of the steps alone."""


def generate(llm: LLM, seed: int = 1) -> list[list[int]]:
    """Serve mixed requests, whose prompts and lengths the seed chooses."""
    drawn = random.Random(seed)
    vocab_size = llm.runner.model_config.vocab_size
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        prompts.append([drawn.randrange(vocab_size) for _ in range(drawn.randint(1, 24))])
        max_tokens = drawn.randint(1, 16)
        kind = KINDS[index % len(KINDS)]
        params.append(
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=7 * index, **kind)
        )
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def num_steps(llm: LLM) -> int:
    """Return how many steps have run."""
    counts = llm.runner.step_counts.counts()
    return sum(int(n) for key, n in counts.items() if key[0] == "steps_total")


def run_on_cpu(model: Path | None = None) -> Outcome:
    """Return what every run must give."""
    llm = LLM(model, device="cpu", **SIZES, **CONFIGURATIONS["eager-plain"])
    return Outcome(generate(llm))


def run_on_device(
    configuration: str, order: Order, seed: int = 0, model: Path | None = None
) -> Outcome:
    """Serve the requests on the simulated device."""
    with simulated(order, seed) as device:
        return run_steps(device, configuration, model)


def run_steps(device: CudaDevice, configuration: str, model: Path | None = None) -> Outcome:
    """Serve the requests on a device that the caller simulates."""
    llm = LLM(model, device="cuda", **SIZES, **CONFIGURATIONS[configuration])
    before = Counter(device.counts)
    num_before = num_steps(llm)
    token_ids = generate(llm)
    counts = device.counts - before
    llm.runner.close()
    return Outcome(token_ids, num_steps(llm) - num_before, counts)


torch.set_num_threads(1)
