"""A digest of a checkpoint: equal for copies, another one for another model.

Weights are sampled. Two that were trained on from the same model differ in nearly all of their
numbers; a change of a few would not be noticed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

MAX_WHOLE_BYTES = 16 << 20
"""Files up to here are read whole."""
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096
"""Of each larger one, from its first byte to its last."""
SUFFIXES = (".json", ".jinja", ".safetensors")


def fingerprint(checkpoint_dir: Path) -> bytes:
    """Return the digest of a checkpoint's configuration, tokenizer and weights."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint_dir.iterdir()):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            if size <= MAX_WHOLE_BYTES:
                digest.update(file.read())
                continue
            for i in range(NUM_SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
