"""What a rank's process imports."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import model.kv_cache, model.weights, model.sampler
found = [name for name in ("ray", "transformers", "tokenizers", "zmq") if name in sys.modules]
sys.exit(f"imported: {found}" if found else 0)
"""


def test_the_model_imports_neither_ray_nor_transformers() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
