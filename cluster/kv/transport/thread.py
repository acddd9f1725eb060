"""The thread that a KV server and a KV puller each have beside the step thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from cluster.wire.sockets import Doorbell


class KVThreadDied(RuntimeError):
    """A KV thread of this rank ended with an error; the rank must end too."""


class KVThread:
    """Takes a turn after sockets, `wake` or a deadline. `doorbell` rings if it dies."""

    def __init__(
        self,
        name: str,
        *,
        turn: Callable[[], None],
        next_deadline: Callable[[], float | None],
        clock: Callable[[], float],
        doorbell: Doorbell,
        at_end: Callable[[], None],
    ) -> None:
        self.poller = zmq.Poller()
        self.wake = Doorbell()
        self.poller.register(self.wake.fileno(), zmq.POLLIN)
        self._name = name
        self._turn, self._next_deadline, self._at_end = turn, next_deadline, at_end
        self._clock = clock
        self._doorbell = doorbell
        self._is_closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        if (error := self._failure) is not None:
            text = f"{self._name} thread ended: {type(error).__name__}: {error}"
            raise KVThreadDied(text) from error

    def close(self) -> None:
        self._is_closed = True
        self.wake.ring()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self.poller.poll(self._timeout_ms())
                self.wake.clear()
                self._turn()
        except Exception as error:
            self._failure = error
            self._doorbell.ring()
        self._at_end()

    def _timeout_ms(self) -> int:
        deadline = self._next_deadline()
        return -1 if deadline is None else max(0, int((deadline - self._clock()) * 1000) + 1)
