"""What proves that a peer at a KV socket, a call or an answer is the application's own.

KV sockets do not encrypt, which would take two thirds of their speed. Keyed BLAKE2b under the
application's secret covers each call together with the process that it is for, and each answer
together with the call that it answers; it is compared before anything else is decoded.

Replays are harmless. An answer is good for one call, whose id is never used again. A call is good
for one process, and only once there, because calls for a handoff are numbered and the holder drops
one whose number is not above the last.

The bytes of blocks are not covered: to hash them on both sides takes longer than to encrypt them
(`examples/bench/kv_transfer.py`), and an attacker who could alter packets could also read the KV.

Before that there is a door, which keeps strangers from filling the holder's memory: ZeroMQ's PLAIN,
with a password that follows from the application's secret and from the holder's process. It proves
no call, because it travels in the clear. PLAIN asks an authenticator (ZAP), of which a context has
one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from itertools import count
from typing import Any

import zmq

from cluster.wire.credentials import Credentials
from cluster.wire.sockets import Budget, inner_socket

CALL, ANSWER, DOOR = b"lockstep call", b"lockstep answer", b"lockstep door"
"""What is proved, as BLAKE2b's personalisation: a proof of one kind is none of another."""
NUMBER_BYTES = 8
USER = b"lockstep"
DOMAIN = b"kv"


class KVProofs:
    """Makes proofs. Compare them with `hmac.compare_digest`, whose time tells nothing."""

    def __init__(self, credentials: Credentials) -> None:
        self._secret = credentials.secret

    def of_call(self, call_id: bytes, process: bytes, call: bytes) -> bytes:
        """Return the proof of an encoded call to the process whose encoding is `process`."""
        return self._hash(CALL, call_id, process, call)

    def of_answer(self, call_proof: bytes, answer: bytes) -> bytes:
        """Return the proof of the encoded answer to the call with this proof."""
        return self._hash(ANSWER, call_proof, answer)

    def password(self, process: bytes) -> bytes:
        return self._hash(DOOR, process).hex().encode()

    def _hash(self, person: bytes, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._secret, person=person, digest_size=32)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()


class CallIds:
    """Ids of one reader's calls: its own random name, and a number that only grows."""

    def __init__(self) -> None:
        self._name = secrets.token_bytes(NUMBER_BYTES)
        self._numbers = count(1)

    def next(self) -> bytes:
        return self._name + next(self._numbers).to_bytes(NUMBER_BYTES, "big")


def number_of(call_id: bytes) -> int:
    return int.from_bytes(call_id[-NUMBER_BYTES:], "big")


class PlainHandshake:
    def __init__(self, password: bytes) -> None:
        self._password = password

    def demand(self, socket: zmq.Socket[Any]) -> None:
        socket.plain_server = True
        socket.zap_domain = DOMAIN

    def offer(self, socket: zmq.Socket[Any]) -> None:
        socket.plain_username, socket.plain_password = USER, self._password


class ZapAuthenticator:
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
            is_known = user == USER and hmac.compare_digest(password, self._password)
            status = b"200" if is_known else b"400"
            self.socket.send_multipart([version, request, status, b"", b"", b""])

    def close(self) -> None:
        self.socket.close(linger=0)
