"""HTTP over plain sockets, for requests that no client library would send.

Requests are sent as they stand: nothing here checks, completes or corrects them. Answers are read
as HTTP/1.1, whole, chunk by chunk, or not at all.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

MAX_LINE_BYTES = 1 << 20
KEPT_BYTES = 64 << 10
"""Bytes of an answer's body that are kept; the rest is counted and dropped."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes
    """Its first `KEPT_BYTES`."""
    num_bytes: int


class Broken(ConnectionError):
    """The connection ended before its answer did."""


class Connection:
    """One connection to a server; closing it twice does no harm."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, address: tuple[str, int], receive_buffer: int | None = None) -> Connection:
        """Connect; a small receive buffer lets a slow reader be slow at the server's end too."""
        made = socket.socket()
        made.setblocking(False)
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(made, address)
        except BaseException:
            made.close()
            raise
        limit = MAX_LINE_BYTES if receive_buffer is None else receive_buffer
        return cls(*await asyncio.open_connection(sock=made, limit=limit))

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def send(self, data: bytes) -> None:
        """Send all of it, as fast as the server takes it."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read status and headers, past whatever 1xx comes before them.

        Raises:
            Broken: something else came, or nothing.
        """
        while True:
            try:
                first, *lines = (
                    (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                )
            except asyncio.IncompleteReadError as error:
                raise Broken(f"{len(error.partial)} bytes of a head") from error
            status = first.split(" ", 2)[1:2]
            if not first.startswith("HTTP/") or not status or not status[0].isdecimal():
                raise Broken(f"no status: {first[:80]!r}")
            if int(status[0]) >= 200:
                pairs = (line.partition(":") for line in lines if line)
                return int(status[0]), {name.lower(): value.strip() for name, _, value in pairs}

    async def parts(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Yield the body behind a head as it comes."""
        try:
            if headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await self.reader.readline()).split(b";")[0] or b"x", 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readline()
                return
            length = headers.get("content-length")
            left = int(length) if length is not None else -1
            while left:
                part = await self.reader.read(1 << 20 if left < 0 else min(left, 1 << 20))
                if not part:
                    break
                left -= len(part)
                yield part
            if left > 0:
                raise Broken(f"{left} bytes of the body are missing")
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise Broken("the body broke off") from error

    async def events(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Yield the data of the server-sent events behind a head, [DONE] included."""
        rest = b""
        async for part in self.parts(headers):
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                yield event.removeprefix(b"data: ")

    async def answer(self, method: str = "POST") -> Answer:
        """Read a whole answer; to a HEAD there is no body."""
        status, headers = await self.head()
        kept, num_bytes = bytearray(), 0
        if method != "HEAD" and status not in (204, 304):
            async for part in self.parts(headers):
                num_bytes += len(part)
                kept += part[: KEPT_BYTES - len(kept)]
        return Answer(status, headers, bytes(kept), num_bytes)

    def close(self) -> None:
        """End the connection in the usual way."""
        self.writer.close()

    def reset(self) -> None:
        """End it with a reset, as a client whose machine fails."""
        self.writer.transport.abort()


def request(
    method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return a request of HTTP/1.1, with a Content-Length where it has a body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


async def ask(
    address: tuple[str, int], method: str, path: str, body: bytes | None = None
) -> Answer:
    """Send one request on a connection of its own and return the answer."""
    async with await Connection.open(address) as connection:
        await connection.send(request(method, path, body))
        return await connection.answer(method)
