"""Attacks by malformed requests: false lengths, odd headers, methods and paths.

Each request is sent on a connection of its own, and waits a moment for an answer that may never
come.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from hostile_bodies import FULL
from hostile_target import CHAT, Attack, Target, completion
from raw_http import request

PATIENCE_S = 1.0
BODY = completion()
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"
CHUNKED = b"Transfer-Encoding: chunked"
IN_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
METHODS = "HEAD OPTIONS TRACE CONNECT PUT PATCH DELETE PROPFIND PRI get FOO G\u00c9T"


def shapes(requests: Callable[[], Iterator[bytes]], method: str = "POST") -> Attack:
    """Return the attack by these requests."""

    async def attack(to: Target) -> None:
        for data in requests():
            await to.exchange(data, method=method, patience_s=PATIENCE_S)

    return Attack(attack)


def post(*lines: bytes, body: bytes = BODY, version: bytes = b"1.1") -> bytes:
    """Return a post with these header lines, written as they stand."""
    start = b"POST /v1/completions HTTP/" + version
    return b"\r\n".join([start, b"Host: a", b"Content-Type: application/json", *lines, b"", body])


def posted(*lines: bytes, body: bytes = BODY) -> bytes:
    """Return a post that tells the length of its body."""
    return post(length(len(body)), *lines, body=body)


def get(path: bytes) -> bytes:
    """Return a request of a path, written as it stands."""
    return b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n"


def length(value: bytes | int) -> bytes:
    """Return a header line that says how long the body is."""
    return b"Content-Length: " + (str(value).encode() if isinstance(value, int) else value)


def lengths() -> Iterator[bytes]:
    """Lengths that are too large or too small, of another kind, given twice or not at all."""
    right = len(BODY)
    for number in (right + 10, right - 10, 0, -1, 10**30, 2**64, 2**63 - 1):
        yield post(length(number))
    for written in (b"", b"a", b"0x10", b"+26", b"2 6", b"26,26", b"26.0", b"\xd9\xa1"):
        yield post(length(written))
    yield post(length(right), length(right))
    yield post(length(right), length(5))
    yield post()


def smuggling() -> Iterator[bytes]:
    """Bodies that end in one place for one reader and elsewhere for another."""
    yield post(length(5), CHUNKED, body=SMUGGLED)
    yield post(CHUNKED, length(5), body=SMUGGLED)
    for coding in (b"xchunked", b"identity", b"chunked, identity", b"\x0bchunked", b"gzip"):
        yield posted(b"Transfer-Encoding: " + coding, body=SMUGGLED)
    yield posted(b"Transfer-Encoding : chunked", body=SMUGGLED)
    yield posted(b"Transfer-Encoding:\r\n chunked", body=SMUGGLED)
    yield post(CHUNKED, CHUNKED, body=IN_CHUNKS)
    yield post(CHUNKED, body=IN_CHUNKS)
    yield post(CHUNKED, body=IN_CHUNKS, version=b"1.0")
    yield post(CHUNKED, body=b"ffffffffffffffffff\r\n" + BODY)
    yield post(CHUNKED, body=b"-5\r\n" + BODY)
    yield post(CHUNKED, body=b"5;" + b"a" * 100_000 + b"\r\n")
    yield post(CHUNKED, body=b"2\n{}\n0\n\n")
    yield post(CHUNKED, body=b"0\r\n" + b"X-Trailer: a\r\n" * 10_000 + b"\r\n")


def large_headers() -> Iterator[bytes]:
    """Headers that are long, and many."""
    for size in (8_000, 64_000, 1 << 20, 16 << 20):
        yield GET + b"X-A: " + b"a" * size + b"\r\n\r\n"
    for size in (64_000, 1 << 20):
        yield GET + b"a" * size + b": b\r\n\r\n"
    for count in (100, 1_000, 10_000, 100_000):
        yield GET + b"X-A: b\r\n" * count + b"\r\n"
    yield GET + b"".join(b"X-%d: b\r\n" % i for i in range(10_000)) + b"\r\n"
    yield GET + b"Cookie: " + b"a=b; " * 100_000 + b"\r\n\r\n"
    yield posted(b"Content-Type: text/plain; charset=" + b"x" * 60_000)
    yield posted(b"X-Request-ID: " + b"a" * 60_000)


def odd_headers() -> Iterator[bytes]:
    """Headers that are none, and those to which Ray Serve listens."""
    for line in (b"no colon", b": b", b"X A: b", b"X-A : b", b" folded", b"X-A: \x00", b"\x00: b"):
        yield GET + line + b"\r\n\r\n"
    for line in (b"X-A: \xff\xfe", b"\xff: b", b"X-A: a\rb", b"X-A: a\nb", b"Host: b", b"Host:"):
        yield GET + line + b"\r\n\r\n"
    yield b"GET /health HTTP/1.1\r\n\r\n"
    yield b"GET /health HTTP/1.1\n\n"
    for expected in (b"miracles", b"100-continue", b"100-continue, 100-continue"):
        yield posted(b"Expect: " + expected)
    yield posted(b"Expect: 100-continue", body=b" " * FULL)
    for seconds in (b"0", b"-1", b"0.001", b"1e999", b"nan", b"soon", b"\xff"):
        yield posted(b"X-Request-Timeout-Seconds: " + seconds)
    for name in (b"X-Request-ID", b"Serve_Multiplexed_Model_ID", b"X-Session-ID"):
        for value in (b"", b"\xff\xfe", "\U0001f600".encode() * 90, b"a" * 5_000):
            yield posted(name + b": " + value)
    yield posted(b"X-Forwarded-For: " + b"1.2.3.4, " * 5_000)
    yield posted(b"traceparent: 00-" + b"0" * 5_000)


def versions() -> Iterator[bytes]:
    """Other versions of HTTP, other protocols, and none at all."""
    yield b"GET /health HTTP/1.0\r\n\r\n"
    yield b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    yield post(length(len(BODY)), version=b"1.0")
    for version in (b"0.9", b"1.2", b"2.0", b"9.9", b"1", b"x"):
        yield b"GET /health HTTP/" + version + b"\r\n\r\n"
    yield from (b"GET /health\r\n", b"GET\r\n\r\n", b"\r\n\r\n", b"\n" * 10_000, b"\x00" * 100_000)
    yield os.urandom(65_536)
    socket_key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    for protocol in (b"websocket", b"h2c", b"TLS/1.0", b"a" * 10_000):
        upgrade = GET + b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\n"
        yield upgrade + b"\r\n"
        yield upgrade + socket_key + b"\r\n"
        yield upgrade + b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n"


def paths() -> Iterator[bytes]:
    """Paths that are odd, leave the tree, or have no end."""
    yield from map(
        get, (b"", b"//", b"/./", b"/../", b"*", b"?", b"#", b"health", b"/health/", b"//health")
    )
    yield from map(get, (b"/%2e%2e/%2e%2e/etc/passwd", b"/v1/../../../etc/passwd", b"/%2fhealth"))
    yield from map(get, (b"/%00", b"/%ff", b"/%", b"/%zz", b"/\xff\xfe", b"/\x00", b"/a b", b"/\\"))
    yield from map(get, (b"http://other/health", b"http://", b"//other:99999/health", b"/;/"))
    yield from map(get, (b"/v1/models/..%2f..%2fetc", b"/v1/models/%00", b"/v1/models/../health"))
    yield from map(get, (b"/-/routes", b"/-/healthz", b"/debug/nothing", b"/docs", CHAT.encode()))
    yield get(b"/health?" + b"a=b&" * 2_000)
    yield get(b"/v1/models/" + b"a" * 8_000)
    yield get(b"/" + b"a" * 60_000)
    yield get(b"/" + b"a/" * 30_000)
    yield get(b"/" + b"%41" * 20_000)


async def methods(to: Target) -> None:
    """Send every method there is, and some that are none, to every kind of route."""
    for method in (*METHODS.split(), "A" * 10_000, ""):
        for path in ("/health", "/v1/models", CHAT):
            data = request(method, path, b"{}" if method == "PUT" else None)
            await to.exchange(data, method=method, patience_s=PATIENCE_S)


ATTACKS = {
    "lengths": shapes(lengths),
    "smuggling": shapes(smuggling),
    "large-headers": shapes(large_headers),
    "odd-headers": shapes(odd_headers),
    "versions": shapes(versions),
    "paths": shapes(paths, "GET"),
    "methods": Attack(methods),
}
