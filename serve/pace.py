"""A pace for work that comes in bursts and cannot leave the event loop.

A turn of the event loop runs everything that is ready: if three hundred requests arrive together,
it begins all of them before it delivers the next token of any stream. At a pace it begins a few,
does everything else once, and so on.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Pace:
    """Lets a few waiters through in each turn of the event loop, in the order of their arrival."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a turn of the loop that has room, which may be this one."""
        if self._left:
            self._take()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _take(self) -> None:
        if self._left == self._per_turn:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._left -= 1

    def _next_turn(self) -> None:
        self._left = self._per_turn
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._take()
