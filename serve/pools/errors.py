"""What a pool's replica raises for its callers."""

from __future__ import annotations


class PoolUnavailable(RuntimeError):
    """A pool's replica has no ranks at the moment; the request did not reach an engine."""
