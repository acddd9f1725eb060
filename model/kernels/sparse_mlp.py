"""Routed experts in torch functions: what a CPU computes, and what the GPU kernel must equal.

Tokens are sorted by expert, so that an expert that has tokens multiplies all of them at once, and
one that has none is not read. Experts are a rank's own, numbered from `first_expert` on; tokens
that are routed to others' are left out.

Shapes: T tokens, E hidden size, X experts, Xr experts of this rank, K experts of a token, I
intermediate size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from model.kernels.elementwise import silu_and_mul

Products = Callable[[torch.Tensor, int], torch.Tensor]
"""Multiplies tokens [T, I] with the matrix of a rank's expert, by its number. Returns [T, O]."""


def route(
    router_logits: torch.Tensor, top_k: int, norm_topk_prob: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts by softmax and top-k, in float32. router_logits: [T, X].

    Returns the experts, int64 [T, K], and their weights, float32 [T, K], largest first, scaled to
    the sum 1 if `norm_topk_prob`.
    """
    probabilities = router_logits.softmax(-1, dtype=torch.float32)
    weights, experts = probabilities.topk(top_k, dim=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


def plain_products(matrices: torch.Tensor) -> Products:
    """Return products with matrices [Xr, O, I]."""
    return lambda rows, expert: F.linear(rows, matrices[expert])


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
    products: Callable[[torch.Tensor], Products] = plain_products,
) -> torch.Tensor:
    """Return what this rank's experts add to each token, summed in float32.

    x: [T, E]; experts, weights: as `route` returns them; gate_up: [Xr, 2 * I, E], gate first;
    down: [Xr, E, I]; `products` multiplies with these two
    """
    up, back = products(gate_up), products(down)
    numbers, order = experts.flatten().sort(stable=True)
    own = torch.arange(first_expert, first_expert + len(down) + 1)
    bounds = torch.searchsorted(numbers, own).tolist()
    tokens, scales = order // experts.shape[1], weights.flatten()[order].unsqueeze(1)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start < stop:
            rows = tokens[start:stop]
            result = back(silu_and_mul(up(x[rows], expert)), expert)
            out.index_add_(0, rows, result * scales[start:stop])
    return out.to(x.dtype)
