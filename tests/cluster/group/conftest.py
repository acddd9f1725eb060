"""A TCP relay that hears what is said and can be cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from local_ranks import HOST


class Relay:
    """Stands before a port; only the two ends of a connection notice that it was cut."""

    def __init__(self, to: int) -> None:
        self.heard = bytearray()
        """What clients said."""
        self._to = to
        self._server = socket.create_server((HOST, 0))
        self.port = self._server.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> None:
        """Break what is connected; a new connection may be made."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):  # the other side was faster
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(timeout=60)
        self.cut()
        for thread in self._threads[1:]:
            thread.join(timeout=60)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with self._server, suppress(OSError):  # shut down
            while True:
                client, there = self._server.accept()[0], socket.create_connection((HOST, self._to))
                self._ends += [client, there]
                self._start(self._pump, client, there, self.heard)
                self._start(self._pump, there, client, bytearray())

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, heard: bytearray) -> None:
        with source, suppress(OSError):  # cut
            while data := source.recv(65536):
                heard += data
                sink.sendall(data)


@pytest.fixture
def relay_to() -> Iterator[Callable[[int], Relay]]:
    relays: list[Relay] = []

    def make(port: int) -> Relay:
        relays.append(Relay(port))
        return relays[-1]

    yield make
    for relay in relays:
        relay.close()
