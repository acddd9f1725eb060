"""Compilation fields as TensorRT-LLM and vLLM spell them.

An alias is translated into fields of `CompilationConfig` before anything else looks at it. What it
states must not also be given by the field's own name; what it only implies by the other project's
defaults gives way to the field.

    torch_compile_config: {enable_piecewise_cuda_graph: true, capture_num_tokens: [128, 256]}
    cuda_graph_config: {enable_padding: true, max_batch_size: 64}

With both, decode steps replay full graphs and all others piecewise ones.
`torch_compile_config: null` turns compilation off, `cuda_graph_config: null` full graphs of decode
steps. vLLM's `dynamic_shapes_config: {type: unbacked}` stands inside the compilation fields.

On the command lines of Lockstep's own entry points the fields are spelt as vLLM does: `-O3` is a
level, `-cc.cudagraph_mode=FULL` one field, `-cc '{"level": 3}'` several. What is given in several
ways is merged, in depth; a field that is given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compile import validate
from compile.config import CompilationLevel, CUDAGraphMode, Sizes, read_fields
from compile.dispatch import ascending
from compile.errors import FieldError
from compile.validate import Kind, read_json

MISSING: Any = object()
"""Not given at all, which is not the same as null."""

DEFAULT_MAX_BATCH_SIZE = 128

_TORCH_COMPILE: dict[str, Kind] = {
    "enable_fullgraph": validate.kind_of(bool),
    "enable_inductor": validate.kind_of(bool),
    "enable_piecewise_cuda_graph": validate.kind_of(bool),
    "capture_num_tokens": validate.kind_of(Sizes | None),
    "enable_userbuffers": validate.kind_of(bool),
    "max_num_streams": validate.whole_number(1),
}
_CUDA_GRAPH: dict[str, Kind] = {
    "batch_sizes": validate.kind_of(Sizes | None),
    "max_batch_size": validate.whole_number(0),
    "enable_padding": validate.kind_of(bool),
}
_DYNAMIC_SHAPES = {"type": "dynamic_shapes", "evaluate_guards": "evaluate_guards"}

SECTIONS = {
    "torch_compile_config": f"null or an object with {', '.join(_TORCH_COMPILE)}",
    "cuda_graph_config": f"null or an object with {', '.join(_CUDA_GRAPH)}",
    "compilation.dynamic_shapes_config": f"an object with {', '.join(_DYNAMIC_SHAPES)}",
}
"""What a section of other spellings may be."""


@dataclass
class _Meaning:
    """Fields that a section stands for."""

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


def fields_of(
    given: Mapping[str, Any],
    *,
    torch_compile_config: Any = MISSING,
    cuda_graph_config: Any = MISSING,
) -> dict[str, Any]:
    """Return fields of `CompilationConfig` as they are kept, from their own names and aliases.

    Raises:
        FieldError: a field is unknown, holds what cannot be used, or is given twice.
    """
    fields = read_fields(_without_vllm(given))
    compiles = _section("torch_compile_config", torch_compile_config, _TORCH_COMPILE)
    graphs = _section("cuda_graph_config", cuda_graph_config, _CUDA_GRAPH)
    meaning = _Meaning()
    _read_torch_compile(meaning, compiles)
    _read_cuda_graph(meaning, graphs)
    _read_mode(meaning, compiles, graphs)
    for name, alias in meaning.aliases.items():
        if name in fields:
            raise FieldError(alias, f"nothing where compilation.{name} is given", "both")
    return {**meaning.implied, **fields, **meaning.stated}


def generation_sizes(max_batch_size: int, *, enable_padding: bool) -> tuple[int, ...]:
    """Return the batch sizes up to a largest one, coarser if steps are padded (TensorRT-LLM)."""
    sizes = [1, 2, 4, *range(8, 129, 8)] if enable_padding else [*range(1, 33), 64, 128]
    size = 256
    while size < max_batch_size:
        sizes.append(size)
        size *= 2
    return ascending([*(n for n in sizes if n < max_batch_size), max_batch_size])


def _without_vllm(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(given)
    if "dynamic_shapes_config" not in fields:
        return fields
    section, shapes = "compilation.dynamic_shapes_config", fields.pop("dynamic_shapes_config")
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


def _section(section: str, given: Any, kinds: Mapping[str, Kind]) -> Any:
    """Return a section as it is kept; null and absent ones as they are."""
    if given is MISSING or given is None:
        return given
    if not isinstance(given, Mapping):
        raise FieldError(section, SECTIONS[section], given)
    return validate.read(given, kinds, section)


def _read_torch_compile(meaning: _Meaning, section: Any) -> None:
    name = "torch_compile_config"
    if section is MISSING:
        return
    if section is None:
        meaning.put("level", int(CompilationLevel.NO_COMPILATION), name, is_stated=True)
        return
    for key, only, why in (
        ("enable_fullgraph", True, "true (a forward is always one graph)"),
        ("enable_userbuffers", False, "false (user buffers are not built yet)"),
        ("max_num_streams", 1, "1 (several streams are not built yet)"),
    ):
        if section.get(key, only) != only:
            raise FieldError(f"{name}.{key}", why, section[key])
    meaning.put("level", int(CompilationLevel.PIECEWISE), name, is_stated=False)
    inductor = "enable_inductor"
    is_stated = inductor in section
    meaning.put(
        "use_inductor", section.get(inductor, False), f"{name}.{inductor}", is_stated=is_stated
    )
    if section.get("capture_num_tokens") is not None:
        tokens = "capture_num_tokens"
        meaning.put(tokens, section[tokens], f"{name}.{tokens}", is_stated=True)


def _read_cuda_graph(meaning: _Meaning, section: Any) -> None:
    name = "cuda_graph_config"
    if section is MISSING or section is None:
        return
    padding = section.get("enable_padding", False)
    is_stated = "enable_padding" in section
    meaning.put("enable_padding", padding, f"{name}.enable_padding", is_stated=is_stated)
    sizes, largest = section.get("batch_sizes"), section.get("max_batch_size", 0)
    if sizes is not None and largest not in (0, max(sizes)):
        wanted = f"{max(sizes)}, the largest of {name}.batch_sizes"
        raise FieldError(f"{name}.max_batch_size", wanted, largest)
    alias = f"{name}.{'batch_sizes' if sizes is not None else 'max_batch_size'}"
    is_stated = sizes is not None or largest > 0
    if sizes is None:
        sizes = generation_sizes(largest or DEFAULT_MAX_BATCH_SIZE, enable_padding=padding)
    meaning.put("cudagraph_capture_sizes", sizes, alias, is_stated=is_stated)


def _read_mode(meaning: _Meaning, compiles: Any, graphs: Any) -> None:
    """Full graphs for decode steps, piecewise ones for all others: each may be on or off."""
    key = "enable_piecewise_cuda_graph"
    if compiles is MISSING and graphs is not None:
        return
    has_pieces = isinstance(compiles, dict) and compiles.get(key, False)
    has_full = isinstance(graphs, dict) or (graphs is MISSING and compiles is not None)
    mode = {
        (False, False): CUDAGraphMode.NONE,
        (False, True): CUDAGraphMode.PIECEWISE,
        (True, False): CUDAGraphMode.FULL_DECODE_ONLY,
        (True, True): CUDAGraphMode.FULL_AND_PIECEWISE,
    }[has_full, has_pieces]
    is_stated = isinstance(compiles, dict) and key in compiles
    meaning.put("cudagraph_mode", mode, f"torch_compile_config.{key}", is_stated=is_stated)


_FIELD = re.compile(
    r"(?:-cc|--compilation[-_]config)(?P<path>(?:\.[\w.]+)?)(?:=(?P<value>.*))?", re.DOTALL
)
_LEVEL = re.compile(r"-O=?(?P<value>\d+)?")


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return compilation fields as they are kept, and all other arguments in their order.

    Raises:
        FieldError: a field is unknown, holds what cannot be used or is given twice.
    """
    given: dict[str, Any] = {}
    others: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            others += [argument, *waiting]
            break
        if level := _LEVEL.fullmatch(argument):
            path, value = ["level"], level["value"]
        elif found := _FIELD.fullmatch(argument):
            path, value = [key for key in found["path"].split(".") if key], found["value"]
        else:
            others.append(argument)
            continue
        if value is None:
            value = _next(waiting, argument)
        merge(given, path, value if path else _object(value))
    return fields_of(given), others


def merge(into: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value at its path; objects are merged key by key.

    Raises:
        FieldError: the path, or a part of it, holds a value already.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            merge(into, [*path, *str(key).split(".")], inner)
        return
    *parents, last = path
    for key in parents:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            raise FieldError(".".join(("compilation", *path)), f"{key} to have fields", into)
    if last in into:
        raise FieldError(".".join(("compilation", *path)), "one value", "it twice")
    into[last] = value


def _next(waiting: list[str], argument: str) -> str:
    if not waiting:
        raise FieldError(argument, "a value", "the end of the line")
    return waiting.pop(0)


def _object(text: str) -> Mapping[str, Any]:
    value = read_json(text)
    if not isinstance(value, Mapping):
        raise FieldError("-cc", "a JSON object", text)
    return value
