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


LEAST_SUM = 1e-20
"""Added to the sum that sigmoids are divided by: all of them may be 0 in float32."""


def route(
    router_logits: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    num_groups_per_tok: int = 1,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts by their scores and top-k, in float32. router_logits: [T, X].

    Scores are a softmax, or sigmoids where there is a bias, float32 [X], which has a say in the
    choice alone (DeepSeek-V3; DeepSeek-AI, 2024). Experts are of the token's best groups: of a
    softmax those with the highest score, of sigmoids those whose two highest have the highest sum.

    Returns the experts, int64 [T, K], and their weights, float32 [T, K], best choice first, scaled
    to the sum 1 if `norm_topk_prob`, times `scaling`.
    """
    is_softmax, logits = correction_bias is None, router_logits.float()
    scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
    choices = scores if correction_bias is None else scores + correction_bias
    if num_groups_per_tok < num_groups:
        groups = choices.unflatten(-1, (num_groups, -1))
        values = groups.amax(-1) if is_softmax else groups.topk(2, -1).values.sum(-1)
        best = values.topk(num_groups_per_tok, -1).indices
        is_left_out = torch.ones_like(values, dtype=torch.bool).scatter_(-1, best, False)
        choices = groups.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choices.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + (0.0 if is_softmax else LEAST_SUM))
    return experts, weights * scaling


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
