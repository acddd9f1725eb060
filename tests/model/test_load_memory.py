"""Loading takes no more private memory than the rank's slice and a little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.kernels.cpu.packed_linear import can_pack

BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench" / "load_memory.py"

ALLOWANCE = 8 * 2**20
"""What any model costs: rotary tables, and safetensors' copy of a slice that is cut by columns."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_peak_is_the_slice_and_little_more(dtype: str) -> None:
    # What is not packed, as float16 is nowhere: there the plain parameters are the slice.
    command = [sys.executable, str(BENCH), "--gigabytes", "0.2", "--dtype", dtype]
    # A head of a quarter of the model: two copies of it beside all the rest would show.
    shape = ["--hidden", "1024", "--vocab", "24000", "--ranks", "1"]
    done = subprocess.run([*command, *shape], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["packed"] == can_pack(getattr(torch, dtype), torch.device("cpu"))
    assert 180e6 < found["slice_bytes"] < 220e6
    assert found["peak_bytes"] > 0.95 * found["slice_bytes"]
    assert found["peak_bytes"] < 1.15 * found["slice_bytes"] + ALLOWANCE
