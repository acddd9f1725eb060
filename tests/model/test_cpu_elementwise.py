"""Norms and the MLP's gate in C++ equal the torch functions that they stand in for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.kernels import elementwise
from model.kernels.cpu import elementwise as cpu_elementwise
from model.kernels.cpu.native import native_function

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
"""Sums are taken in another order, an exponential ends in another bit; a bfloat16 may then round to
its neighbour, and so may the product of two such."""

FIXTURES = [HealthCheck.function_scoped_fixture]
"""They change nothing between examples."""
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = st.integers(1, 70) | st.sampled_from([128, 600, 896, 4864])


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    if native_function("rms_norm", torch.float32) is None:
        pytest.skip("needs the C++ kernels, found none")
    yield
    torch.set_num_threads(1)


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a silent fall back to the torch functions fail."""
    for name in ("rms_norm", "silu_and_mul"):

        def refuse(*_: Any, name: str = name) -> Any:
            raise AssertionError(f"the torch function of {name} ran in the kernel's place")

        monkeypatch.setattr(cpu_elementwise.reference, name, refuse)
    monkeypatch.setattr(cpu_elementwise, "added_reference", refuse)


ADDED_REFERENCE = cpu_elementwise.added_reference
REFERENCES = {name: getattr(elementwise, name) for name in ("rms_norm", "silu_and_mul")}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.is_contiguous()
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-6)


def drawn(data: st.DataObject, *shape: int) -> torch.Tensor:
    """Return random values with gaps between rows, and choose a number of threads."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
    gap = data.draw(st.integers(0, 5))
    wide = 3 * torch.randn(*shape[:-1], shape[-1] + gap)
    return wide.to(data.draw(DTYPES))[..., : shape[-1]]


@pytest.mark.usefixtures("no_reference")
@settings(max_examples=80, deadline=None, suppress_health_check=FIXTURES)
@given(data=st.data(), rows=st.integers(1, 40), width=WIDTHS)
def test_norms_equal_their_references(data: st.DataObject, rows: int, width: int) -> None:
    x = drawn(data, rows, width)
    weight = torch.randn(width).to(x.dtype)
    close(cpu_elementwise.rms_norm(x, weight, 1e-5), REFERENCES["rms_norm"](x, weight, 1e-5))
    residual = torch.randn(rows, width + 3).to(x.dtype)[:, :width]
    normed, summed = cpu_elementwise.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual) and summed.is_contiguous()
    close(normed, REFERENCES["rms_norm"](summed, weight, 1e-5))


@pytest.mark.usefixtures("no_reference")
@settings(max_examples=40, deadline=None, suppress_health_check=FIXTURES)
@given(data=st.data(), rows=st.integers(1, 40), heads=st.integers(1, 6), dim=WIDTHS)
def test_norms_of_heads_equal_their_reference(
    data: st.DataObject, rows: int, heads: int, dim: int
) -> None:
    x = drawn(data, rows, heads + 2, dim)[:, :heads]
    weight = torch.randn(dim).to(x.dtype)
    close(cpu_elementwise.rms_norm(x, weight, 1e-6), REFERENCES["rms_norm"](x, weight, 1e-6))


@pytest.mark.usefixtures("no_reference")
@settings(max_examples=80, deadline=None, suppress_health_check=FIXTURES)
@given(data=st.data(), rows=st.integers(1, 40), width=WIDTHS)
def test_gates_equal_their_reference(data: st.DataObject, rows: int, width: int) -> None:
    x = drawn(data, rows, 2 * width)
    close(cpu_elementwise.silu_and_mul(x), REFERENCES["silu_and_mul"](x))


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_are_right_at_both_ends(dtype: torch.dtype) -> None:
    """An exponential that overflows, or underflows, is no NaN; a NaN is no number."""
    gates = torch.tensor([0.0, -0.0, 1e-30, 90.0, -50.0, -86.0, -90.0, -1e4, 1e30, -1e30])
    gates = torch.cat((gates, torch.linspace(-30, 30, 301))).to(dtype)
    x = torch.stack((gates, torch.ones_like(gates))).flatten()[None]
    found, wanted = cpu_elementwise.silu_and_mul(x), REFERENCES["silu_and_mul"](x)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=1e-30)
    x[0, 3] = torch.nan
    assert cpu_elementwise.silu_and_mul(x).isnan().nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("kind", ["columns", "four dimensions", "float16", "wider weight"])
def test_what_the_kernels_do_not_serve_goes_to_the_references(kind: str) -> None:
    x, weight = torch.randn(6, 8), torch.randn(8)
    if kind == "columns":
        x = x.t().contiguous().t()
    elif kind == "four dimensions":
        x = x.view(1, 2, 3, 8)
    elif kind == "float16":
        x, weight = x.half(), weight.half()
    else:
        weight = weight.double()
    found = cpu_elementwise.rms_norm(x, weight, 1e-5)
    assert torch.equal(found, REFERENCES["rms_norm"](x, weight, 1e-5)) and found.is_contiguous()
    fused = cpu_elementwise.fused_add_rms_norm(x, 2 * x, weight, 1e-5)
    for part, wanted in zip(fused, ADDED_REFERENCE(x, 2 * x, weight, 1e-5), strict=True):
        assert torch.equal(part, wanted) and part.is_contiguous()
    if kind != "wider weight":
        assert torch.equal(cpu_elementwise.silu_and_mul(x), REFERENCES["silu_and_mul"](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    x, weight = torch.randn(33, 128).to(dtype), torch.randn(128).to(dtype)
    row = slice(20, 21)
    normed = cpu_elementwise.rms_norm(x, weight, 1e-5)
    assert torch.equal(normed[row], cpu_elementwise.rms_norm(x[row], weight, 1e-5))
    gated = cpu_elementwise.silu_and_mul(x)
    assert torch.equal(gated[row], cpu_elementwise.silu_and_mul(x[row]))


@pytest.mark.parametrize("num_rows", [0, 2])
def test_neither_no_rows_nor_zeros_are_errors(num_rows: int) -> None:
    x, weight = torch.zeros(num_rows, 8), torch.ones(8)
    assert torch.equal(cpu_elementwise.rms_norm(x, weight, 1e-5), x)
    for found in cpu_elementwise.fused_add_rms_norm(x, x, weight, 1e-5):
        assert torch.equal(found, x)
    assert torch.equal(cpu_elementwise.silu_and_mul(x), x[:, :4])


@pytest.mark.usefixtures("fewer_lanes", "no_reference")
def test_kernels_are_right_for_narrower_registers() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for width in (1, 3, 8, 16, 37, 152):
            x, weight = torch.randn(9, 2 * width).to(dtype), torch.randn(2 * width).to(dtype)
            close(
                cpu_elementwise.rms_norm(x, weight, 1e-5), REFERENCES["rms_norm"](x, weight, 1e-5)
            )
            normed, _ = cpu_elementwise.fused_add_rms_norm(x, x, weight, 1e-5)
            close(normed, REFERENCES["rms_norm"](x + x, weight, 1e-5))
            close(cpu_elementwise.silu_and_mul(x), REFERENCES["silu_and_mul"](x))
