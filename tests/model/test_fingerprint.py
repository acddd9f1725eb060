"""Copies have one fingerprint, other weights another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from model import config


def test_weights_are_sampled_from_the_first_byte_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(config, "SAMPLE_BYTES", 100)
    path = tmp_path / "model.safetensors"
    found = set()
    for changed in (None, 0, 99_999):
        data = bytearray(100_000)
        if changed is not None:
            data[changed] = 1
        path.write_bytes(data)
        found.add(config.fingerprint(tmp_path))
    path.write_bytes(bytes(100_001))
    assert len({*found, config.fingerprint(tmp_path)}) == 4
