"""Checkpoints whose layers round their inputs, as an offline engine serves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serve.llm import LLM, SamplingParams

COMPILATIONS = [
    {"level": 0},
    {"level": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    pytest.param({"level": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}, marks=pytest.mark.slow),
]


def assert_served(
    path: Path, held: str, compilation: dict[str, Any], reference: Any, bound: float
) -> None:
    """Serve it compiled in this way, and compare greedy tokens with the likeliest ones of a model
    that rounds likewise: nearly all are that, and none is further below it than `bound`."""
    given: dict[str, Any] = {"dtype": "float32", "kv_memory": "16MiB", "max_num_seqs": 2}
    llm = LLM(str(path), quantization=held, compilation_config=compilation, **given)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[5, 77, 130, 400, 9], [320, 8, 8, 61] * 20]
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    for prompt, tokens in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.amax(-1) - logits[range(len(tokens)), tokens]
        assert (gaps == 0).float().mean() > 0.8 and gaps.max() < bound, gaps
