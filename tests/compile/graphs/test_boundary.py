"""Tensors are found and replaced in whatever a forward returns, and the rest stays."""

from __future__ import annotations

from typing import NamedTuple

import torch

from compile.graphs.boundary import map_tensors, tensors_of


class Pair(NamedTuple):
    hidden: torch.Tensor
    name: str


def test_containers_keep_their_types_and_tensors_their_order() -> None:
    x = [torch.full((), float(i)) for i in range(5)]
    value = (x[0], [x[1], None, 3], {"a": x[2], "b": "text"}, Pair(x[3], "n"), x[4])
    assert [float(t) for t in tensors_of(value)] == [0, 1, 2, 3, 4]
    found = map_tensors(lambda t: int(t) * 10, value)
    assert found == (0, [10, None, 3], {"a": 20, "b": "text"}, (30, "n"), 40)
    assert type(found[3]) is Pair
