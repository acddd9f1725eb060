"""Receive loops that leave an event loop time for everything else.

Awaiting a ZeroMQ socket that has frames returns at once and never yields to the event loop. So
every loop over a socket pauses after a number of frames, or after a time, for one round of
everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from cluster.credentials import Credentials
from cluster.messages import FrameError
from cluster.wire.budget import Budget
from cluster.wire.message_parts import unpack

log = logging.getLogger("lockstep.receiving")

MAX_FRAMES = 1024
"""Frames, or outputs, received before the loop does everything else once. Each turn has room for a
step of each engine, so nothing piles up."""
MAX_S = 0.01
"""How long frames are received before the loop does everything else once."""


def loop_budget() -> Budget:
    """Return what a receive loop may take before the event loop has its turn."""
    return Budget(MAX_FRAMES, MAX_S)


def has_waiting(socket: zmq.asyncio.Socket) -> bool:
    """Return whether a message waits to be received."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


async def breathe(budget: Budget) -> None:
    """Let the event loop do everything else once if the budget is spent."""
    if not budget.take():
        await asyncio.sleep(0)
        budget.renew()


async def frames(
    socket: zmq.asyncio.Socket,
    credentials: Credentials,
    budget: Budget,
    *,
    max_bytes: int,
    is_empty: asyncio.Event | None = None,
) -> AsyncIterator[bytes]:
    """Yield the frames that processes of this deployment send; others are dropped and logged.

    Args:
        is_empty: set while nothing waits and everything that came has been processed.
    """
    while True:
        if is_empty is not None and not has_waiting(socket):
            is_empty.set()
        message = await socket.recv_multipart()
        if is_empty is not None:
            is_empty.clear()
        try:
            body = unpack(message, credentials, max_bytes)
        except FrameError as error:
            log.error("dropped a frame: %s", error)
        else:
            yield body
        await breathe(budget)
