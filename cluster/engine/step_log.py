"""The step log of a rank: the last steps that it ran, and what all ranks agreed on for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.lockstep_messages import StepShape
from cluster.messages import StepAgreement

NUM_LOGGED_STEPS = 1000
NUM_TOLD_STEPS = 8
"""Of the log in an error: those that lead to it."""


@dataclass(frozen=True)
class StepRecord:
    """One step. Agreement and shape are equal on all ranks.

    `graph_bs` is the padded batch size that the rank ran: equal where all sequences decode.
    """

    agreed: StepAgreement
    shape: StepShape
    graph_bs: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, one value a field."""
        agreed, shape = msgspec.structs.asdict(self.agreed), msgspec.structs.asdict(self.shape)
        return {**agreed, **shape, "graph_bs": self.graph_bs}

    def __str__(self) -> str:
        fields = self.as_dict()
        head = f"ran epoch {fields.pop('epoch')} step {fields.pop('step')}:"
        return " ".join([head, *(f"{name}={value}" for name, value in fields.items())])


class StepLog:
    """The last `NUM_LOGGED_STEPS` steps of one rank. Any thread may read it."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=NUM_LOGGED_STEPS)

    def add(self, record: StepRecord) -> None:
        """Log a step that starts now."""
        self._records.append(record)

    def records(self) -> list[StepRecord]:
        """Return what is logged, oldest first."""
        return list(self._records)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return what is logged as plain data, oldest first."""
        return [record.as_dict() for record in self.records()]

    def tail(self) -> tuple[str, ...]:
        """Return the last steps as lines, for an error."""
        return tuple(map(str, self.records()[-NUM_TOLD_STEPS:]))
