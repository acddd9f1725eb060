"""Rotary position embedding as a configuration describes it, one class for each kind.

These are numbers only, checked when they are read, in either spelling (`rope_parameters`, or the
older `rope_scaling` beside `rope_theta`). `model.layers.rotary` computes angles from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.fields import LARGEST, Fields, boolean, positive_number, refused, whole_number

# What files of any kind carry; each kind reads its own and ignores the rest, as transformers does.
_KNOWN_KEYS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
    "type",
}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


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
    """A base that grows with the sequence beyond `original_len` (dynamic NTK scaling).

    A cached key keeps the angles of the length at which it was computed. In a single generation
    that is the prompt's length for its tokens, and for a generated token its own. For prompts of
    at most `original_len` tokens it follows from the position alone, so that keys can be shared,
    moved and computed again; a longer prompt's would depend on its length, and is refused.
    """

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
    """Return how many positions the scaling is made for.

    Files differ in whether `max_position_embeddings` counts the scaling; the larger reading is
    allowed, the written one is the default.
    """
    match rope:
        case LinearRope():
            scaled = max_position_embeddings * rope.factor
        case DynamicRope() | YarnRope():
            scaled = rope.original_len * rope.factor
        case _:
            scaled = 0.0
    return max(max_position_embeddings, int(min(scaled, LARGEST)))


def read_rope(fields: Fields, max_position_embeddings: int, head_dim: int) -> Rope:
    """Read `rope_parameters`, as transformers 5 writes it, or the older `rope_scaling`.

    Raises:
        FieldError: names the field and the file.
    """
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    reader = _Parameters(name, fields, max_position_embeddings, head_dim)
    match reader.kind:
        case "linear":
            return LinearRope(reader.theta, reader.number("factor"))
        case "dynamic":
            return reader.dynamic()
        case "llama3":
            return reader.llama3()
        case "yarn":
            return reader.yarn()
        case _:
            return DefaultRope(reader.theta)


class _Parameters:
    """One file's rotary parameters."""

    def __init__(
        self, name: str, fields: Fields, max_position_embeddings: int, head_dim: int
    ) -> None:
        self.name = name
        self.fields = fields
        self.source: Path | str = fields.source
        self.max_positions = max_position_embeddings
        self.head_dim = head_dim
        self.values: Mapping[str, Any] = fields.values.get(name) or {}
        if not isinstance(self.values, dict):
            raise refused(name, "an object or null", self.values, self.source)
        self.kind = self.values.get("rope_type", self.values.get("type", "default"))
        if self.kind not in ROPE_TYPES:
            wanted = f"rope_type {', '.join(ROPE_TYPES)}"
            raise refused(name, wanted, self.kind, self.source)
        unknown = sorted(set(self.values) - _KNOWN_KEYS)
        if unknown:
            wanted = f"only {', '.join(sorted(_KNOWN_KEYS))}"
            raise refused(name, wanted, unknown, self.source)
        self._check_partial()
        self.theta = self._theta()

    def number(self, key: str) -> float:
        """Return a number above 0 that the file must give."""
        return positive_number(f"{self.name}.{key}", self.values.get(key), self.source)

    def optional(self, key: str) -> float | None:
        """Return a number above 0; None where the file gives none, or 0."""
        value = self.values.get(key)
        is_absent = value is None or (value == 0 and not isinstance(value, bool))
        return None if is_absent else self.number(key)

    def dynamic(self) -> DynamicRope:
        if self.head_dim == 2:
            raise refused("head_dim", "above 2 for rope_type dynamic", 2, self.source)
        return DynamicRope(self.theta, self.number("factor"), self.max_positions)

    def llama3(self) -> Llama3Rope:
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        if high <= low:
            wanted = f"a number above low_freq_factor={low:g}"
            raise refused(f"{self.name}.high_freq_factor", wanted, high, self.source)
        return Llama3Rope(self.theta, self.number("factor"), low, high, self._original_len())

    def yarn(self) -> YarnRope:
        if self.theta == 1:
            raise refused("rope_theta", "other than 1 for rope_type yarn", 1, self.source)
        original_len = self._original_len()
        if "factor" in self.values and self.values["factor"] is None:
            factor = self.max_positions / original_len
        else:
            factor = self.number("factor")
        truncate = self.values.get("truncate", True)
        return YarnRope(
            theta=self.theta,
            factor=factor,
            attention_factor=self._attention_factor(factor),
            beta_fast=self.optional("beta_fast") or 32.0,
            beta_slow=self.optional("beta_slow") or 1.0,
            truncate=boolean(f"{self.name}.truncate", truncate, self.source),
            original_len=original_len,
        )

    def _attention_factor(self, factor: float) -> float:
        if self.values.get("attention_factor") is not None:
            return self.number("attention_factor")
        mscale, of_all_dims = self.optional("mscale"), self.optional("mscale_all_dim")
        if mscale and of_all_dims:
            return _mscale(factor, mscale) / _mscale(factor, of_all_dims)
        return _mscale(factor, 1.0)

    def _original_len(self) -> int:
        """Return the length before scaling; a field of the file itself beats the parameter."""
        key = "original_max_position_embeddings"
        value = self.fields.values.get(key, self.values.get(key, self.max_positions))
        return whole_number(key, value, self.source)

    def _theta(self) -> float:
        theta = self.values.get("rope_theta")
        theta = self.fields.value("rope_theta") if theta is None else theta
        return positive_number("rope_theta", theta, self.source)

    def _check_partial(self) -> None:
        key = "partial_rotary_factor"
        partial = self.values.get(key, self.fields.values.get(key))
        if partial not in (None, 1):
            wanted = "1 (no family here turns a part of a head)"
            raise refused(key, wanted, partial, self.source)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
