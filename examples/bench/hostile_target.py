"""The server that the attacks of `hostile.py` aim at, and the count of its answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from raw_http import Answer, Broken, Connection, request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CUT_AFTER = 4
"""A request without an answer after so many times the attack's seconds is abandoned."""


class Target:
    """A server and the count of what it answered.

    Besides statuses, an exchange ends as: closed or reset by the server, refused (no connection),
    silent (no answer while the client was patient), unanswered (none before the attack's end).
    """

    def __init__(self, address: tuple[str, int], seconds: float) -> None:
        self.address = address
        self.outcomes: Counter[str] = Counter()
        self.num_answer_bytes = 0
        self.most_bytes = 0
        """Of requests that were under way at the same time."""
        self.began = time.monotonic()
        self._ends_at = self.began + seconds
        self._bytes_now = 0
        self.seconds = seconds

    @property
    def is_over(self) -> bool:
        """Whether nothing new is to begin."""
        return time.monotonic() >= self._ends_at

    async def post(self, path: str, body: bytes) -> Answer | None:
        """Post a body; None where no answer came."""
        return await self.exchange(request("POST", path, body))

    async def exchange(
        self, data: bytes, *, method: str = "POST", patience_s: float | None = None
    ) -> Answer | None:
        """Send bytes on a connection of their own and wait for one answer to `method`."""
        outcome, answer = "unanswered", None
        try:
            with self.sending(data):
                async with asyncio.timeout(patience_s), await Connection.open(self.address) as made:
                    # A server that refuses may do so, and close, before it has read everything.
                    with suppress(ConnectionError):
                        await made.send(data)
                    answer = await made.answer(method)
            outcome = status_of(answer)
            self.num_answer_bytes += answer.num_bytes
        except TimeoutError:
            outcome = "silent"
        except OSError as error:
            outcome = failure_of(error)
        finally:
            self.outcomes[outcome] += 1
        return answer

    @contextmanager
    def sending(self, data: bytes) -> Iterator[None]:
        """Count the bytes of a request that is under way until the block ends."""
        self._bytes_now += len(data)
        self.most_bytes = max(self.most_bytes, self._bytes_now)
        try:
            yield
        finally:
            self._bytes_now -= len(data)

    async def again(self, attack: Callable[[], Awaitable[object]], num_at_once: int = 1) -> None:
        """Repeat something until the time is over, at least once, by several clients at once."""

        async def repeat() -> None:
            while True:
                await attack()
                if self.is_over:
                    return

        await asyncio.gather(*(repeat() for _ in range(num_at_once)))

    async def run(self, attack: Callable[[Target], Awaitable[None]]) -> float:
        """Run an attack and return its seconds; what is left of it at its limit is cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CUT_AFTER * self.seconds):
                await attack(self)
        return time.monotonic() - self.began


@dataclass(frozen=True)
class Attack:
    """Something that a client may try."""

    run: Callable[[Target], Awaitable[None]]
    is_load: bool = False
    """It asks for more than the server can do at once: others may be told to come again."""
    times: float = 1.0
    """How many times as long as others it has to go on to do its harm."""


def status_of(answer: Answer) -> str:
    """Return the status as it is counted.

    A refusal has to say when to come again; an error of Ray's proxy, which comes as plain text, is
    not one of the application.
    """
    if answer.status in (429, 503) and "retry-after" not in answer.headers:
        return f"{answer.status} no Retry-After"
    is_ours = answer.headers.get("content-type", "").startswith("application/json")
    return "500 of the proxy" if answer.status == 500 and not is_ours else str(answer.status)


def failure_of(error: OSError) -> str:
    """Return what a connection came to, as it is counted."""
    if isinstance(error, Broken):
        return "closed"
    return "refused" if isinstance(error, ConnectionRefusedError) else "reset"


def chat(content: object, **fields: Any) -> bytes:
    """Return the body of a conversation of one message, answered with one token."""
    messages = [{"role": "user", "content": content}]
    return msgspec.json.encode({"messages": messages, "max_tokens": 1, **fields})


def completion(**fields: Any) -> bytes:
    """Return the body of a completion of one token."""
    return msgspec.json.encode({"prompt": "a", "max_tokens": 1, **fields})
