"""The errors of everything that a user may set (an argument, a variable, a file, a request), and of
captured steps. Messages are one line: `FIELD: wanted ..., found ...`."""

from __future__ import annotations


class Words(str):
    """What was found, in words. A message has them as they are, and any other value as its repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class FieldError(ValueError):
    """A field holds what cannot be used."""

    def __init__(self, field: str, wanted: str, found: object) -> None:
        super().__init__(f"{field}: wanted {wanted}, found {found!r}")
        self.field = field
        """The whole path by which the user knows it."""
        self.wanted = wanted
        self.found = found

    def __reduce__(self) -> tuple[type[FieldError], tuple[str, str, object]]:
        return FieldError, (self.field, self.wanted, self.found)

    def at(self, prefix: str) -> FieldError:
        """Return the same error of a field that belongs to `prefix`; either may be empty."""
        return self.renamed(".".join(filter(None, (prefix, self.field))))

    def renamed(self, field: str) -> FieldError:
        """Return the same error under the name by which the user knows the field."""
        return FieldError(field, self.wanted, self.found)


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
