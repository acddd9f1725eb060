"""Tensors inside of tuples, lists and dicts: what a forward's arguments and outputs come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return `value` with `fn` applied to every tensor in it; all else stays."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple | list):
        return rebuild(value, [map_tensors(fn, item) for item in value])
    if isinstance(value, dict):
        return {key: map_tensors(fn, item) for key, item in value.items()}
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return every tensor in `value`, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def rebuild(like: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """Return the items as a sequence of the type of `like`: a list, tuple or named tuple."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
