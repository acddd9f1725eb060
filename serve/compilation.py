"""The compilation fields among the arguments of `deploy` and `LLM`.

One set of fields is asked of all pools, and each pool resolves it by itself, with the preset that
fits its steps. TensorRT-LLM's and vLLM's spellings are translated into these fields before anything
else looks at them. What an alias states must not also be given by the field's own name; what it
only implies by the other project's defaults gives way to the field.

    torch_compile_config: {enable_piecewise_cuda_graph: true, capture_num_tokens: [128, 256]}
    cuda_graph_config: {enable_padding: true, max_batch_size: 64}

With both, decode steps replay full graphs and all others piecewise ones.
`torch_compile_config: null` turns compilation off, `cuda_graph_config: null` full graphs of decode
steps. vLLM's `dynamic_shapes_config: {type: unbacked}` stands inside the compilation fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cluster.config import SchedulerConfig
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
from compile.resolve import PRESETS, StepLimits, resolve
from model.fields import at_least, says

DEFAULT_LEVEL = int(CompilationLevel.PIECEWISE)
"""What is compiled where no level is given."""
DEFAULT_MAX_BATCH_SIZE = 128
"""`cuda_graph_config.max_batch_size` where it is 0."""

LOCAL_FIELDS = ("cache_dir", "debug_dump_path")
"""Where a machine keeps files: processes need not agree on it."""

_DYNAMIC_SHAPES = {"type": "dynamic_shapes", "evaluate_guards": "evaluate_guards"}


class TorchCompileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`torch_compile_config.*`, as TensorRT-LLM spells it."""

    enable_fullgraph: bool = True
    enable_inductor: bool | UnsetType = UNSET
    enable_piecewise_cuda_graph: bool | UnsetType = UNSET
    capture_num_tokens: list[int] | None = None
    enable_userbuffers: bool = False
    max_num_streams: Annotated[int, Meta(ge=1), says("a whole number of at least 1")] = 1


class CudaGraphConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cuda_graph_config.*`, as TensorRT-LLM spells it."""

    batch_sizes: list[int] | None = None
    max_batch_size: Annotated[int, at_least(0)] = 0
    enable_padding: bool | UnsetType = UNSET


SECTIONS = {
    "torch_compile_config": (
        f"null or an object with {', '.join(TorchCompileConfig.__struct_fields__)}"
    ),
    "cuda_graph_config": f"null or an object with {', '.join(CudaGraphConfig.__struct_fields__)}",
    "compilation.dynamic_shapes_config": f"an object with {', '.join(_DYNAMIC_SHAPES)}",
}
"""What a section of other spellings may be."""


def as_object(value: Any) -> Any:
    """Return a level or a configuration as an object of fields; other values as they are."""
    if isinstance(value, CompilationConfig):
        fields = value.to_dict()
        return {name: fields[name] for name in FIELDS}
    level = _read_json(value)
    return {"level": level} if isinstance(level, int) else value


def given_fields(
    given: Mapping[str, Any],
    torch_compile: TorchCompileConfig | UnsetType | None = UNSET,
    cuda_graph: CudaGraphConfig | UnsetType | None = UNSET,
) -> dict[str, Any]:
    """Return the fields that are given, by whichever name, as they are kept.

    Args:
        given: `compilation.*`.
        torch_compile: `torch_compile_config`.
        cuda_graph: `cuda_graph_config`.

    Raises:
        FieldError: a field is unknown, holds what cannot be used, or is given twice.
    """
    fields = {name: _converted(name, value) for name, value in _without_vllm(given).items()}
    meaning = _Meaning()
    _read_torch_compile(meaning, torch_compile)
    _read_cuda_graph(meaning, cuda_graph)
    _read_mode(meaning, torch_compile, cuda_graph)
    for name, alias in meaning.aliases.items():
        if name in fields:
            raise FieldError(alias, f"nothing where compilation.{name} is given", "both")
    fields = {**meaning.implied, **fields, **meaning.stated}
    try:
        config = requested(fields)
    except FieldError as error:
        alias = meaning.aliases.get(error.field.removeprefix("compilation."), error.field)
        raise error.renamed(alias) from None
    return {name: getattr(config, name) for name in fields}


@dataclass
class _Meaning:
    """Fields that sections of another spelling stand for."""

    stated: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """The alias that states each field."""
    implied: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, value: Any, alias: str, *, is_stated: bool) -> None:
        """Add a field."""
        if not is_stated:
            self.implied[name] = value
            return
        self.stated[name], self.aliases[name] = value, alias


def _of_text(kind: Any) -> Any:
    """Return the type of what text, JSON and YAML have for a field: members go by their names."""
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(_of_text, get_args(kind)))]  # noqa: UP007  (of a computed tuple)
    return str if isinstance(kind, type) and issubclass(kind, Enum) else kind


_KINDS = {name: _of_text(kind) for name, kind in get_type_hints(CompilationConfig).items()}


def _converted(name: str, value: Any) -> Any:
    """Return a field as `CompilationConfig` takes it; its bounds are checked there."""
    if name not in FIELDS:
        raise FieldError(f"compilation.{name}", f"one of {', '.join(FIELDS)}", value)
    if isinstance(value, bool) and "on" in get_args(_KINDS[name]):
        return "on" if value else "off"  # as YAML reads these words
    if isinstance(value, Mapping):
        return _with_text_read(value)
    plain = value.name if isinstance(value, Enum) else value
    plain = os.fspath(plain) if isinstance(plain, os.PathLike) else plain
    try:
        return msgspec.convert(plain, _KINDS[name], strict=False)
    except msgspec.ValidationError:
        raise FieldError(f"compilation.{name}", WANTED[name], value) from None


def _with_text_read(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a compiler, whose types it alone knows, with text read as JSON."""
    return {
        key: _with_text_read(value) if isinstance(value, Mapping) else _read_json(value)
        for key, value in options.items()
    }


def _read_json(value: Any) -> Any:
    """Return what text says as JSON, in any case for true and false; all else as it is."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return json.loads(value)
    except ValueError:
        return value


def _without_vllm(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(given)
    section, shapes = "compilation.dynamic_shapes_config", fields.pop("dynamic_shapes_config", {})
    if not isinstance(shapes, Mapping):
        raise FieldError(section, SECTIONS[section], shapes)
    for key, value in shapes.items():
        name = _DYNAMIC_SHAPES.get(key)
        if name is None:
            raise FieldError(f"{section}.{key}", f"one of {', '.join(_DYNAMIC_SHAPES)}", value)
        if name in fields:
            wanted = f"nothing where compilation.{name} is given"
            raise FieldError(f"{section}.{key}", wanted, value)
        fields[name] = value
    return fields


def _read_torch_compile(meaning: _Meaning, section: TorchCompileConfig | UnsetType | None) -> None:
    name = "torch_compile_config"
    if section is UNSET:
        return
    if section is None:
        meaning.put("level", int(CompilationLevel.NO_COMPILATION), name, is_stated=True)
        return
    for key, found, only, why in (
        ("enable_fullgraph", section.enable_fullgraph, True, "a forward is always one graph"),
        ("enable_userbuffers", section.enable_userbuffers, False, "user buffers are not built yet"),
        ("max_num_streams", section.max_num_streams, 1, "several streams are not built yet"),
    ):
        if found != only:
            raise FieldError(f"{name}.{key}", f"{json.dumps(only)} ({why})", found)
    meaning.put("level", int(CompilationLevel.PIECEWISE), name, is_stated=False)
    is_stated = section.enable_inductor is not UNSET
    alias = f"{name}.enable_inductor"
    meaning.put("use_inductor", section.enable_inductor is True, alias, is_stated=is_stated)
    if section.capture_num_tokens is not None:
        tokens = "capture_num_tokens"
        meaning.put(tokens, section.capture_num_tokens, f"{name}.{tokens}", is_stated=True)


def _read_cuda_graph(meaning: _Meaning, section: CudaGraphConfig | UnsetType | None) -> None:
    name = "cuda_graph_config"
    if section is UNSET or section is None:
        return
    is_padded, is_stated = section.enable_padding is True, section.enable_padding is not UNSET
    meaning.put("enable_padding", is_padded, f"{name}.enable_padding", is_stated=is_stated)
    sizes, largest = section.batch_sizes, section.max_batch_size
    if sizes and largest not in (0, max(sizes)):
        wanted = f"{max(sizes)}, the largest of {name}.batch_sizes"
        raise FieldError(f"{name}.max_batch_size", wanted, largest)
    alias = f"{name}.{'batch_sizes' if sizes is not None else 'max_batch_size'}"
    is_stated = sizes is not None or largest > 0
    if sizes is None:
        sizes = generation_sizes(largest or DEFAULT_MAX_BATCH_SIZE, enable_padding=is_padded)
    meaning.put("cudagraph_capture_sizes", sizes, alias, is_stated=is_stated)


def generation_sizes(max_batch_size: int, *, enable_padding: bool) -> list[int]:
    """Return the batch sizes up to a largest one, coarser if steps are padded (TensorRT-LLM)."""
    sizes = [1, 2, 4, *range(8, 129, 8)] if enable_padding else [*range(1, 33), 64, 128]
    size = 256
    while size < max_batch_size:
        sizes.append(size)
        size *= 2
    return [*ascending([*(n for n in sizes if n < max_batch_size), max_batch_size])]


def _read_mode(
    meaning: _Meaning,
    compiles: TorchCompileConfig | UnsetType | None,
    graphs: CudaGraphConfig | UnsetType | None,
) -> None:
    """Full graphs for decode steps, piecewise ones for all others: each may be on or off."""
    if compiles is UNSET and graphs is not None:
        return
    pieces = compiles.enable_piecewise_cuda_graph if compiles else UNSET
    has_full = bool(graphs) or (graphs is UNSET and compiles is not None)
    mode = {
        (False, False): CUDAGraphMode.NONE,
        (False, True): CUDAGraphMode.PIECEWISE,
        (True, False): CUDAGraphMode.FULL_DECODE_ONLY,
        (True, True): CUDAGraphMode.FULL_AND_PIECEWISE,
    }[has_full, pieces is True]
    alias = "torch_compile_config.enable_piecewise_cuda_graph"
    meaning.put("cudagraph_mode", mode, alias, is_stated=pieces is not UNSET)


def requested(fields: Mapping[str, Any]) -> CompilationConfig:
    """Return what all pools are asked for.

    Raises:
        FieldError: fields contradict each other.
    """
    return CompilationConfig(**{"level": DEFAULT_LEVEL, **fields})


def resolved(
    fields: Mapping[str, Any],
    scheduler: SchedulerConfig,
    pool: str,
    *,
    enforce_eager: bool,
    device: str,
    is_served: bool = True,
) -> CompilationConfig:
    """Return what the engines of a pool run; a rank's attention backend may still reduce it.

    Raises:
        FieldError: fields contradict each other, or no size is left to capture.
    """
    asked = requested(fields)
    limits = StepLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    return resolve(
        asked,
        limits,
        preset=PRESETS[pool],
        enforce_eager=enforce_eager,
        device=device,
        is_served=is_served,
    )


def check_names(config: CompilationConfig) -> None:
    """Refuse ops and options of the compiler that do not exist: with them no start could compile.

    Only torch and the model know the names, so both are imported, which takes seconds: not where
    no name is given.

    Raises:
        FieldError: names the field and what is unknown.
    """
    ops = set(config.splitting_ops or ()) - set(DEFAULT_SPLITTING_OPS) if config.can_split else ()
    has_options = config.inductor_compile_config and config.level >= CompilationLevel.DYNAMO_ONCE
    if ops:
        import model.weights  # noqa: F401  (registers its ops)
        from compile.pieces.split import look_up_ops

        look_up_ops(config.splitting_ops or ())
    if has_options:
        from compile.cache.inductor import make_compiler

        make_compiler(config)


def shared_facts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields on which processes that work together must agree, as JSON has them."""
    facts = requested(fields).to_dict()
    return {name: value for name, value in facts.items() if name not in LOCAL_FIELDS}


def refuse_speculation(config: Mapping[str, Any]) -> None:
    """Refuse `speculative_config` by name; a draft model with its own engine will stay refused.

    Raises:
        FieldError: anything is given.
    """
    for name in ("mtp_eagle_one_model", "eagle3_one_model"):
        value = config.get(name)
        if _read_json(value) is False:
            wanted = "true (two model engines cannot be compiled as one forward)"
            raise FieldError(f"speculative_config.{name}", wanted, False)
    if config:
        wanted = "nothing (speculation is not built yet)"
        raise FieldError("speculative_config", wanted, dict(config))
