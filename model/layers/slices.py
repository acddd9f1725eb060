"""`WeightSlice`: which part of a checkpoint's tensor fills which part of a parameter.

Layers describe their weights this way; `model.weights` reads. A parameter has no memory until its
first part is read, and its layer is told when its last part has been. So a layer may pack the
parameter before the next one takes memory, and a rank never holds two copies of its shard.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from compile.formats import FP8_GROUP
from model.kernels.scaled_linear import BlockScaledWeight, ScaledWeight
from model.parallel import Placement
from model.quantization import Float4, Float8, Form, Quantization

Kept = ScaledWeight | BlockScaledWeight


class WeightedLayer(nn.Module):
    """A layer whose parameters come from a checkpoint; until `allocate` they have no memory."""

    is_quantizable = False
    """Whether a quantized checkpoint holds `weight` quantized unless it says otherwise."""
    form: Form | None = None
    """What `weight` is held as; None: as it is read."""

    def __init__(self, place: Placement) -> None:
        super().__init__()
        self.dtype = place.dtype
        self.device = place.device
        self.kept: Kept | None = None
        """What is read of `weight` as its checkpoint has it, until all of it is."""

    def declare(self, *shape: int) -> nn.Parameter:
        """Return a parameter without memory, to be assigned to an attribute."""
        empty = torch.empty(shape, dtype=self.dtype, device="meta")
        return nn.Parameter(empty, requires_grad=False)

    def allocate(self, name: str) -> torch.Tensor:
        """Give a parameter memory unless it has some, and return it."""
        parameter = self.get_parameter(name)
        if parameter.is_meta:
            parameter = nn.Parameter(_memory_for(parameter, self.device), requires_grad=False)
            setattr(self, name, parameter)
        return parameter

    def allocate_kept(self, stored: Quantization) -> Kept:
        """Give `kept` memory unless it has some, and the layer the form of what is stored."""
        if self.kept is None:
            shape = self.get_parameter("weight").shape
            if isinstance(self.form, Float8):
                is_grouped = stored.group[1] == FP8_GROUP
                self.kept = ScaledWeight.empty(shape, self.device, is_grouped=is_grouped)
            else:
                self.kept = BlockScaledWeight.empty(shape, self.device)
            self.form = self.kept.form
        return self.kept

    def keep(
        self, rows: slice | tuple[int, slice], stored: Quantization, held: tuple[torch.Tensor, ...]
    ) -> None:
        """Hold a part of `weight`, as `WeightSlice.rows` has it. held: what `fill` takes"""
        kept = self.allocate_kept(stored)
        if isinstance(rows, tuple):
            number, rows = rows
            kept = kept.of_expert(number)
        kept.fill(rows, *held)

    def take_kept(self) -> Kept | None:
        """Return what is kept, for good. A layer without any that would hold FP4 numbers holds
        plain ones from now on."""
        kept, self.kept = self.kept, None
        if isinstance(self.form, Float4) and kept is None:
            self.form = None
        return kept

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        """Describe the checkpoint's tensors of this layer, the module `name` of the model; `held`
        are those that it does hold, where there are two spellings."""
        raise NotImplementedError

    def loaded(self, name: str) -> None:
        """Handle a parameter of which all parts have been read, by packing it, say."""

    def forget_values(self) -> None:
        """Free packed weights but no shapes and handles: the layer can be traced, and not run."""


def _memory_for(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an unset tensor like `parameter`, on a CPU a mapping of its own: the heap would keep
    what is freed after packing."""
    if device.type != "cpu" or not parameter.numel():
        return torch.empty_like(parameter, device=device)
    memory = mmap.mmap(-1, parameter.nbytes)
    return torch.frombuffer(memory, dtype=parameter.dtype).view(parameter.shape)


@dataclass(frozen=True)
class WeightSlice:
    """`checkpoint[name][..., start:stop, ...] -> layer.parameter[rows]`, cut along `dim`; `shape`
    is the whole tensor's in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    layer: WeightedLayer
    parameter: str
    rows: slice | tuple[int, slice]
    """Of the parameter, or of one of the matrices that it stacks."""
    dim: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        wanted = list(self.shape)
        wanted[self.dim] = self.stop - self.start
        found = list(self.layer.get_parameter(self.parameter)[self.rows].shape)
        assert found == wanted, (self.name, found, wanted)

    @property
    def home(self) -> tuple[WeightedLayer, str]:
        return self.layer, self.parameter

    @property
    def home_bytes(self) -> int:
        return self.layer.get_parameter(self.parameter).nbytes

    def target(self) -> torch.Tensor:
        """Return where the slice goes; the parameter takes memory if this is its first part."""
        return self.layer.allocate(self.parameter)[self.rows]


def whole(name: str, layer: WeightedLayer, parameter: str) -> WeightSlice:
    shape = tuple(layer.get_parameter(parameter).shape)
    return WeightSlice(name, shape, layer, parameter, slice(None), 0, 0, shape[0])
