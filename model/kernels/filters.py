"""Top-k and top-p in torch functions: what a CPU computes, and what the GPU kernel must equal.

Neither sorts a vocabulary. Rows are filtered one by one: a row's result cannot depend on another
one, and a row that asks for nothing is only copied.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch

NUM_BINS = 256
"""Of a row's likelier tokens; more of them leave less to sort and more to count."""


def filter_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Set tokens outside of top-k, then those outside of top-p, to -inf.

    Top-k keeps ties with the k-th token. Top-p (nucleus sampling; Holtzman et al., 2020) keeps the
    smallest set of likeliest tokens whose mass, in float64, reaches `top_p`, the lowest ids among
    equals, and always one. logits: float32 [B, V]; top_k: int64 [B], 0 keeps all; top_p: float32
    [B], 1 keeps all; None keeps all of every row.
    """
    filtered = logits.clone()
    counts = [0] * len(logits) if top_k is None else top_k.tolist()
    masses = [1.0] * len(logits) if top_p is None else top_p.tolist()
    for row, k, p in zip(filtered, counts, masses, strict=True):
        if 0 < k < len(row):
            row.masked_fill_(row < row.topk(k, sorted=False).values.amin(), -torch.inf)
        if p < 1:
            _keep_top_p(row, p)
    return filtered


def _keep_top_p(row: torch.Tensor, p: float) -> None:
    """Filter one row [V] in place: only the tokens of the bin in which the mass reaches p are
    sorted."""
    weights = row.double()
    weights = weights.sub_(weights.amax()).exp_()
    total = weights.sum()
    # Tokens below a V-th of 1 - p have less than 1 - p together. Half of that leaves room for
    # rounding.
    candidates = (weights >= (1 - p) / 2 * total / len(row)).nonzero().squeeze(1)
    if not len(candidates):
        return  # not numbers
    logits, weights = row[candidates], weights[candidates]
    below = logits.amax() - logits
    bins = (below * ((NUM_BINS - 1) / below.amax().clamp(min=1e-30))).long()
    masses = bins.bincount(weights, minlength=NUM_BINS)
    masses_before = masses.cumsum(0) - masses
    last = (masses_before < p * total).sum() - 1
    edge = (bins == last).nonzero().squeeze(1)
    edge = edge[logits[edge].argsort(descending=True, stable=True)]
    mass_before = masses_before[last] + weights[edge].cumsum(0) - weights[edge]
    is_kept = bins < last
    is_kept[edge] = mass_before < p * total
    row.fill_(-torch.inf)
    row[candidates[is_kept]] = logits[is_kept]
