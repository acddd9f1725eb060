"""`Turns`: one holder at a time among processes, in the order in which they asked."""

from __future__ import annotations

import time
from collections.abc import Callable


class Turns:
    """Whose turn it is.

    Who has it or waits for it asks again and again; whoever is silent for `lost_after_s` is taken
    for dead, and loses it. Nothing is kept: if this is made anew, two may have the turn for a
    moment.
    """

    def __init__(self, lost_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nobody's turn."""
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        """Of all that want it, in the order of their first asking: the first one has it."""

    def take(self, name: str) -> bool:
        """Return whether it is this one's turn, which it then has until `give_back`."""
        now = self._clock()
        self._asked_at[name] = now
        for other, asked_at in list(self._asked_at.items()):
            if now - asked_at > self._lost_after_s:
                del self._asked_at[other]
        return next(iter(self._asked_at)) == name

    def give_back(self, name: str) -> None:
        """Let the next one have it, or wait no longer."""
        self._asked_at.pop(name, None)
