"""Which data-parallel rank of a group gets a request. Equal ranks take turns, so that a burst of
short requests, each of which has ended before the next one comes, does not always meet the same
rank."""

from __future__ import annotations

from enum import Enum


class Routing(Enum):
    """How the next rank is chosen."""

    ROUND_ROBIN = "round_robin"
    """Ranks take turns, whatever they have to do."""
    LEAST_REQUESTS = "least_requests"
    """The fewest requests that have not ended."""
    LEAST_TOKENS = "least_tokens"
    """The fewest tokens in the requests that have not ended, as they came."""


class LeaderRouter:
    """Invariant: `loads[i]` is 0 when all of leader i's requests have been given back."""

    def __init__(self, routing: Routing, num_leaders: int) -> None:
        self.routing = routing
        self.loads = [0] * num_leaders
        self._last = num_leaders - 1

    def take(self, num_tokens: int) -> int:
        """Return the leader for a request of so many tokens; give it back when it has ended."""
        turn = self._last + 1
        n = len(self.loads)
        in_turn = [(turn + i) % n for i in range(n)]
        leader = min(in_turn, key=self.loads.__getitem__)  # the first of equal ones
        self.loads[leader] += self._cost(num_tokens)
        self._last = leader
        return leader

    def give_back(self, leader: int, num_tokens: int) -> None:
        self.loads[leader] -= self._cost(num_tokens)

    def _cost(self, num_tokens: int) -> int:
        match self.routing:
            case Routing.ROUND_ROBIN:
                return 0
            case Routing.LEAST_REQUESTS:
                return 1
            case Routing.LEAST_TOKENS:
                return num_tokens
