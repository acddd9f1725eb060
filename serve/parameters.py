"""The error of a request's parameter."""

from __future__ import annotations


class ParameterError(ValueError):
    """A parameter cannot be met; `param` names it, the message says wanted and found."""

    def __init__(self, param: str, wanted: str, found: object) -> None:
        super().__init__(f"{param}: wanted {wanted}, found {found}")
        self.param = param
        self.wanted = wanted
        self.found = found

    def renamed(self, param: str) -> ParameterError:
        """Return the same error under the name by which the user knows the parameter."""
        return ParameterError(param, self.wanted, self.found)
