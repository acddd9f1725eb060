"""Register a Python function as an opaque torch op, into which tracing does not look. An integer
argument becomes a SymInt, so that a graph serves all its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

LIBRARY = "lockstep"
_libraries: dict[str, torch.library.Library] = {}


@dataclass
class _Registered:
    schema: str
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)


_registered: dict[str, _Registered] = {}
_composites: set[Callable[..., Any]] = set()


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Iterable[str] = (),
    fake_impl: Callable[..., Any] | None = None,
    target_lib: str = LIBRARY,
    dispatch_key: str = "CompositeExplicitAutograd",
    tags: Sequence[torch.Tag] = (),
    is_composite: bool = False,
) -> Any:
    """Register `op_func`, which writes into `mutates_args`, as `torch.ops.<target_lib>.<op_name>`
    and return the op. One that is registered is returned, because a module may be imported under
    two paths; ValueError: it has another schema. Another dispatch key than the default, which
    serves every device, adds an implementation. `fake_impl` is the shape function for tracing; only
    an op that returns nothing does without. `is_composite`: `op_func` calls other ops and kernels
    and reads no value, so a graph on a CPU records what it calls."""
    schema = torch.library.infer_schema(op_func, mutates_args=tuple(mutates_args))
    name = f"{target_lib}::{op_name}"
    namespace = getattr(torch.ops, target_lib)
    known = _registered.get(name)
    if known is None and hasattr(namespace, op_name):
        # Defined by another copy of this module: torch keeps ops by name alone.
        known = _registered[name] = _Registered(schema, {dispatch_key: op_func})
    elif known is None:
        known = _registered[name] = _define(name, schema, fake_impl, tags)
    elif known.schema != schema:
        raise ValueError(f"{name}: wanted the schema {known.schema}, found {schema}")
    if dispatch_key not in known.functions:
        _libraries[target_lib].impl(op_name, op_func, dispatch_key=dispatch_key)
        known.functions[dispatch_key] = op_func
        if is_composite:
            _composites.add(op_func)
    return getattr(namespace, op_name)


def function_of(op: Any, device_type: str) -> Callable[..., Any] | None:
    """Return what the dispatcher calls in inference mode; None: the op was not registered here."""
    schema = getattr(op, "_schema", None)
    known = _registered.get(schema.name) if schema is not None else None
    if known is None:
        return None
    return known.functions.get(
        device_type.upper(), known.functions.get("CompositeExplicitAutograd")
    )


def composite_of(op: Any, device_type: str) -> Callable[..., Any] | None:
    """Return what `function_of` does if a graph records what that calls, else None."""
    found = function_of(op, device_type)
    return found if found in _composites else None


def _define(
    name: str, schema: str, fake_impl: Callable[..., Any] | None, tags: Sequence[torch.Tag]
) -> _Registered:
    target_lib, op_name = name.split("::")
    if fake_impl is None and not schema.endswith("-> ()"):
        raise ValueError(f"fake_impl: wanted one for {name}{schema}, found None")
    if target_lib not in _libraries:
        _libraries[target_lib] = torch.library.Library(target_lib, "FRAGMENT")
    library = _libraries[target_lib]
    library.define(op_name + schema, tags=tuple(tags))
    torch.library.register_fake(name, fake_impl or _returns_nothing, lib=library)
    return _Registered(schema)


def _returns_nothing(*_args: Any, **_kwargs: Any) -> None:
    """The shape function of an op that only writes into its arguments."""
