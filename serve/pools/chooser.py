"""Which leader of a pool gets a request: a choice among all leaders of all replicas. Equal ones
take turns, so that a burst of short requests, each of which has ended before the next one comes,
does not always meet the same leader."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class Routing(Enum):
    """How the next leader is chosen."""

    ROUND_ROBIN = "round_robin"
    """Leaders take turns, whatever they have to do."""
    LEAST_REQUESTS = "least_requests"
    """The fewest requests that have not ended."""
    LEAST_TOKENS = "least_tokens"
    """The fewest tokens in the requests of this ingress that have not ended, as they came."""


class Load(Protocol):
    """What a leader has to do."""

    @property
    def num_requests(self) -> int:
        """Those of other ingresses included."""
        ...

    @property
    def num_tokens(self) -> int: ...


class Chooser:
    """Chooses for one pool."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._turn = 0

    def choose(self, loads: Sequence[Load]) -> int:
        """Return the index of one; there is at least one."""
        start = self._turn % len(loads)
        self._turn += 1
        in_turn: list[int] = [*range(start, len(loads)), *range(start)]
        costs = [self._cost(load) for load in loads]
        return min(in_turn, key=costs.__getitem__)  # the first of equal ones

    def _cost(self, load: Load) -> int:
        match self._routing:
            case Routing.ROUND_ROBIN:
                return 0
            case Routing.LEAST_REQUESTS:
                return load.num_requests
            case Routing.LEAST_TOKENS:
                return load.num_tokens
