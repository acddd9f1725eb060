"""What piecewise graphs rely on, checked on the pieces before anything is compiled.

The one thing to know: a captured piece reads and writes fixed addresses at sizes that follow from
the number of tokens. Each rule here keeps one thing out that would move an address or a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from compile.split import SplitItem, example_value


class PieceInvariantError(ValueError):
    """A piece cannot be captured, or not be sized by the number of tokens."""


def check_pieces(items: Sequence[SplitItem], num_tokens: Any, *, captured: bool) -> None:
    """Check that attention returns nothing, that every compiled piece gets a tensor with the
    token dimension, and that nothing but the number of tokens is dynamic.

    Other splitting ops may return something: it is copied to where the graphs read it.

    Args:
        num_tokens: the symbol of the number of tokens.
        captured: pieces become graphs, which read what eager pieces write at fixed addresses.

    Raises:
        PieceInvariantError: naming the piece and the value that breaks a rule.
    """
    for item in items:
        values = [example_value(node) for node in item.graph.graph.nodes if node.op != "output"]
        symbols = {s for value in values for s in _symbols(value)}
        if symbols - {num_tokens}:
            found = ", ".join(sorted(map(str, symbols - {num_tokens})))
            wanted = "no dynamic dimension but the number of tokens"
            raise PieceInvariantError(f"{item.name}: wanted {wanted}, found {found}")
        if captured and item.is_splitting:
            _check_returns_nothing(item)
        if captured and not item.is_splitting:
            _check_has_tokens(item, num_tokens)


def _check_returns_nothing(item: SplitItem) -> None:
    for node in item.graph.graph.nodes:
        if "attention" in str(node.target) and example_value(node) is not None:
            wanted = "attention that writes into an output of its caller"
            found = f"{node.target}, which returns one"
            raise PieceInvariantError(f"{item.name}: wanted {wanted}, found {found}")


def _check_has_tokens(item: SplitItem, num_tokens: Any) -> None:
    tensors = [v for n in item.placeholders() if isinstance(v := example_value(n), torch.Tensor)]
    if not any(num_tokens in _symbols(value) for value in tensors):
        wanted = "an input with the token dimension"
        raise PieceInvariantError(f"{item.name}: wanted {wanted}, found {len(tensors)} without")


def _symbols(value: Any) -> set[Any]:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {s for size in sizes if isinstance(size, torch.SymInt) for s in _free(size)}


def _free(size: torch.SymInt) -> set[Any]:
    free: set[Any] = size.node.expr.free_symbols
    return free
