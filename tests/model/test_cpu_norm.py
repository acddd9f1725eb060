"""The fused addition and norm in C++ equals the torch functions that it stands in for."""

from __future__ import annotations

import pytest
import torch

from model.kernels.cpu import elementwise as cpu_elementwise
from model.kernels.cpu.native import native_function

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
"""Sums are taken in another order; a bfloat16 may then round to its neighbour."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 256), (5, 48), (3, 17), (4, 1), (33, 600), (0, 8)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_kernel_equals_the_torch_functions(
    dtype: torch.dtype, shape: tuple[int, int], num_threads: int
) -> None:
    if native_function("add_rms_norm", dtype) is None:
        pytest.skip("needs the C++ kernels, found none")
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, shape[0], 2 * shape[1], generator=generator).to(dtype)
    x, residual = wide[..., : shape[1]]
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    torch.set_num_threads(num_threads)
    try:
        normed, summed = cpu_elementwise.fused_add_rms_norm(x, residual, weight, 1e-5)
    finally:
        torch.set_num_threads(1)
    wanted, wanted_sum = cpu_elementwise.added_twin(x, residual, weight, 1e-5)
    assert torch.equal(summed, wanted_sum)
    torch.testing.assert_close(normed, wanted, rtol=TOLERANCE[dtype], atol=1e-6)
    for found, twin in ((normed, wanted), (summed, wanted_sum)):
        assert (found.shape, found.stride(), found.dtype) == (twin.shape, twin.stride(), dtype)


def test_a_row_of_zeros_is_no_division_by_zero() -> None:
    zeros = torch.zeros(2, 16)
    normed, summed = cpu_elementwise.fused_add_rms_norm(zeros, zeros, torch.ones(16), 1e-5)
    assert not normed.any() and not summed.any()


@pytest.mark.parametrize("kind", ["columns", "three dimensions", "float16", "wider weight"])
def test_what_the_kernel_does_not_serve_goes_to_the_torch_functions(kind: str) -> None:
    x, residual, weight = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    if kind == "columns":
        x, residual = x.t().contiguous().t(), residual.t().contiguous().t()
    elif kind == "three dimensions":
        x, residual = x.view(2, 2, 6), residual.view(2, 2, 6)
    elif kind == "float16":
        x, residual, weight = x.half(), residual.half(), weight.half()
    else:
        weight = weight.double()
    found = cpu_elementwise.fused_add_rms_norm(x, residual, weight, 1e-5)
    for part, wanted in zip(
        found, cpu_elementwise.added_twin(x, residual, weight, 1e-5), strict=True
    ):
        assert torch.equal(part, wanted) and part.is_contiguous()
