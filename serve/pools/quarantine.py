"""The dock of all ingresses: one request on trial in the whole application (`router.py`).

Each ingress lets its own suspects in one after another, and asks the status board for its turn
among the ingresses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

ASK_PERIOD_S = 0.25
"""How often an ingress asks for its turn, and says that it still has it."""


class SharedDock:
    """What one ingress holds while a request of it is on trial; belongs to its event loop."""

    def __init__(self, ask: Callable[[], Awaitable[bool]], give_back: Callable[[], None]) -> None:
        """Start with nobody on trial.

        Args:
            ask: returns whether it is this ingress's turn, and does not raise.
            give_back: ends its turn, or its waiting for one.
        """
        self._ask = ask
        self._give_back = give_back
        self._mine = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None

    async def acquire(self) -> None:
        """Wait for the trials before this one."""
        await self._mine.acquire()
        try:
            while not await self._ask():
                await asyncio.sleep(ASK_PERIOD_S)
        except BaseException:
            self._give_back()
            self._mine.release()
            raise
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def release(self) -> None:
        """Let the next one in, of whatever ingress."""
        assert self._keeping is not None, "dock: wanted a trial, found none"
        self._keeping.cancel()
        self._keeping = None
        self._give_back()
        self._mine.release()

    async def _keep(self) -> None:
        """Show the board that this process is alive."""
        while True:
            await asyncio.sleep(ASK_PERIOD_S)
            await self._ask()
