"""The end of a socket context, which must not be the place where a rank hangs.

libzmq's own end has no bound. In 4.3.5 it waits for ever about once in a thousand times when the
peer closes its end in the same moment, whatever the linger time.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import zmq

log = logging.getLogger(__name__)

END_TIMEOUT_S = 3.0
"""Longer than any socket here lingers."""


def end_context(
    context: zmq.Context[Any],
    owner: str,
    *,
    linger: int | None = None,
    timeout_s: float = END_TIMEOUT_S,
) -> bool:
    """End `context`; return whether that was done in time.

    Sockets that are still open are closed with `linger` in ms, or their own. What does not end in
    `timeout_s` is left to the end of the process, with a line in the log that names `owner`: what
    its sockets had to send has left or was dropped by then.
    """
    ending = threading.Thread(
        target=context.destroy, args=(linger,), name=f"end of {owner}", daemon=True
    )
    ending.start()
    ending.join(timeout_s)
    if ending.is_alive():
        log.warning("%s: sockets have not ended in %g s; they are left", owner, timeout_s)
    return not ending.is_alive()
