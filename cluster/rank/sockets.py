"""What every socket that may connect nodes is told before it has a connection."""

from __future__ import annotations

from typing import Any

import zmq

KEEPALIVE_S, KEEPALIVE_TIMES = 10, 3
"""An idle connection between nodes is tried this often, and given up after so many in vain."""


def keep_alive(socket: zmq.Socket[Any]) -> None:
    """Let a TCP socket's connections be noticed when they are gone; call it before it has any.

    Firewalls forget idle connections, and a node that is gone says nothing: what is sent then is
    lost for the quarter of an hour until the kernel gives up.
    """
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, KEEPALIVE_TIMES
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = KEEPALIVE_S
    socket.tcp_maxrt = KEEPALIVE_S * KEEPALIVE_TIMES * 1000  # of bytes that are not acknowledged
