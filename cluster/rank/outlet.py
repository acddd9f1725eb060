"""The outlet: a step's outputs leave as one frame per ingress.

Tokens go straight from the leader's process to the ingress that holds the response; the replica
that submitted a request learns of its end in a frame of its own.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from cluster.messages import EndedFrame, EngineOutput, OutputFrame, encode
from cluster.rank.sockets import keep_alive

log = logging.getLogger("lockstep.outlet")

MAX_WAITING_FRAMES = 20_000
"""Frames kept for an ingress that does not read: some ten seconds of a fast model's steps. One
that is further behind is gone or stuck, and its requests are aborted."""


class Outlet:
    """Sends outputs to whoever asked for them.

    Invariant: a request that is still running has exactly one address here.
    """

    def __init__(
        self,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        header: bytes,
        engine_id: str,
        inbox: str,
        epoch: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without connections.

        Args:
            lease_s: an ingress that is unreachable for so long is taken for dead.
        """
        self._context = context
        self._header = header
        self._engine_id = engine_id
        self._inbox = inbox
        self._epoch = epoch
        self._reply_to: dict[str, str] = {}
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._watchers: list[str] = []
        self._clock = clock
        self._lease_s = lease_s
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self._down_since: dict[str, float] = {}
        """Addresses that are not connected, and since when by the clock."""

    def expect(self, request_id: str, reply_to: str) -> None:
        """Remember where a request's tokens go; the first of two with one id keeps its place."""
        self._reply_to.setdefault(request_id, reply_to)

    def watch(self, address: str) -> None:
        """Tell `address` of every request that ends from now on."""
        if address not in self._watchers:
            self._watchers.append(address)

    def send(self, outputs: list[EngineOutput]) -> list[str]:
        """Send one step's outputs; return the requests whose ingress does not read any more."""
        by_address: defaultdict[str, list[EngineOutput]] = defaultdict(list)
        ended: list[EngineOutput] = []
        for output in outputs:
            address = self._reply_to.get(output.request_id, "")
            if output.finish_reason:
                self._reply_to.pop(output.request_id, None)
                ended.append(output)
            if address:
                by_address[address].append(output)
        lost: list[str] = []
        for address, mine in by_address.items():
            frame = OutputFrame(self._epoch, self._engine_id, self._inbox, mine)
            if not self._put(address, encode(frame)):
                lost.extend(self._give_up(address))
        for address in self._watchers if ended else ():
            # Ends travel without their tokens: the replica only closes its accounts.
            self._put(address, encode(EndedFrame(self._epoch, [_bare(o) for o in ended])))
        return lost

    def give_up_on_the_dead(self) -> list[str]:
        """Return the requests of ingresses that have been unreachable for a whole lease.

        An ingress that died has lost its clients too: what it asked for is to end.
        """
        now = self._clock()
        self._note_connections(now)
        lost: list[str] = []
        for address, since in list(self._down_since.items()):
            if now - since > self._lease_s:
                lost.extend(self._give_up(address))
        return lost

    def close(self) -> None:
        """Close all sockets; what was sent still leaves for a second."""
        for address in list(self._sockets):
            self._drop(address)

    def _put(self, address: str, body: bytes) -> bool:
        try:
            socket = self._sockets.get(address) or self._connect(address)
            socket.send_multipart([self._header, body], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # full, or no address at all
            log.error("outlet: %s cannot be sent to: %s", address, error)
            return False
        return True

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.sndhwm = MAX_WAITING_FRAMES
        socket.linger = 1000
        keep_alive(socket)
        self._sockets[address] = socket
        self._down_since[address] = self._clock()
        self._monitors[address] = socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        )
        socket.connect(address)
        return socket

    def _note_connections(self, now: float) -> None:
        for address, monitor in self._monitors.items():
            while monitor.poll(0):
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_CONNECTED:
                    self._down_since.pop(address, None)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._down_since[address] = now

    def _give_up(self, address: str) -> list[str]:
        log.error("outlet: %s does not read; its requests are aborted", address)
        if address in self._sockets:
            self._drop(address)
        return [request for request, to in self._reply_to.items() if to == address]

    def _drop(self, address: str) -> None:
        socket = self._sockets.pop(address)
        self._down_since.pop(address, None)
        monitor = self._monitors.pop(address)
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close()


def _bare(output: EngineOutput) -> EngineOutput:
    return EngineOutput(
        request_id=output.request_id,
        position=output.position,
        token_ids=[],
        logprobs=[],
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
        num_cached_tokens=output.num_cached_tokens,
        handoff=None,
        error=output.error,
        prompt_logprobs=[],
    )
