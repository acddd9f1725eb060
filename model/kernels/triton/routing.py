"""Which experts a token goes through, and the tokens of each expert, on a GPU.

One kernel routes; its reference is `sparse_mlp.route`. Another one sorts pairs (token, one of its
experts) by expert, with one program for each expert, which counts the pairs of all, so that it
knows where its own begin: that is deterministic, and a table [pairs, experts] is never made.

Shapes: T tokens, K experts of a token, P = T * K pairs, X experts of this rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from model.kernels import sparse_mlp

PAIRS_BLOCK = 1024


@triton.jit
def _is_in_best_groups(
    scores: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> tl.tensor:
    """Return which columns are of a row's best groups. scores: [ROWS, GROUPS * MEMBERS], -inf where
    no expert is. A group is as good as its best expert, or as its best two together."""
    of_groups = tl.reshape(scores, [ROWS, GROUPS, MEMBERS])
    values = tl.max(of_groups, 2)
    if SUMS_TWO:
        members = tl.arange(0, MEMBERS)[None, None, :]
        is_highest = of_groups == values[:, :, None]
        first = tl.min(tl.where(is_highest, members, MEMBERS), 2)
        values += tl.max(tl.where(members == first[:, :, None], float("-inf"), of_groups), 2)
    numbers = tl.arange(0, GROUPS)[None, :]
    is_left = (numbers < NUM_GROUPS) & (values == values)
    for _ in range(TOP_GROUPS):
        best = tl.max(tl.where(is_left, values, float("-inf")), 1)
        is_best = is_left & (values == best[:, None])
        number = tl.min(tl.where(is_best, numbers, GROUPS), 1)
        is_left = is_left & (numbers != number[:, None])
    is_best = (numbers < NUM_GROUPS) & (is_left == 0)
    is_member = tl.broadcast_to(is_best.to(tl.int32)[:, :, None], [ROWS, GROUPS, MEMBERS])
    return tl.reshape(is_member, [ROWS, GROUPS * MEMBERS]) != 0


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    num_tokens: tl.tensor,
    stride: tl.tensor,
    scaling: tl.tensor,
    least_sum: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns, choices = tl.arange(0, GROUPS * MEMBERS), tl.arange(0, CHOICES)
    # Columns lie group by group, each of a power of two.
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    group, member = columns // MEMBERS, columns % MEMBERS
    ids = group * GROUP_SIZE + member
    is_expert = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    is_row = rows < num_tokens
    is_left = is_expert[None, :] & is_row[:, None]
    at = logits + rows[:, None] * stride + ids[None, :]
    given = tl.load(at, mask=is_left, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        masses = 1.0 / (1.0 + tl.exp(-given))
        given = masses + tl.load(bias + ids, mask=is_expert, other=float("-inf"))[None, :]
    # What is not a number is chosen last, and shows in the masses of its token.
    scores = tl.where(is_left & (given == given), given, float("-inf"))
    if IS_SIGMOID:
        no_number = tl.sum(tl.where(is_left, masses, 0.0), 1) * 0.0
    else:
        highest = tl.max(scores, 1)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.where(is_row, tl.sum(tl.exp(given - highest[:, None]), 1), 1.0)
        # The exponents are below zero, so that the order of the scores is that of the masses.
        masses = tl.exp(scores - highest[:, None]) / total[:, None]
        no_number = total * 0.0
    if TOP_GROUPS < NUM_GROUPS:
        is_left = is_left & _is_in_best_groups(
            scores, NUM_GROUPS, TOP_GROUPS, IS_SIGMOID, ROWS, GROUPS, MEMBERS
        )
    chosen = tl.zeros([ROWS, CHOICES], tl.int64)
    mass = tl.zeros([ROWS, CHOICES], tl.float32)
    for i in range(TOP_K):
        best = tl.max(tl.where(is_left, scores, float("-inf")), 1)
        # The lowest of equals.
        is_best = is_left & (scores == best[:, None])
        number = tl.min(tl.where(is_best, ids[None, :], NUM_EXPERTS - 1), 1)
        is_number = is_left & (ids[None, :] == number[:, None])
        own = tl.sum(tl.where(is_number, masses, 0.0), 1) + no_number
        is_left = is_left & (ids[None, :] != number[:, None])
        is_choice = choices[None, :] == i
        chosen = tl.where(is_choice, number[:, None].to(tl.int64), chosen)
        mass = tl.where(is_choice, own[:, None], mass)
    if IS_NORMED:
        mass = mass / tl.where(is_row, tl.sum(mass, 1) + least_sum, 1.0)[:, None]
    mass = mass * scaling
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
    """Choose each token's experts; see `sparse_mlp.route`. The lowest of equals comes first."""
    num_tokens, num_experts = router_logits.shape
    experts = router_logits.new_empty(num_tokens, top_k, dtype=torch.int64)
    weights = router_logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    is_sigmoid = correction_bias is not None
    if num_groups_per_tok >= num_groups:
        num_groups = num_groups_per_tok = 1  # all experts may be chosen
    groups = triton.next_power_of_2(num_groups)
    members = triton.next_power_of_2(num_experts // num_groups)
    rows = max(512 // (groups * members), 1)
    if num_tokens:
        _route_kernel[triton.cdiv(num_tokens, rows),](
            router_logits,
            correction_bias,
            experts,
            weights,
            num_tokens,
            router_logits.stride(0),
            scaling,
            sparse_mlp.LEAST_SUM if is_sigmoid else 0.0,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            IS_NORMED=norm_topk_prob,
            IS_SIGMOID=is_sigmoid,
            NUM_GROUPS=num_groups,
            TOP_GROUPS=num_groups_per_tok,
            ROWS=rows,
            GROUPS=groups,
            MEMBERS=members,
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


class Pairs(NamedTuple):
    """Pairs (token, one of its experts), sorted by this rank's experts as `sort_pairs` does it."""

    order: torch.Tensor
    bounds: torch.Tensor
    experts: torch.Tensor
    """[T, K]"""
    first_expert: int

    @property
    def num_own(self) -> torch.Tensor:
        """Of this rank's experts, which come first: int32 [1]."""
        return self.bounds[-1:]


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
