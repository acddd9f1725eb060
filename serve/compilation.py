"""The compilation fields among the arguments of `deploy` and `LLM`.

One set of fields is asked of all pools, and each pool resolves it by itself, with the preset that
fits its steps (`compile/resolve.py`). TensorRT-LLM's sections are translated into these fields:
what a section states must not also be given by the field's own name, and what it only implies by
that project's defaults gives way to the field.

    torch_compile_config: {enable_piecewise_cuda_graph: true, capture_num_tokens: [128, 256]}
    cuda_graph_config: {enable_padding: true, max_batch_size: 64}

With both, decode steps replay full graphs and all others piecewise ones.
`torch_compile_config: null` turns compilation off, `cuda_graph_config: null` full graphs of decode
steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from compile.config import (
    DEFAULT_SPLITTING_OPS,
    FIELDS,
    WANTED,
    CompilationConfig,
    CompilationLevel,
    CUDAGraphMode,
)
from compile.dispatch import ascending
from compile.errors import FieldError
from model.fields import at_least

DEFAULT_LEVEL = int(CompilationLevel.PIECEWISE)
"""What is compiled where no level is given."""
DEFAULT_MAX_BATCH_SIZE = 128
"""`cuda_graph_config.max_batch_size` where it is 0."""


class TorchCompileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`torch_compile_config.*`, as TensorRT-LLM spells it."""

    enable_fullgraph: bool = True
    enable_inductor: bool | UnsetType = UNSET
    enable_piecewise_cuda_graph: bool | UnsetType = UNSET
    capture_num_tokens: list[int] | None = None
    enable_userbuffers: bool | UnsetType = UNSET
    max_num_streams: int | UnsetType = UNSET

    def __post_init__(self) -> None:
        if not self.enable_fullgraph:
            wanted = "true (a forward is always one graph)"
            raise FieldError("torch_compile_config.enable_fullgraph", wanted, False)


class CudaGraphConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cuda_graph_config.*`, as TensorRT-LLM spells it."""

    batch_sizes: list[int] | None = None
    max_batch_size: Annotated[int, at_least(0)] = 0
    enable_padding: bool | UnsetType = UNSET


SECTIONS = {
    name: f"null or an object with {', '.join(kind.__struct_fields__)}"
    for name, kind in (
        ("torch_compile_config", TorchCompileConfig),
        ("cuda_graph_config", CudaGraphConfig),
    )
}
"""What a section of TensorRT-LLM may be."""


def compilation_fields(
    given: Mapping[str, Any],
    torch_compile: TorchCompileConfig | UnsetType | None,
    cuda_graph: CudaGraphConfig | UnsetType | None,
) -> dict[str, Any]:
    """Return the level and the fields that are given, by whichever name, as they are kept. Raises
    FieldError for one that is unknown, cannot be used or is given twice."""
    fields = {name: _converted(name, value) for name, value in given.items()}
    stated: dict[str, Any] = {}
    implied: dict[str, Any] = {"level": DEFAULT_LEVEL}
    aliases: dict[str, str] = {}
    for name, alias, value, default in _meanings(torch_compile, cuda_graph):
        if value is UNSET:
            implied[name] = default
        elif name in fields:
            raise FieldError(alias, f"nothing where compilation.{name} is given", "both")
        else:
            stated[name], aliases[name] = value, alias
    fields = {**implied, **fields, **stated}
    try:
        config = CompilationConfig(**fields)
    except FieldError as error:
        alias = aliases.get(error.field.removeprefix("compilation."), error.field)
        raise error.renamed(alias) from None
    return {name: getattr(config, name) for name in fields}


Meaning = tuple[str, str, Any, Any]
"""A compilation field, the alias that states it, the value that it states or UNSET, the default."""


def _meanings(
    compiles: TorchCompileConfig | UnsetType | None, graphs: CudaGraphConfig | UnsetType | None
) -> list[Meaning]:
    section = "torch_compile_config"
    found: list[Meaning] = []
    pieces: bool | UnsetType = UNSET
    if compiles is None:
        found += [("level", section, int(CompilationLevel.NO_COMPILATION), None)]
    elif compiles is not UNSET:
        pieces = compiles.enable_piecewise_cuda_graph
        inductor = compiles.enable_inductor
        found += [("use_inductor", f"{section}.enable_inductor", inductor, False)]
        for name in ("enable_userbuffers", "max_num_streams"):
            if (value := getattr(compiles, name)) is not UNSET:
                found += [(name, f"{section}.{name}", value, None)]
        if compiles.capture_num_tokens is not None:
            tokens = "capture_num_tokens"
            found += [(tokens, f"{section}.{tokens}", compiles.capture_num_tokens, None)]
    if graphs:
        found += _graph_meanings(graphs)
    if compiles is not UNSET or graphs is None:
        # Full graphs for decode steps, piecewise ones for all others: each may be on or off.
        mode = {
            (False, False): CUDAGraphMode.NONE,
            (False, True): CUDAGraphMode.PIECEWISE,
            (True, False): CUDAGraphMode.FULL_DECODE_ONLY,
            (True, True): CUDAGraphMode.FULL_AND_PIECEWISE,
        }[bool(graphs) or (graphs is UNSET and compiles is not None), pieces is True]
        alias = f"{section}.enable_piecewise_cuda_graph"
        found += [("cudagraph_mode", alias, UNSET if pieces is UNSET else mode, mode)]
    return found


def _graph_meanings(graphs: CudaGraphConfig) -> list[Meaning]:
    section, sizes, largest = "cuda_graph_config", graphs.batch_sizes, graphs.max_batch_size
    if sizes and largest not in (0, max(sizes)):
        wanted = f"{max(sizes)}, the largest of {section}.batch_sizes"
        raise FieldError(f"{section}.max_batch_size", wanted, largest)
    alias = f"{section}.{'batch_sizes' if sizes is not None else 'max_batch_size'}"
    if sizes is None:
        is_padded = graphs.enable_padding is True
        sizes = generation_sizes(largest or DEFAULT_MAX_BATCH_SIZE, enable_padding=is_padded)
    is_stated = graphs.batch_sizes is not None or largest > 0
    return [
        ("enable_padding", f"{section}.enable_padding", graphs.enable_padding, False),
        ("cudagraph_capture_sizes", alias, sizes if is_stated else UNSET, sizes),
    ]


def generation_sizes(max_batch_size: int, *, enable_padding: bool) -> list[int]:
    """Return the batch sizes up to a largest one, coarser if steps are padded (TensorRT-LLM)."""
    sizes = [1, 2, 4, *range(8, 129, 8)] if enable_padding else [*range(1, 33), 64, 128]
    sizes += [128 << i for i in range(1, max_batch_size.bit_length())]
    return [*ascending([*(n for n in sizes if n < max_batch_size), max_batch_size])]


def _of_text(kind: Any) -> Any:
    """Return the type of what text, JSON and YAML have for a field: members go by their names."""
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(_of_text, get_args(kind)))]  # noqa: UP007  (of a computed tuple)
    return str if isinstance(kind, type) and issubclass(kind, Enum) else kind


_KINDS = {name: _of_text(kind) for name, kind in get_type_hints(CompilationConfig).items()}


def _converted(name: str, value: Any) -> Any:
    """Return a field as `CompilationConfig` takes it; its bounds are checked there."""
    if name == "dynamic_shapes_config":  # its two known keys are paths of their own
        known = "type, evaluate_guards"
        if not isinstance(value, Mapping):
            raise FieldError(f"compilation.{name}", f"an object with {known}", value)
        for key, unknown in value.items():
            raise FieldError(f"compilation.{name}.{key}", f"one of {known}", unknown)
    if name not in FIELDS:
        raise FieldError(f"compilation.{name}", f"one of {', '.join(FIELDS)}", value)
    if isinstance(value, Mapping):
        return _with_text_read(value)
    plain = as_switch(value.name if isinstance(value, Enum) else value, _KINDS[name])
    plain = os.fspath(plain) if isinstance(plain, os.PathLike) else plain
    try:
        return msgspec.convert(plain, _KINDS[name], strict=False)
    except msgspec.ValidationError:
        raise FieldError(f"compilation.{name}", WANTED[name], value) from None


def as_switch(value: Any, kind: Any) -> Any:
    """Return a switch as it was written: YAML reads on and off as true and false."""
    is_switch = isinstance(value, bool) and "on" in get_args(kind)
    return ("on" if value else "off") if is_switch else value


def as_object(value: Any) -> Any:
    """Return a level or a configuration as an object of fields; other values as they are."""
    if isinstance(value, CompilationConfig):
        fields = value.to_dict()
        return {name: fields[name] for name in FIELDS}
    level = _read_json(value)
    return {"level": level} if isinstance(level, int) else value


def _with_text_read(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a compiler, whose types it alone knows, with text read as JSON."""
    return {
        key: _with_text_read(value) if isinstance(value, Mapping) else _read_json(value)
        for key, value in options.items()
    }


def _read_json(value: Any) -> Any:
    """Return what text says as JSON, in any case for true and false; all else as it is."""
    try:
        is_word = value.lower() in ("true", "false")
        return json.loads(value.lower() if is_word else value)
    except (AttributeError, ValueError):
        return value


def check_names(config: CompilationConfig) -> None:
    """Refuse ops and options of the compiler that do not exist: with them no start could compile.
    Only torch and the model know the names, and importing both takes seconds: so they are imported
    only where a name is given."""
    if config.can_split and set(config.splitting_ops or ()) - set(DEFAULT_SPLITTING_OPS):
        import model.weights  # noqa: F401  (registers its ops)
        from compile.pieces.split import look_up_ops

        look_up_ops(config.splitting_ops or ())
    if config.inductor_compile_config and config.level >= CompilationLevel.DYNAMO_ONCE:
        from compile.cache.inductor import make_compiler

        make_compiler(config)
