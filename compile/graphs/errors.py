"""Errors of captured steps. Messages are one line: `FIELD: wanted ..., found ...`."""

from __future__ import annotations


class GraphError(RuntimeError):
    """Capturing or replaying a step failed. `field` names what."""

    def __init__(self, field: str, wanted: str, found: str) -> None:
        super().__init__(f"{field}: wanted {wanted}, found {found}")
        self.field = field
        self.wanted = wanted
        self.found = found

    def __reduce__(self) -> tuple[type[GraphError], tuple[str, str, str]]:
        return type(self), (self.field, self.wanted, self.found)


class CaptureError(GraphError):
    """A captured step did what a replay cannot repeat."""


class ReplayError(GraphError):
    """A graph cannot be replayed (any more): a tensor that it reads is gone or lies elsewhere."""


class LateCapture(GraphError):
    """A capture after the process was sealed, strictly."""


class LateCompilation(GraphError):
    """A compilation after the process was sealed, strictly."""
