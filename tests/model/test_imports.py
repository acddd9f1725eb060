"""What a rank's process imports."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, torch
before = set(sys.modules)
import model.kv_cache, model.weights, model.sampler
found = {name.partition(".")[0] for name in set(sys.modules) - before}
found &= {"ray", "transformers", "tokenizers", "zmq", "triton"}
sys.exit(f"imported: {found}" if found else 0)
"""


def test_the_model_imports_neither_ray_nor_transformers_nor_triton() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
