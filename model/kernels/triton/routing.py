"""Which experts a token goes through, and the tokens of each expert, on a GPU.

One kernel routes; its reference is `sparse_mlp.route`. Another one sorts pairs (token, one of its
experts) by expert, with one program for each expert, which counts the pairs of all, so that it
knows where its own begin: that is deterministic, and a table [pairs, experts] is never made.

Shapes: T tokens, K experts of a token, P = T * K pairs, X experts of this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from model.kernels import sparse_mlp

PAIRS_BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    num_tokens: tl.tensor,
    stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_NORMED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ids, choices = tl.arange(0, COLUMNS), tl.arange(0, CHOICES)
    is_row = rows < num_tokens
    is_left = (ids < NUM_EXPERTS)[None, :] & is_row[:, None]
    at = logits + rows[:, None] * stride + ids[None, :]
    given = tl.load(at, mask=is_left, other=float("-inf")).to(tl.float32)
    # What is not a number is chosen last, and shows in the masses of its token.
    scores = tl.where(given == given, given, float("-inf"))
    highest = tl.max(scores, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.where(is_row, tl.sum(tl.exp(given - highest[:, None]), 1), 1.0)
    chosen = tl.zeros([ROWS, CHOICES], tl.int64)
    mass = tl.zeros([ROWS, CHOICES], tl.float32)
    for i in range(TOP_K):
        best = tl.max(tl.where(is_left, scores, float("-inf")), 1)
        # The lowest of equals.
        is_best = is_left & (scores == best[:, None])
        number = tl.min(tl.where(is_best, ids[None, :], NUM_EXPERTS - 1), 1)
        is_left = is_left & (ids[None, :] != number[:, None])
        is_choice = choices[None, :] == i
        chosen = tl.where(is_choice, number[:, None].to(tl.int64), chosen)
        mass = tl.where(is_choice, (tl.exp(best - highest) / total)[:, None], mass)
    if IS_NORMED:
        mass = mass / tl.where(is_row, tl.sum(mass, 1), 1.0)[:, None]
    at = rows[:, None] * TOP_K + choices[None, :]
    is_stored = is_row[:, None] & (choices < TOP_K)[None, :]
    tl.store(experts + at, chosen, mask=is_stored)
    tl.store(weights + at, mass, mask=is_stored)


def route(
    router_logits: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    num_groups_per_tok: int = 1,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts; see `sparse_mlp.route`. The lowest of equals comes first. Where
    there are groups, sigmoids or a scaling, torch computes; it does not wait for the device."""
    if correction_bias is not None or num_groups > 1 or scaling != 1.0:
        others = (correction_bias, num_groups, num_groups_per_tok, scaling)
        return sparse_mlp.route(router_logits, top_k, norm_topk_prob, *others)
    num_tokens, num_experts = router_logits.shape
    experts = router_logits.new_empty(num_tokens, top_k, dtype=torch.int64)
    weights = router_logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    columns = triton.next_power_of_2(num_experts)
    rows = max(512 // columns, 1)
    if num_tokens:
        _route_kernel[triton.cdiv(num_tokens, rows),](
            router_logits,
            experts,
            weights,
            num_tokens,
            router_logits.stride(0),
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            IS_NORMED=norm_topk_prob,
            ROWS=rows,
            COLUMNS=columns,
            CHOICES=triton.next_power_of_2(top_k),
            num_warps=4,
        )
    return experts, weights


@triton.jit
def _numbers(
    experts: tl.tensor,
    pairs: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    first_expert: tl.tensor,
) -> tl.tensor:
    """Return pairs' experts as this rank numbers them; X for others', X + 1 where no pair is."""
    number = tl.load(experts + pairs, mask=pairs < num_pairs, other=0).to(tl.int32) - first_expert
    number = tl.where((number >= 0) & (number < num_experts), number, num_experts)
    return tl.where(pairs < num_pairs, number, num_experts + 1)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "first_expert", "tile_rows"])
def _sort_kernel(
    experts: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    first_tile: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    first_expert: tl.tensor,
    tile_rows: tl.tensor,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for at in range(0, num_pairs, BLOCK):
        pairs = at + tl.arange(0, BLOCK)
        counts += tl.histogram(_numbers(experts, pairs, num_pairs, num_experts, first_expert), BINS)
    starts = tl.cumsum(counts, 0) - counts
    own = tl.program_id(0)
    if own == 0:
        num_tiles = tl.where(bins < num_experts, (counts + tile_rows - 1) // tile_rows, 0)
        tl.store(bounds + bins, starts, mask=bins <= num_experts)
        tiles = tl.cumsum(num_tiles, 0) - num_tiles
        tl.store(first_tile + bins, tiles, mask=bins <= num_experts)
    start = tl.sum(tl.where(bins == own, starts, 0), 0)
    stop = start + tl.sum(tl.where(bins == own, counts, 0), 0)
    at = 0
    while start < stop:
        pairs = at + tl.arange(0, BLOCK)
        numbers = _numbers(experts, pairs, num_pairs, num_experts, first_expert)
        is_own = (numbers == own).to(tl.int32)
        places = start + tl.cumsum(is_own, 0) - 1
        tl.store(order + places, pairs.to(tl.int64), mask=is_own != 0)
        start += tl.sum(is_own, 0)
        at += BLOCK


def sort_pairs(
    experts: torch.Tensor, num_experts: int, first_expert: int, tile_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort pairs by expert. experts: int64 [T, K], contiguous.

    Returns `order` int64 [P], `bounds` and `first_tile` int32 [X + 1]. Expert e has the pairs
    order[bounds[e]:bounds[e + 1]] in ascending order, in the tiles from first_tile[e] on.
    """
    num_pairs = experts.numel()
    order = experts.new_empty(num_pairs)
    bounds = experts.new_empty(num_experts + 1, dtype=torch.int32)
    first_tile = torch.empty_like(bounds)
    _sort_kernel[num_experts,](
        experts,
        order,
        bounds,
        first_tile,
        num_pairs,
        num_experts,
        first_expert,
        tile_rows,
        BINS=max(triton.next_power_of_2(num_experts + 2), 32),
        BLOCK=PAIRS_BLOCK,
        num_warps=4,
    )
    return order, bounds, first_tile
