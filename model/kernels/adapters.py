"""What LoRA adapters add to a linear layer's outputs (Hu et al., 2021), in torch functions: what a
CPU computes, and what the GPU kernel must equal.

Tokens of several adapters, and of none, are in one step. Several tensors of a checkpoint in one
product (queries, keys and values) are *parts* of it, each with an adapter's matrices of its own.
Where ranks are narrower than the widest, zeros are behind them.

Shapes: T tokens, I inputs, O outputs, N slots of adapters, R the largest rank, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def add_adapters(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: Sequence[int],
    adapters: torch.Tensor,
) -> None:
    """Add to each token's outputs what its adapter makes of its inputs. It reads values: tokens of
    an adapter are multiplied together, and those without one are left alone.

    out: [T, O]; x: [T, I]; a: [N, P * R, I]; b: [N, R, O], scaled; sizes: outputs of each part;
    adapters: int32 [T], 0 for none, else one more than the index in `a` and `b`
    """
    rank = b.shape[1]
    for adapter in sorted({*adapters.tolist()} - {0}):
        rows = (adapters == adapter).nonzero().squeeze(1)
        low = (x[rows] @ a[adapter - 1].T).split(rank, dim=1)
        high = b[adapter - 1].split(list(sizes), dim=1)
        added = [part @ matrix for part, matrix in zip(low, high, strict=True)]
        out.index_add_(0, rows, torch.cat(added, 1))
