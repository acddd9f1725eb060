"""Errors of captured steps.

    GraphError
    ├── CaptureError            a captured step did what a replay cannot repeat
    │   ├── ValueReadError      it read a tensor's value
    │   ├── NestedCaptureError  it captured or replayed another step
    │   └── ForeignTensorError  it met a tensor that its pool cannot address
    ├── ReplayError             a graph cannot be replayed (any more)
    │   ├── DeadTensorError     a tensor that it reads or writes is gone
    │   └── InputAddressError   an input lies elsewhere than when it was captured
    └── SealedError             the process serves: nothing new is compiled or captured
        ├── LateCapture
        └── LateCompilation

Messages are one line: `FIELD: wanted ..., found ...`.
"""

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


class ValueReadError(CaptureError):
    """A value was read between ops: a replay would reuse the one read at capture."""


class NestedCaptureError(CaptureError):
    """A step was captured or replayed inside of another one's capture."""


class ForeignTensorError(CaptureError):
    """A tensor has no address on the pool's device."""


class ReplayError(GraphError):
    """A graph cannot be replayed."""


class DeadTensorError(ReplayError):
    """A tensor from outside of the pool did not outlive the graph that uses it."""


class InputAddressError(ReplayError):
    """An input lies elsewhere than when the graph was captured."""


class SealedError(GraphError):
    """The process is sealed, strictly: nothing new is compiled or captured."""


class LateCapture(SealedError):
    """A capture after the seal."""


class LateCompilation(SealedError):
    """A compilation after the seal."""
