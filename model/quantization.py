"""What `quantization_config` says of a checkpoint's weights: methods of compressed-tensors, of FP8
files as DeepSeek-V3, transformers and AutoFP8 write them, of AutoGPTQ and of AutoAWQ.
`stored_weights.py` makes numbers of them.

A rank may hold something else: `Integers` are made of whatever the checkpoint has, `Float4` is
always the checkpoint's own, and `Float8` is if it has such."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from compile.errors import FieldError, Words
from compile.formats import FP4_BLOCK, FP8_GROUP
from model.fields import LARGEST_INDEX, Source, convert, says

FIELD = "quantization_config"
WeightFormat = Literal["none", "int8", "w8a8", "int4", "fp8", "nvfp4"]
"""What linear layers hold: numbers of the model's dtype, integers, FP8 or FP4 numbers."""
NVFP4 = "nvfp4-pack-quantized"
MOST_SHARE = 128
"""Inputs of a group of 4-bit integers."""
_KV = "kv_cache_scheme"


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's linear weights are stored. Invariant: `layout` has a row in
    `stored_weights.LAYOUTS`."""

    layout: str
    bits: int
    group: tuple[int, int]
    """How many outputs and inputs share a scale; 0: all."""
    has_zeros: bool = False
    """Whether zero points differ from the middle of what the bits hold."""
    zeros_less: int = 0
    """By how much stored zero points are below the true ones."""
    is_reordered: bool = False
    """Whether the inputs of a group are anywhere in a row."""
    plain_names: tuple[str, ...] = ()
    """Modules that are not quantized, with all that they contain."""
    plain_patterns: tuple[str, ...] = ()
    """Regular expressions of the beginnings of their names."""
    unused: tuple[str, ...] = ()
    """Tensors beside a weight that only quantized activations would need."""
    has_input_scales: bool = False
    """Whether activations are meant to be FP4, too, by a scale that is stored beside a weight."""
    rounds_tokens: bool = False
    """Whether those of each token are meant to be integers of 8 bits with a scale of their own."""

    @property
    def own_format(self) -> WeightFormat:
        """What linear layers hold on a GPU by default: what is stored, to the bit, if that can be
        multiplied there."""
        if self.layout == NVFP4:
            return "nvfp4" if self.has_input_scales else "none"
        return "fp8" if self.is_held_as(Float8()) else "none"

    def is_held_as(self, form: Form | None) -> bool:
        """Return whether a layer of such a form holds what is stored, to the bit."""
        if isinstance(form, Float8):
            return self.layout in ("fp8", "float-quantized") and self.group[1] in (0, FP8_GROUP)
        return isinstance(form, Float4)

    def is_plain(self, module: str) -> bool:
        named = any(f".{name}." in f".{module}." for name in self.plain_names)
        return named or any(re.match(pattern, module) for pattern in self.plain_patterns)


@dataclass(frozen=True)
class Integers:
    """What a weight is held as: symmetric integers of `bits`; of each output, `group` inputs share
    a scale. Invariant: the inputs are a multiple of `group`."""

    bits: int
    group: int
    rounds_tokens: bool = False
    """Its inputs are integers of 8 bits as well, the largest of a token as 127. With 8 bits and one
    group alone."""


@dataclass(frozen=True)
class Float8:
    """What a weight is held as: e4m3, with a scale for each output, or for each 128 inputs of it
    where its checkpoint has such. Its inputs are rounded, too, with as many scales."""

    is_grouped: bool = False


@dataclass(frozen=True)
class Float4:
    """What a weight is held as: e2m1 with scales of 16 inputs and of a whole tensor, to the bit as
    its checkpoint has it. Its inputs are rounded, too. A layer that its checkpoint has as plain
    numbers holds these. Invariant: the inputs are a multiple of 16."""


Form = Integers | Float8 | Float4


def form_for(held: WeightFormat, num_inputs: int) -> Form | None:
    """Return how a layer of so many inputs on this rank holds its weight, None as it is read: FP8,
    FP4, 8 bits with one scale for an output (w8a8: and one for each token), or 4 bits with one for
    128 inputs of an output, or for as many of 120, 112 and so on as divide the inputs. A FieldError
    if it cannot."""
    if held == "none":
        return None
    if held == "fp8":
        return Float8()
    if held == "nvfp4":
        if num_inputs % FP4_BLOCK:
            wanted = f"none where inputs of layers are no multiple of {FP4_BLOCK} on a rank"
            raise FieldError("quantization", wanted, Words(f"nvfp4 and {num_inputs} inputs"))
        return Float4()
    if held == "w8a8":
        return Integers(8, num_inputs, rounds_tokens=True)
    if held == "int8" or num_inputs <= MOST_SHARE:
        return Integers(8 if held == "int8" else 4, num_inputs)
    for group in range(MOST_SHARE, 0, -8):
        if num_inputs % group == 0:
            return Integers(4, group)
    wanted = f"none, fp8 or int8 where layers have over {MOST_SHARE} inputs, and no multiple of 8"
    raise FieldError("quantization", wanted, Words(f"int4 and {num_inputs} inputs"))


_Names = Annotated[list[str] | None, says("a list of modules' names, or null")]
_Size = Annotated[int, Meta(ge=1, le=LARGEST_INDEX)]
_GroupSize = Annotated[int, Meta(ge=-1, le=LARGEST_INDEX)]
_Block = Annotated[tuple[_Size, _Size], says("two sizes")]
_BlockOrNone = Annotated[tuple[_Size, _Size] | UnsetType | None, says("two sizes, or null")]
_No = Annotated[None, says("none")]


class _Weights(msgspec.Struct):
    num_bits: Literal[4, 8]
    type: Literal["int", "float"]
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] | None = None
    group_size: _GroupSize | None = None
    block_structure: _Block | None = None
    actorder: Annotated[
        Literal["weight", "static"] | None, says("weight, static or null (inputs in order)")
    ] = None


class _Activations(msgspec.Struct):
    dynamic: Annotated[bool | Literal["local"], says("true, false or local")] = False
    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: str | None = None


_INTEGERS_OF_A_TOKEN = _Activations(dynamic=True, strategy="token")


class _Group(msgspec.Struct):
    targets: list[str]
    weights: _Weights
    input_activations: _Activations | None = None
    output_activations: _No = None
    format: str | None = None


class _KvCache(msgspec.Struct):
    """The kind of KV cache that is served: e4m3, with scales for a layer's keys and for its values,
    of all heads or of each, which the checkpoint has as tensors."""

    num_bits: Literal[8]
    type: Literal["float"]
    symmetric: bool = True
    strategy: Literal["tensor", "attn_head"] | None = None
    dynamic: Annotated[bool | Literal["local"], says("true, false or local")] = False


class _CompressedTensors(msgspec.Struct):
    format: Literal["float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized"]
    config_groups: dict[str, dict[str, Any]]
    ignore: _Names = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class _Fp8(msgspec.Struct):
    """Of DeepSeek-V3, which others follow: in blocks, or null for a scale of the whole tensor. A
    file of AutoFP8, which knows no blocks, does not have the field."""

    weight_block_size: _BlockOrNone = UNSET
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    fmt: Literal["e4m3"] = "e4m3"
    modules_to_not_convert: _Names = None
    ignored_layers: _Names = None
    kv_cache_scheme: Annotated[Literal["static"] | None, says("static or null")] = None
    """Scales of keys and values are there; they are read where the cache is FP8."""


class _Gptq(msgspec.Struct):
    bits: Literal[4, 8]
    group_size: _GroupSize
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    modules_to_not_convert: _Names = None
    modules_in_block_to_quantize: _No = None
    dynamic: dict[str, Any] | None = None
    lm_head: bool = False


class _Awq(msgspec.Struct):
    bits: Literal[4]
    group_size: _GroupSize
    zero_point: bool = True
    version: Annotated[str, says("gemm")] = "gemm"
    modules_to_not_convert: _Names = None


def _of_compressed_tensors(file: _CompressedTensors) -> Quantization:
    _require(file.sparsity_config in (None, {}), "sparsity_config", "none", file.sparsity_config)
    _require(not file.transform_config, "transform_config", "none", file.transform_config)
    names = list(file.config_groups)
    _require(len(names) == 1, "config_groups", "one group", names)
    at = f"config_groups.{names[0]}"
    group = convert(file.config_groups[names[0]], _Group, Source.PYTHON, at)
    _require(group.targets == ["Linear"], f"{at}.targets", "['Linear']", group.targets)
    _require(group.format in (None, file.format), f"{at}.format", file.format, group.format)
    weights, at = group.weights, f"{at}.weights"
    is_packed, is_fp4 = file.format == "pack-quantized", file.format == NVFP4
    kind = "float" if is_fp4 or file.format == "float-quantized" else "int"
    _require(weights.type == kind, f"{at}.type", f"{kind} for {file.format}", weights.type)
    bits = 4 if is_fp4 else 8
    wanted = f"{bits} for {file.format}"
    _require(is_packed or weights.num_bits == bits, f"{at}.num_bits", wanted, weights.num_bits)
    _require(is_packed or weights.symmetric, f"{at}.symmetric", f"true for {file.format}", False)
    inputs = group.input_activations
    is_static = inputs is not None and not inputs.dynamic
    plain = file.ignore or []
    patterns = tuple(name[3:] for name in plain if name.startswith("re:"))
    for pattern in patterns:
        _check_pattern(pattern)
    return Quantization(
        file.format,
        weights.num_bits,
        _fp4_group(weights, at) if is_fp4 else _shared(weights, at, is_packed=is_packed),
        has_zeros=not weights.symmetric,
        # A name stands for that module alone, where a pattern stands for what it begins.
        plain_patterns=(*patterns, *(f"{re.escape(n)}$" for n in plain if n[:3] != "re:")),
        unused=("input_scale", "input_zero_point") if is_static else (),
        has_input_scales=is_fp4 and inputs is not None and inputs.dynamic == "local",
        rounds_tokens=file.format == "int-quantized" and inputs == _INTEGERS_OF_A_TOKEN,
    )


def _fp4_group(weights: _Weights, at: str) -> tuple[int, int]:
    wanted, found = f"tensor_group for {NVFP4}", weights.strategy
    _require(found == "tensor_group", f"{at}.strategy", wanted, found)
    _require(
        weights.group_size == FP4_BLOCK, f"{at}.group_size", str(FP4_BLOCK), weights.group_size
    )
    return 1, FP4_BLOCK


def _shared(weights: _Weights, at: str, *, is_packed: bool) -> tuple[int, int]:
    size, strategy = weights.group_size, weights.strategy
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if is_packed and strategy not in ("channel", "group"):
        raise FieldError(f"{at}.strategy", "channel or group for pack-quantized", strategy)
    if strategy == "tensor_group":
        raise FieldError(f"{at}.strategy", f"another one where format is not {NVFP4}", strategy)
    if strategy == "group":
        found = size or 0
        _require(found >= 1, f"{at}.group_size", "an integer from 1 up", size)
        return 1, found
    if strategy == "block":
        block = weights.block_structure
        if block is None:
            raise FieldError(f"{at}.block_structure", "two sizes", block)
        return block
    return (0, 0) if strategy == "tensor" else (1, 0)


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise FieldError("ignore", "regular expressions after re:", pattern) from error


def _of_fp8(file: _Fp8) -> Quantization:
    block = file.weight_block_size
    return Quantization(
        "float-quantized" if block is UNSET else "fp8",
        8,
        block or (0, 0),
        plain_names=(*(file.modules_to_not_convert or ()), *(file.ignored_layers or ())),
        unused=("input_scale", "activation_scale") if file.activation_scheme == "static" else (),
    )


def _of_gptq(file: _Gptq) -> Quantization:
    _require(not file.dynamic, "dynamic", "none", file.dynamic)
    _require(not file.lm_head, "lm_head", "false", file.lm_head)
    return Quantization(
        "gptq",
        file.bits,
        (1, _inputs(file.group_size)),
        has_zeros=not file.sym,
        zeros_less=1 if file.checkpoint_format == "gptq" else 0,
        is_reordered=file.desc_act,
        plain_names=tuple(file.modules_to_not_convert or ()),
    )


def _of_awq(file: _Awq) -> Quantization:
    _require(file.version.lower() == "gemm", "version", "gemm", file.version)
    _require(file.zero_point, "zero_point", "true", file.zero_point)
    plain = tuple(file.modules_to_not_convert or ())
    return Quantization("awq", 4, (1, _inputs(file.group_size)), True, plain_names=plain)


def _inputs(group_size: int) -> int:
    _require(group_size != 0, "group_size", "-1, or an integer from 1 up", group_size)
    return max(group_size, 0)


def _require(is_met: bool, field: str, wanted: str, found: object) -> None:
    if not is_met:
        raise FieldError(field, wanted, found)


def _has_fp8_kv(scheme: Any) -> bool:
    if scheme is None:
        return False
    found = convert(scheme, _KvCache, Source.PYTHON, _KV)
    _require(found.symmetric, f"{_KV}.symmetric", "true", found.symmetric)
    _require(not found.dynamic, f"{_KV}.dynamic", "false", found.dynamic)
    return True


_METHODS: dict[str, tuple[type[Any], Callable[[Any], Quantization]]] = {
    "compressed-tensors": (_CompressedTensors, _of_compressed_tensors),
    "fp8": (_Fp8, _of_fp8),
    "gptq": (_Gptq, _of_gptq),
    "awq": (_Awq, _of_awq),
}


def read_quantization(values: Mapping[str, Any]) -> tuple[Quantization | None, bool]:
    """Return what a `quantization_config` says of weights, None if they are plain tensors, and
    whether KV is to be FP8; a FieldError for what is not served here."""
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise FieldError(f"{FIELD}.quant_method", f"one of {', '.join(_METHODS)}", method)
    kind, of = _METHODS[method]
    try:
        has_fp8_kv = kind is _CompressedTensors and _has_fp8_kv(values.get(_KV))
        if has_fp8_kv and values.get("config_groups") in (None, {}):
            return None, True
        return of(convert(values, kind, Source.PYTHON)), has_fp8_kv
    except FieldError as error:
        raise error.at(FIELD) from error
