"""Every Triton kernel equals its torch reference on random shapes, in Triton's interpreter.

The interpreter is chosen by an environment variable before Triton is imported, so each group of
checks runs in its own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("interpreted.py")
ROOT = SCRIPT.parents[3]


def run(group: str, num_shapes: int, **env: str) -> None:
    env = {
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        **env,
    }
    command = [sys.executable, "-W", "error", str(SCRIPT), group, str(num_shapes)]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{group}: {num_shapes} shapes\n"


@pytest.mark.feature("Y02")
@pytest.mark.parametrize(
    ("group", "num_shapes"),
    [
        ("decode", 35),
        ("decode_splits", 2),
        ("prefill", 35),
        ("prefill_padding", 10),
        ("rope", 20),
        ("norm", 30),
        ("silu", 30),
        ("experts", 25),
        ("filters", 16),
        ("route", 40),
        ("route_of_no_numbers", 5),
        ("sort", 40),
    ],
)
def test_kernel_equals_its_torch_reference(group: str, num_shapes: int) -> None:
    run(group, num_shapes)


@pytest.mark.feature("Y02")
def test_a_model_computes_the_same_through_triton(make_checkpoint: Any) -> None:
    shape = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
    path, _ = make_checkpoint(**shape)
    run("model", 3, CHECKPOINT=str(path))
