"""Let the simulator's modules find each other, here as when `run.py` is run, and checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "model" / "checkpoints")]
