"""What a step computed, on its way from the device to messages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from cluster.messages import PromptTargets, StepPlan, TokenLogprobs
from cluster.rank.buffers import upload_once
from model.sampler import SamplerOutput, score

MAX_SCORED_ROWS = 256
"""Prompt tokens whose logits exist at once: 130 MB of them for a vocabulary of 128,000. All of a
chunk's would be as much memory as the KV cache leaves."""

Logits = Callable[[torch.Tensor], torch.Tensor | None]
"""Hidden states [N, E] to logits [N, V] on rank 0, None on others: a collective, so every rank
calls it equally often."""


def to_host(
    output: SamplerOutput, wants_logprobs: list[int]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Copy a step's samples to the host, which waits for the device.

    Returns token ids, and logprobs aligned with them or empty.
    """
    token_ids = output.token_ids.tolist()
    if output.logprobs is None:
        return token_ids, []
    assert output.ranks is not None
    assert output.top_token_ids is not None
    assert output.top_logprobs is not None
    columns = zip(
        output.logprobs.tolist(),
        output.ranks.tolist(),
        output.top_token_ids.tolist(),
        output.top_logprobs.tolist(),
        strict=True,
    )
    logprobs = [
        TokenLogprobs(logprob, rank, ids[:wanted], values[:wanted]) if wanted >= 0 else None
        for wanted, (logprob, rank, ids, values) in zip(wants_logprobs, columns, strict=True)
    ]
    return token_ids, logprobs


def prompt_logprobs(
    compute_logits: Logits, hidden: torch.Tensor, plan: StepPlan
) -> list[list[TokenLogprobs]]:
    """Return the log-probabilities of the plan's prompt targets, on rank 0. hidden: [T, E]."""
    if not plan.prompt_targets:
        return []
    starts = [0, *accumulate(plan.num_new)]
    return [
        _score_prompt(compute_logits, hidden[starts[targets.index] :], targets)
        for targets in plan.prompt_targets
    ]


def _score_prompt(
    compute_logits: Logits, hidden: torch.Tensor, targets: PromptTargets
) -> list[TokenLogprobs]:
    """hidden: [at least as many as targets, E]"""
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets.token_ids), MAX_SCORED_ROWS):
        token_ids = targets.token_ids[start : start + MAX_SCORED_ROWS]
        logits = compute_logits(hidden[start : start + len(token_ids)])
        if logits is None:
            continue
        wanted = upload_once(token_ids, torch.int64, logits.device)
        scored = score(logits, wanted, targets.num_logprobs)
        _, logprobs = to_host(scored, [targets.num_logprobs] * len(token_ids))
        found += [entry for entry in logprobs if entry is not None]
    return found
