"""Ops of a piece of one size are autotuned once, and what was found can be read later."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compile import explain
from compile.cache import tuning
from compile.counters import counter
from compile.pieces.decorator import support_torch_compile

ROWS, SIZE = 4, 16


@support_torch_compile
class Products(nn.Module):
    """Token ids [T] to [T, 64]: a product of matrices for each token, for which Inductor has
    candidates on a CPU, too."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Embedding(16, ROWS * SIZE).requires_grad_(False)
        self.right = nn.Embedding(16, SIZE * SIZE).requires_grad_(False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        left = self.left(input_ids).view(-1, ROWS, SIZE)
        right = self.right(input_ids).view(-1, SIZE, SIZE)
        return torch.bmm(left, right).flatten(1)


@pytest.mark.feature("Q07", "F09")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by what times candidates
def test_a_size_is_tuned_by_the_first_start_and_later_ones_read_what_it_found(
    toys: Any,
    cache_dir: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ids = torch.tensor([3, 1, 4, 15])
    caplog.set_level(logging.INFO, tuning.__name__)

    def start(num_autotuned: int) -> list[str]:
        caplog.clear()
        fields = {"compiler": "inductor_standalone", "compile_sizes": (4,), "splitting_ops": ()}
        products = toys.build(Products, cache_dir=str(cache_dir), **fields)
        with counter.expect(num_autotuned=num_autotuned):
            for tokens in (ids[:3], ids):
                expected = type(products).forward(products, tokens)
                torch.testing.assert_close(products(tokens), expected)
        return [each.message for each in caplog.records if each.name == tuning.__name__]

    def explained(*options: str) -> str:
        assert explain.main([str(cache_dir), *options]) == 0
        return capfd.readouterr().out

    [found] = start(1)
    assert "AUTOTUNE" not in "".join(capfd.readouterr()), "Inductor prints it as well"
    header, best, *others = found.splitlines()
    assert header == "AUTOTUNE bmm(4x4x16, 4x16x16)"
    assert re.fullmatch(r"  \S+ \d+\.\d{4} ms 100\.0%", best)
    assert others
    [summary] = [line for line in explained().splitlines() if "shape 4" in line]
    assert summary.endswith(" bytes, autotuned ops: 1")

    assert start(0) == []
    code = explained("--layer", "pieces")
    assert "".join(f"# {line}\n" for line in found.splitlines()) in code
    for artifact in (path for path in cache_dir.rglob("artifacts/*") if path.is_file()):
        artifact.unlink()
    assert len(start(1)) == 1


def test_a_report_names_candidates_by_speed_with_their_parameters() -> None:
    def candidate(name: str, description: str) -> Any:
        # Of Inductor's candidates only these are read, and they are hashable.
        return type(name, (), {"name": name, "description": description})

    def node(*size: Any) -> Any:
        return SimpleNamespace(get_size=lambda: list(size))

    timings = {
        candidate("mm", ""): 0.016,
        candidate("triton_mm_8", "BLOCK_K=64, num_warps=4"): float("inf"),
        candidate("triton_mm_4", "BLOCK_K=128, num_warps=2"): 0.013,
    }
    assert tuning.report(timings, "mm", [node(8, 2048), node("s0", 3072)]) == (
        "AUTOTUNE mm(8x2048, s0x3072)\n"
        "  triton_mm_4 0.0130 ms 100.0% BLOCK_K=128, num_warps=2\n"
        "  mm 0.0160 ms 81.2%\n"
        "  triton_mm_8 inf ms 0.0% BLOCK_K=64, num_warps=4"
    )
