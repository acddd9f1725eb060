"""A registered op is opaque: its schema says what it writes, its fake says what it returns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from compile import custom_op
from compile.custom_op import LIBRARY, direct_register_custom_op

_numbers = itertools.count()


def double_on_cpu(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 100


@pytest.fixture
def name() -> str:
    """A name that no other test registered: an op lives as long as the process."""
    return f"test_op_{next(_numbers)}"


def fill(x: torch.Tensor, out: torch.Tensor, scale: float, layer_name: str) -> None:
    """Write into an output that the caller gives, as attention does."""
    assert layer_name
    for row in range(int(x.shape[0])):
        out[row] = x[row] * scale


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def double_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.feature("K01")
def test_registering_twice_returns_the_op_that_exists_also_from_another_copy_of_the_module(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = direct_register_custom_op(name, double, fake_impl=double_fake)
    assert direct_register_custom_op(name, double_on_cpu, fake_impl=double_fake) is first
    assert first(torch.ones(1)).tolist() == [2.0]
    monkeypatch.setattr(custom_op, "_registered", {})
    monkeypatch.setattr(custom_op, "_libraries", {})
    assert direct_register_custom_op(name, double, fake_impl=double_fake) is first


def test_a_name_with_another_schema_is_refused(name: str) -> None:
    direct_register_custom_op(name, double, fake_impl=double_fake)
    with pytest.raises(ValueError, match=f"^{LIBRARY}::{name}: wanted the schema .*, found "):
        direct_register_custom_op(name, fill, mutates_args=["out"])


@pytest.mark.feature("K01")
def test_a_dispatch_key_has_its_own_implementation(name: str) -> None:
    op = direct_register_custom_op(name, double, fake_impl=double_fake)
    assert op is getattr(getattr(torch.ops, LIBRARY), name)
    assert op(torch.ones(1)).tolist() == [2.0]
    again = direct_register_custom_op(name, double_on_cpu, dispatch_key="CPU")
    assert again is op
    assert op(torch.ones(1)).tolist() == [102.0]
    # Tracing computes shapes alone, whatever the device.
    assert op(torch.ones(3, device="meta")).shape == (3,)


@pytest.mark.feature("K01")
def test_an_op_that_returns_something_needs_a_shape_function(name: str) -> None:
    with pytest.raises(ValueError, match=f"^fake_impl: wanted one for {LIBRARY}::{name}.*None$"):
        direct_register_custom_op(name, double)
    # Nothing is left behind.
    direct_register_custom_op(name, double, fake_impl=double_fake)


@pytest.mark.feature("K01", "J05")
def test_integers_are_symbolic_in_the_schema(name: str) -> None:
    def repeat(x: torch.Tensor, n: int, sizes: Sequence[int]) -> torch.Tensor:
        return x.repeat(n + sum(sizes))

    op = direct_register_custom_op(name, repeat, fake_impl=double_fake)
    assert str(op.default._schema).endswith("(Tensor x, SymInt n, SymInt[] sizes) -> Tensor")


@pytest.mark.feature("K01")
def test_the_schema_names_the_arguments_that_are_written(name: str) -> None:
    op = direct_register_custom_op(name, fill, mutates_args=["out"])
    schema = op.default._schema
    written = [arg.name for arg in schema.arguments if arg.alias_info and arg.alias_info.is_write]
    assert written == ["out"]
    assert schema.is_mutable
    assert list(schema.returns) == []
    out = torch.zeros(2, 3)
    assert op(torch.ones(2, 3), out, 3.0, "layer.0") is None
    assert torch.equal(out, torch.full((2, 3), 3.0))
