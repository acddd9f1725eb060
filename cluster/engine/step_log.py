"""The step log of a rank: the last steps that it ran, and what all ranks agreed on for them."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from cluster.messages import StepAgreement

NUM_LOGGED_STEPS = 1000
NUM_TOLD_STEPS = 8
"""Of the log in an error: those that lead to it."""


class StepLog:
    """The last `NUM_LOGGED_STEPS` steps of one rank. Any thread may read it."""

    def __init__(self) -> None:
        self._steps: deque[StepAgreement] = deque(maxlen=NUM_LOGGED_STEPS)

    def add(self, agreed: StepAgreement) -> None:
        """Log a step that starts now."""
        self._steps.append(agreed)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return what is logged as plain data, oldest first, one value a field."""
        return [msgspec.structs.asdict(agreed) for agreed in list(self._steps)]

    def tail(self) -> tuple[str, ...]:
        """Return the last steps as lines, for an error."""
        return tuple(map(_line, self.as_dicts()[-NUM_TOLD_STEPS:]))


def _line(fields: dict[str, Any]) -> str:
    head = f"ran epoch {fields.pop('epoch')} step {fields.pop('step')}:"
    return " ".join([head, *(f"{name}={value}" for name, value in fields.items())])
