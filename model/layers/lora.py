"""What LoRA adapters add to a linear layer's outputs (Hu et al., 2021), behind one opaque op.

Tokens of several adapters, and of none, are in one step. The op's arguments are tensors that every
layer of a kind has alike; which adapter a token belongs to comes from the forward context, so a
traced graph depends on neither. Where ranks are narrower than the widest, zeros are behind them.

Several tensors of a checkpoint in one product (queries, keys and values) are *parts* of it, each
with an adapter's matrices of its own.

Shapes: T tokens, I inputs, O outputs, N slots of adapters, R the largest rank, P parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from compile.context import get_forward_context
from compile.custom_op import direct_register_custom_op


def _lora_add(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int]
) -> None:
    """Add to each token's outputs what its adapter makes of its inputs.

    out: [T, O]; x: [T, I]; a: [N, P * R, I]; b: [N, R, O], scaled; sizes: outputs of each part
    """
    adapters = get_forward_context().adapters
    assert adapters is not None, "adapters: wanted each token's in the forward context, found none"
    add = add_by_adapter if x.device.type == "cpu" else add_masked
    add(out, x, a, b, sizes, adapters)


lora_add = direct_register_custom_op("lora_add", _lora_add, mutates_args=["out"])


def add_by_adapter(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: Sequence[int],
    adapters: torch.Tensor,
) -> None:
    """Take the tokens of each adapter together, and none of tokens without one. It reads values.

    adapters: int32 [T], 0 for none, else one more than the index in `a` and `b`; the rest as in
    the op
    """
    for adapter in sorted({*adapters.tolist()} - {0}):
        rows = (adapters == adapter).nonzero().squeeze(1)
        low = x[rows] @ a[adapter - 1].T
        added = [part @ b[adapter - 1, :, at] for part, at in _parts(low, b.shape[1], sizes)]
        out.index_add_(0, rows, torch.cat(added, 1))


def add_masked(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: Sequence[int],
    adapters: torch.Tensor,
) -> None:
    """Do the same with one product for all adapters, of which each token keeps its own's, so that
    no value is read and a graph can be captured. Arguments are those of `add_by_adapter`."""
    num_adapters, rank, _ = b.shape
    low = (x @ a.flatten(0, 1).T).view(len(x), *a.shape[:2])
    own = torch.arange(1, num_adapters + 1, device=x.device) == adapters.unsqueeze(1)
    low = torch.where(own.unsqueeze(2), low, 0)
    for part, at in _parts(low, rank, sizes):
        out[:, at] += part.flatten(1) @ b.flatten(0, 1)[:, at]


def _parts(
    low: torch.Tensor, rank: int, sizes: Sequence[int]
) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield of each part what its A has made of tokens, and which outputs are its own."""
    start = 0
    for part, size in zip(low.split(rank, dim=-1), sizes, strict=True):
        yield part, slice(start, start + size)
        start += size
