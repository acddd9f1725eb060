"""What shows that a call for KV, or the answer to one, is a process of the application's.

KV sockets do not encrypt. Keyed BLAKE2b under the application's secret covers each call together
with the process that it is for, and each answer together with the call that it answers; it is
compared before anything else is decoded. So a process that has a dead holder's port can neither
serve its readers nor learn from their calls how to.

Replays are harmless. An answer is good for one call, whose id is never used again. A call is good
for one process, and there for one time: calls for a ticket are numbered, and the holder drops one
whose number is not above the last. An ended ticket needs no such account, since nothing revives it.

The bytes of blocks are not covered: to hash them on both sides takes longer than to encrypt them
(`examples/bench/kv_transfer.py`), and whoever could alter packets between two nodes could read the
KV in them as well.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from itertools import count

from cluster.credentials import Credentials

CALL, ANSWER, DOOR = b"lockstep call", b"lockstep answer", b"lockstep door"
"""What is proved, as BLAKE2b's personalisation: a proof of one kind is none of another."""
NUMBER_BYTES = 8


class KVProofs:
    """Makes proofs, and compares them."""

    def __init__(self, credentials: Credentials) -> None:
        self._secret = credentials.secret

    def of_call(self, call_id: bytes, process: bytes, call: bytes) -> bytes:
        """Return the proof of an encoded call to the process whose encoding is `process`."""
        return self._hash(CALL, call_id, process, call)

    def of_answer(self, call_proof: bytes, answer: bytes) -> bytes:
        """Return the proof of the encoded answer to the call with this proof."""
        return self._hash(ANSWER, call_proof, answer)

    def password(self, process: bytes) -> bytes:
        """Return what opens the door of a process."""
        return self._hash(DOOR, process).hex().encode()

    def _hash(self, person: bytes, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._secret, person=person, digest_size=32)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()


def is_equal(found: bytes, wanted: bytes) -> bool:
    """Return whether two proofs are one, in a time that does not tell where they differ."""
    return hmac.compare_digest(found, wanted)


class CallIds:
    """Ids of one reader's calls: its own random name, and a number that only grows."""

    def __init__(self) -> None:
        self._name = secrets.token_bytes(NUMBER_BYTES)
        self._numbers = count(1)

    def next(self) -> bytes:
        """Return an id that no call has had."""
        return self._name + next(self._numbers).to_bytes(NUMBER_BYTES, "big")


def number_of(call_id: bytes) -> int:
    """Return the number in a call's id."""
    return int.from_bytes(call_id[-NUMBER_BYTES:], "big")
