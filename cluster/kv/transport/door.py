"""The door of a KV server: a peer that does not know its password never finishes the handshake.

CURVE would encrypt every block, at a third of the speed, so this is ZeroMQ's PLAIN: a password that
follows from the application's secret and from the holder's process. It is there to keep strangers
from filling the holder's memory (`cluster/wire/sockets.py`), and proves no call: it travels in the
clear, and a process that has a dead holder's port is told it. It opens no other door.

PLAIN asks an authenticator (ZAP), of which a context has one. It answers in the server's thread,
in a context that only this server uses.
"""

from __future__ import annotations

from typing import Any

import zmq

from cluster.kv.transport.proofs import is_equal
from cluster.wire.budget import Budget
from cluster.wire.sockets import inner_socket

USER = b"lockstep"
DOMAIN = b"kv"


class PlainHandshake:
    """ZeroMQ's PLAIN with the password of one holder."""

    def __init__(self, password: bytes) -> None:
        self._password = password

    def demand(self, socket: zmq.Socket[Any]) -> None:
        """Make the socket a PLAIN server; its context needs a `Doorkeeper`."""
        socket.plain_server = True
        socket.zap_domain = DOMAIN

    def offer(self, socket: zmq.Socket[Any]) -> None:
        """Make the socket a PLAIN client."""
        socket.plain_username, socket.plain_password = USER, self._password


class Doorkeeper:
    """The authenticator of one context. `socket` polls readable when a peer knocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], password: bytes) -> None:
        self._password = password
        self.socket = inner_socket(context, zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self, budget: Budget) -> None:
        """Answer all peers that knock, or as many as the budget allows."""
        while self.socket.poll(0) and budget.take():
            # By RFC 27: version, request, domain, address, identity, mechanism, what was shown.
            version, request, *_, user, password = self.socket.recv_multipart()
            is_known = user == USER and is_equal(password, self._password)
            status = b"200" if is_known else b"400"
            self.socket.send_multipart([version, request, status, b"", b"", b""])

    def close(self) -> None:
        """Answer no peer any more."""
        self.socket.close(linger=0)
