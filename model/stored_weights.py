"""How the tensors of a quantized weight become numbers.

A weight [O, I] is stored as several tensors. An axis of such a tensor runs along the outputs or the
inputs of the weight, and each of its elements stands for a span of them: 8 for a word of eight
4-bit numbers, 128 for the scale of a block. From that follow a tensor's shape, what a rank reads of
it, and which cuts would split an element; `LAYOUTS` has one row for each kind. Weights are computed
in float32 when they are read, and the model computes in its own dtype, unless a rank holds FP8 or
FP4 numbers as they are stored: activations are not quantized otherwise.

Shapes: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from compile.errors import FieldError, Words
from compile.passes.quantizers import fp4_values
from model.quantization import FIELD, NVFP4, Quantization

FLOATS = ("F64", "F32", "F16", "BF16")
"""What tensors of plain numbers and scales may be."""
OUTPUTS_AT_ONCE = 1024
"""Of a weight: what their numbers take in float32, and before that as integers, is bounded."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AutoAWQ keeps each of eight columns, lowest bits first."""
_OUT, _IN = 0, 1


class Axis(NamedTuple):
    """An axis of a stored tensor, along dimension `dim` of the weight."""

    dim: int
    span: int = 1
    """Of the weight's rows or columns for one element; 0: they all share `length` of them."""
    length: int = 1


class Cut(NamedTuple):
    """The part of a weight that is read: [start, stop) of dimension `dim`, and all of others."""

    dim: int
    start: int
    stop: int


class Part(NamedTuple):
    """One of the tensors that a kind of weights is stored as."""

    name: str
    """What follows the module's name; empty for a weight that is one plain tensor."""
    axes: tuple[Axis, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint that is a part of a weight of `sizes`."""

    name: str
    part: Part
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            -(-self.sizes[axis.dim] // axis.span) if axis.span else axis.length
            for axis in self.part.axes
        )

    def where(self, cut: Cut) -> tuple[slice, ...]:
        """Return what is read of the tensor; a FieldError if the cut would split an element."""
        parts = []
        for axis, length in zip(self.part.axes, self.shape, strict=True):
            if axis.dim != cut.dim or not axis.span:
                parts.append(slice(0, length))
                continue
            is_last = cut.stop == self.sizes[cut.dim]
            if cut.start % axis.span or (cut.stop % axis.span and not is_last):
                wanted = f"ranks' parts of a multiple of {axis.span} {_SIDES[axis.dim]}"
                raise FieldError(f"tensor {self.name}", wanted, _words(cut))
            parts.append(slice(cut.start // axis.span, -(-cut.stop // axis.span)))
        return tuple(parts)


_SIDES = ("outputs", "inputs")
Parts = Mapping[str, torch.Tensor]


def _words(cut: Cut) -> Words:
    return Words(f"{_SIDES[cut.dim]} {cut.start} to {cut.stop}")


class Held(NamedTuple):
    """What a layer holds of a part of a weight as it is stored."""

    tensors: tuple[torch.Tensor, ...]
    """What `fill` of `ScaledWeight` or `BlockScaledWeight` takes."""
    largest: torch.Tensor
    """At least as large as any number, whatever its sign; not finite if one of them is not."""


class _Layout(NamedTuple):
    parts: Callable[[Quantization], tuple[Part, ...]]
    values: Callable[[Quantization, Parts, Cut, tuple[int, int]], torch.Tensor]
    """Return float32 [O, I] of some outputs of a cut, from these outputs' parts alone."""
    held: Callable[[Quantization, Parts], Held] | None = None
    """None: no layer holds what is stored."""


def plain_tensor(name: str, sizes: tuple[int, ...]) -> tuple[Stored, ...]:
    """Return the one tensor that is a weight itself, of any number of dimensions."""
    return (Stored(name, Part("", tuple(Axis(dim) for dim in range(len(sizes)))), sizes),)


def stored_tensors(
    quantization: Quantization, weight: str, sizes: tuple[int, ...], cut: Cut
) -> tuple[Stored, ...]:
    """Return the tensors that stand for a weight of a linear module; a FieldError names one that
    the cut would split."""
    if not weight.endswith(".weight"):
        wanted = f"a tensor for each expert ({FIELD})"
        raise FieldError(f"tensor {weight}", wanted, Words("all experts in one"))
    module = weight.removesuffix(".weight")
    parts = LAYOUTS[quantization.layout].parts(quantization)
    stored = tuple(Stored(f"{module}.{part.name}", part, sizes) for part in parts)
    is_whole = cut.dim == _OUT or cut.stop - cut.start == sizes[_IN]
    if quantization.is_reordered and not is_whole:
        wanted = "all inputs on each rank where desc_act is true"
        raise FieldError(f"tensor {module}.g_idx", wanted, _words(cut))
    if cut.start < cut.stop:
        for tensor in stored:
            tensor.where(cut)
    return stored


def values_of(
    quantization: Quantization,
    parts: Parts,
    cut: Cut,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return a cut of a weight of `sizes`, computed in float32, from what was read of each of its
    tensors. A FieldError names the part that holds what cannot be."""
    if "weight_shape" in parts and parts["weight_shape"].tolist() != list(sizes):
        raise FieldError("weight_shape", str(list(sizes)), parts["weight_shape"].tolist())
    size = list(sizes)
    size[cut.dim] = cut.stop - cut.start
    rows, columns = size
    layout, out = LAYOUTS[quantization.layout], torch.empty(rows, columns, dtype=dtype)
    stored = [Stored(part.name, part, (rows, columns)) for part in layout.parts(quantization)]
    spans = [axis.span for each in stored for axis in each.part.axes if axis.dim == _OUT]
    step = math.lcm(*(span or 1 for span in spans))
    step *= -(-OUTPUTS_AT_ONCE // step)
    for start in range(0, rows, step):
        chunk = Cut(_OUT, start, min(start + step, rows))
        some = {each.name: parts[each.name][each.where(chunk)] for each in stored}
        out[start : chunk.stop] = layout.values(
            quantization, some, cut, (chunk.stop - start, columns)
        )
    return out


def held_of(quantization: Quantization, parts: Parts) -> Held:
    """Return what is held of a part of a weight, where `Quantization.is_held_as` says that it is,
    from what was read of each of its tensors."""
    held = LAYOUTS[quantization.layout].held
    assert held is not None
    return held(quantization, parts)


def _scaled(q: Quantization) -> tuple[Part, ...]:
    rows, columns = q.group
    axes = (Axis(_OUT, rows), Axis(_IN, columns))
    dtype = "I8" if q.layout == "int-quantized" else "F8_E4M3"
    scale = "weight_scale_inv" if q.layout == "fp8" else "weight_scale"
    weight = Part("weight", (Axis(_OUT), Axis(_IN)), (dtype,))
    return weight, Part(scale, axes if rows or columns else axes[:1])


def _scaled_values(q: Quantization, parts: Parts, cut: Cut, size: tuple[int, int]) -> torch.Tensor:
    weight, scales = parts.values()
    return weight.float() * _spread(scales.float(), q.group, size)


def _held_fp8(q: Quantization, parts: Parts) -> Held:
    numbers, scales = parts.values()
    scales = _spread(scales.float(), (q.group[_OUT], 1), (len(numbers), scales.shape[-1]))
    # Without their sign, codes are as large as what they stand for, and NaN has the largest.
    largest = (numbers.view(torch.uint8) & 0x7F).amax().view(numbers.dtype).float()
    return Held((numbers, scales), largest * scales.abs().amax())


def _packed(q: Quantization) -> tuple[Part, ...]:
    word, columns = 32 // q.bits, q.group[_IN]
    zeros = Part("weight_zero_point", (Axis(_OUT, word), Axis(_IN, columns)), ("I32",))
    return (
        Part("weight_packed", (Axis(_OUT), Axis(_IN, word)), ("I32",)),
        Part("weight_scale", (Axis(_OUT), Axis(_IN, columns))),
        Part("weight_shape", (Axis(_OUT, 0, 2),), ("I64", "I32")),
        *((zeros,) if q.has_zeros else ()),
    )


def _packed_values(q: Quantization, parts: Parts, cut: Cut, size: tuple[int, int]) -> torch.Tensor:
    numbers = _unpacked(parts["weight_packed"], q.bits, _IN)[:, : size[_IN]]
    zeros = torch.tensor([[1 << (q.bits - 1)]])
    if q.has_zeros:
        zeros = _unpacked(parts["weight_zero_point"], q.bits, _OUT)
    zeros = _spread(zeros, q.group, size)
    return (numbers - zeros).float() * _spread(parts["weight_scale"].float(), q.group, size)


def _gptq(q: Quantization) -> tuple[Part, ...]:
    word, groups = 32 // q.bits, Axis(_IN, q.group[_IN])
    return (
        Part("qweight", (Axis(_IN, word), Axis(_OUT)), ("I32",)),
        Part("qzeros", (groups, Axis(_OUT, word)), ("I32",)),
        Part("scales", (groups, Axis(_OUT))),
        Part("g_idx", (Axis(_IN),), ("I32", "I64")),
    )


def _gptq_values(q: Quantization, parts: Parts, cut: Cut, size: tuple[int, int]) -> torch.Tensor:
    rows, columns = size
    numbers = _unpacked(parts["qweight"], q.bits, 0)[:columns].T
    zeros = _unpacked(parts["qzeros"], q.bits, 1)[:, :rows].T
    scales = parts["scales"].float().T
    first = cut.start // q.group[_IN] if cut.dim == _IN and q.group[_IN] else 0
    groups = parts["g_idx"].long() - first
    if ((groups < 0) | (groups >= scales.shape[1])).any():
        wanted = f"groups {first} to {first + scales.shape[1] - 1}"
        low, high = (int(group) + first for group in groups.aminmax())
        raise FieldError("g_idx", wanted, Words(f"{low} to {high}"))
    zeros = zeros + q.zeros_less
    if not q.has_zeros:
        # Some files of the second version say that they are of the first, whose zero points are
        # less by one (vllm#38966). If weights are symmetric there is one possible value.
        middle = 1 << (q.bits - 1)
        if not ((zeros - middle >= 0) & (zeros - middle <= q.zeros_less)).all():
            wanted, found = f"zero points of {middle} where sym is true", zeros.aminmax()
            raise FieldError("qzeros", wanted, Words(f"{int(found.min)} to {int(found.max)}"))
        zeros = torch.full_like(zeros, middle)
    return (numbers - zeros[:, groups]).float() * scales[:, groups]


def _awq(q: Quantization) -> tuple[Part, ...]:
    word, groups = 32 // q.bits, Axis(_IN, q.group[_IN])
    return (
        Part("qweight", (Axis(_IN), Axis(_OUT, word)), ("I32",)),
        Part("qzeros", (groups, Axis(_OUT, word)), ("I32",)),
        Part("scales", (groups, Axis(_OUT))),
    )


def _awq_values(q: Quantization, parts: Parts, cut: Cut, size: tuple[int, int]) -> torch.Tensor:
    rows = size[_OUT]
    numbers, zeros = (
        _unpacked(parts[part], q.bits, 1, _AWQ_ORDER)[:, :rows].T for part in ("qweight", "qzeros")
    )
    scales = _spread(parts["scales"].float().T, q.group, size)
    return (numbers - _spread(zeros, q.group, size)).float() * scales


_GLOBAL_SCALES = ("weight_global_scale", "input_global_scale")


def _nvfp4(q: Quantization) -> tuple[Part, ...]:
    names = _GLOBAL_SCALES[: 1 + q.has_input_scales]
    return (
        Part("weight_packed", (Axis(_OUT), Axis(_IN, 2)), ("U8",)),
        Part("weight_scale", (Axis(_OUT), Axis(_IN, q.group[_IN])), ("F8_E4M3",)),
        *(Part(name, (Axis(_OUT, 0),), ("F32",)) for name in names),
    )


def _nvfp4_values(q: Quantization, parts: Parts, cut: Cut, size: tuple[int, int]) -> torch.Tensor:
    _check_global_scales(parts, _GLOBAL_SCALES[:1])
    scales = parts["weight_scale"].float() / parts["weight_global_scale"]
    return fp4_values(parts["weight_packed"])[:, : size[_IN]] * _spread(scales, q.group, size)


def _held_nvfp4(_: Quantization, parts: Parts) -> Held:
    _check_global_scales(parts, _GLOBAL_SCALES)
    scales = parts["weight_scale"]
    return Held(tuple(parts.values()), scales.float().abs().amax())


def _check_global_scales(parts: Parts, names: tuple[str, ...]) -> None:
    """Refuse a scale of a whole tensor that is no number above 0."""
    for name in names:
        if not 0 < parts[name] < math.inf:
            raise FieldError(name, "a number above 0", float(parts[name]))


LAYOUTS = {
    "float-quantized": _Layout(_scaled, _scaled_values, _held_fp8),
    "int-quantized": _Layout(_scaled, _scaled_values),
    "fp8": _Layout(_scaled, _scaled_values, _held_fp8),
    "pack-quantized": _Layout(_packed, _packed_values),
    NVFP4: _Layout(_nvfp4, _nvfp4_values, _held_nvfp4),
    "gptq": _Layout(_gptq, _gptq_values),
    "awq": _Layout(_awq, _awq_values),
}


def _unpacked(
    words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return the unsigned numbers of int32 words that are packed along `dim`, lowest bits first."""
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32)
    words = words.movedim(dim, -1)
    numbers = (words.unsqueeze(-1) >> (places * bits)) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, dim)


def _spread(shared: torch.Tensor, group: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """Return what groups share for each of their elements, as far as broadcasting does not."""
    if shared.ndim == 1:
        return shared
    for dim in (_OUT, _IN):
        if shared.shape[dim] > 1:
            shared = shared.repeat_interleave(group[dim], dim).narrow(dim, 0, size[dim])
    return shared
