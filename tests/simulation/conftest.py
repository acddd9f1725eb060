"""Let the simulator's modules find each other, here as when `run.py` is run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
