"""Rotary position embedding as a configuration describes it, one class for each kind. These are
numbers only, in either spelling (`rope_parameters`, as transformers 5 writes it, or the older
`rope_scaling` beside `rope_theta`). `model.layers.rotary` computes angles from them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from compile.errors import FieldError
from model.fields import says, words_for

LARGEST = 1 << 28
"""Bound of every integer: the bytes of a product of two still fit in 64 bits."""
Size = Annotated[int, Meta(ge=1, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max), says("a number above 0")]
_ZeroIsNone = Annotated[float, Meta(ge=0, le=sys.float_info.max), says("a number above 0")]
WholeHead = Annotated[float, Meta(ge=1, le=1), says("1 (no family here turns a part of a head)")]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of all kinds; each kind reads its own and ignores the others, as transformers does."""

    rope_type: RopeType | None = None
    older_type: RopeType | None = msgspec.field(name="type", default=None)
    rope_theta: Positive | None = None
    factor: Positive | UnsetType | None = UNSET
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: _ZeroIsNone | None = None
    beta_slow: _ZeroIsNone | None = None
    mscale: _ZeroIsNone | None = None
    mscale_all_dim: _ZeroIsNone | None = None
    truncate: bool = True
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: WholeHead | None = None
    finetuned: Any = None


@dataclass(frozen=True)
class DefaultRope:
    """Positions as they are (RoFormer; Su et al., 2021)."""

    theta: float


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor` (position interpolation; Chen et al., 2023)."""

    theta: float
    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """A base that grows with the sequence beyond `original_len` (dynamic NTK scaling). A cached key
    keeps the angles of the length at which it was computed: a longer prompt's would depend on its
    length, and is refused."""

    theta: float
    factor: float
    original_len: int


@dataclass(frozen=True)
class Llama3Rope:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int


@dataclass(frozen=True)
class YarnRope:
    """Interpolation by frequency with a factor on attention (YaRN; Peng et al., 2023)."""

    theta: float
    factor: float
    attention_factor: float
    """Scales cosines and sines, and so queries and keys alike."""
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the ramp begins and ends at whole dimensions."""
    original_len: int


Rope = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope


def longest_context(rope: Rope, max_position_embeddings: int) -> int:
    """Return how many positions the scaling is made for: the larger of what files may mean."""
    match rope:
        case LinearRope():
            scaled = max_position_embeddings * rope.factor
        case DynamicRope() | YarnRope():
            scaled = rope.original_len * rope.factor
        case _:
            scaled = 0.0
    return max(max_position_embeddings, int(min(scaled, LARGEST)))


def read_rope(
    given: RopeParameters,
    name: str,
    *,
    theta: float,
    max_position_embeddings: int,
    original_len: int | None,
    head_dim: int,
) -> Rope:
    """Return the embedding that parameters of a file, which it calls `name`, describe. Their base
    beats `theta`; `original_len` beats their length."""
    theta = given.rope_theta or theta
    original_len = original_len or given.original_max_position_embeddings or max_position_embeddings

    def number(key: str) -> float:
        value = getattr(given, key)
        if not isinstance(value, float):
            raise FieldError(f"{name}.{key}", words_for(Positive), None)
        return value

    match given.rope_type or given.older_type:
        case "linear":
            return LinearRope(theta, number("factor"))
        case "dynamic":
            if head_dim == 2:
                raise FieldError("head_dim", "above 2 for rope_type dynamic", 2)
            return DynamicRope(theta, number("factor"), max_position_embeddings)
        case "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if high <= low:
                wanted = f"a number above low_freq_factor={low:g}"
                raise FieldError(f"{name}.high_freq_factor", wanted, high)
            return Llama3Rope(theta, number("factor"), low, high, original_len)
        case "yarn":
            if theta == 1:
                raise FieldError("rope_theta", "other than 1 for rope_type yarn", 1)
            is_implied = given.factor is None
            factor = max_position_embeddings / original_len if is_implied else number("factor")
            return YarnRope(
                theta=theta,
                factor=factor,
                attention_factor=_attention_factor(given, factor),
                beta_fast=given.beta_fast or 32.0,
                beta_slow=given.beta_slow or 1.0,
                truncate=given.truncate,
                original_len=original_len,
            )
        case _:
            return DefaultRope(theta)


def score_factor(given: RopeParameters, rope: Rope) -> float:
    """Return what DeepSeek's families multiply scores by, beside what cosines and sines carry: the
    square of YaRN's factor at `mscale_all_dim`, whatever the kind of scaling."""
    if isinstance(rope, DefaultRope) or not given.mscale_all_dim:
        return 1.0
    return _mscale(rope.factor, given.mscale_all_dim) ** 2


def _attention_factor(given: RopeParameters, factor: float) -> float:
    if given.attention_factor is not None:
        return given.attention_factor
    if given.mscale and given.mscale_all_dim:
        return _mscale(factor, given.mscale) / _mscale(factor, given.mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
