"""The HTTP layer alone, over an engine that answers at once, beside a bare Starlette server.

    python examples/bench/http_layer.py [--cases plain tools schema no-log] [--streams 1 8 32 128]
        [--tokens 64] [--requests 1024] [--repeats 5] [--step-ms 0 --rate 0] [--scrape-s 0]
        [--engines 2] [--peer NAME PORT PID] [--others 0.1] [--out FILE]

Both servers (`http_layer_servers.py`) are one process each and write the same answers. They take
turns, A B A B; a repetition during which other processes took more than `--others` cores does not
count and is run again, at most twice. Printed are the medians:

    rate     requests a second where `streams` is 0: whole answers of 8 tokens, 32 at once;
             else tokens a second of so many streams at once, of `--tokens` each
    cpu      processor seconds of the server per 1,000 requests, or per 1,000 tokens
    chunks   events per 100 tokens

and behind those of others the ratio to the bare one's. Each stream asks again on its connection
until `--requests` requests are answered in all (with `--step-ms` four times), so a stream's `cpu`
holds a share of its request. With `--scrape-s` our /metrics is read so often meanwhile, with the
counts of `--engines`; what the scrapes took is printed below. A `--peer` is another server of
OpenAI's chat completions that runs already on this machine.

The client counts events without reading them; beside the bare server it may be what limits the
rate. So it is awake when that server writes, and asleep when ours does, which makes each of our
writes dearer. `--step-ms`, slept between two tokens of a stream, and `--rate`, of whole requests a
second, have both servers do as much: compare `cpu` there.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
from http_layer_servers import CHAT, HOST, Answers
from raw_http import ask, request
from streams import MAX_ATTEMPTS, OTHERS_SHARE, busy_s

SERVERS = Path(__file__).with_name("http_layer_servers.py")
OURS, BARE = "Lockstep", "bare Starlette"
CLIENTS = 32
"""Of whole answers."""
WHOLE_TOKENS = 8
PACED_ROUNDS = 4
"""Requests of each stream with `--step-ms`, which takes as long however many streams there are."""
READY_TIMEOUT_S = 60.0

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer"},
    },
    "required": ["city", "unit"],
}
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": "What the weather is or will be.",
                    "parameters": WEATHER,
                },
            }
            for name in ("get_weather", "get_forecast")
        ]
    },
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": WEATHER},
        }
    },
    "no-log": {},
}
"""What each case asks for beside a short question."""
TEXTS = {
    "tools": '<tool_call>{"name": "get_weather", "arguments": {"city": "' + 400 * "Berlin ",
    "schema": '{"city": "Berlin", "unit": "celsius", "days": 12}',
}
ARGUMENTS = {"no-log": ["--no-log"]}


class Exchange(asyncio.Protocol):
    """One connection of the client: a request at a time, whose answer is counted, not read."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._answered: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take a part of an answer."""
        self._data += data
        if self._answered is not None and self._is_whole():
            self._answered.set_result(bytes(self._data))
            self._answered = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what waits."""
        if self._answered is not None:
            self._answered.set_exception(ConnectionError("the server closed the connection"))

    async def ask(self, data: bytes) -> bytes:
        """Return the answer to a request, its head included."""
        self._data.clear()
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._answered

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _is_whole(self) -> bool:
        if self._data.endswith(b"\r\n0\r\n\r\n"):
            return True  # chunked
        head_len = self._data.find(b"\r\n\r\n") + 4
        found = re.search(rb"(?i)\ncontent-length: *(\d+)", self._data[:head_len])
        return found is not None and len(self._data) - head_len == int(found[1])


class Load(msgspec.Struct, frozen=True):
    """What is asked of both servers."""

    case: str
    streams: int
    """0: whole answers."""
    num_tokens: int
    num_requests: int
    rate: float
    """Whole answers a second; 0: as fast as they come."""

    @property
    def num_clients(self) -> int:
        """Connections."""
        return self.streams or CLIENTS

    def request(self) -> bytes:
        """Return the request that each of them sends."""
        body = {
            "messages": [{"role": "user", "content": "What is 12 + 30?"}],
            "max_tokens": self.num_tokens,
            "temperature": 0,
            "stream": self.streams > 0,
            **FIELDS[self.case],
        }
        return request("POST", CHAT, msgspec.json.encode(body))


class Figures(msgspec.Struct, frozen=True):
    """One repetition; see the columns."""

    rate: float
    cpu_s: float
    chunks: float
    others: float
    """Cores that other processes took."""
    scrapes_ms: list[float]


class Row(msgspec.Struct):
    """All repetitions of a server under a load that counted."""

    server: str
    load: Load
    figures: list[Figures] = []
    num_disturbed: int = 0

    def median(self, name: str) -> float:
        """Return the median of one figure."""
        return statistics.median(getattr(found, name) for found in self.figures)


class Server:
    """A running server."""

    def __init__(self, name: str, port: int, pid: int) -> None:
        self.name = name
        self.address = (HOST, port)
        # What clock_getcpuclockid returns: psutil's figures are multiples of 10 ms.
        self._clock = (~pid << 3) | 2

    def cpu_s(self) -> float:
        """Return the processor seconds of the process so far."""
        return time.clock_gettime(self._clock)


@contextmanager
def running(name: str, *arguments: str) -> Iterator[Server]:
    """Run a server in a process of its own; it listens when the block begins."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    kind = "ours" if name == OURS else "bare"
    process = subprocess.Popen(
        [sys.executable, str(SERVERS), kind, str(port), *arguments], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            with suppress(OSError), socket.create_connection((HOST, port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name}: wanted it to listen, found it does not")
            time.sleep(0.1)
        yield Server(name, port, process.pid)
    finally:
        process.kill()
        process.wait()


async def run(server: Server, load: Load, scrape_s: float = 0.0) -> Figures:
    """Ask everything once."""
    data = load.request()
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(Exchange, *server.address))[1]
        for _ in range(load.num_clients)
    ]
    left, num_events = load.num_requests, 0

    async def work(exchange: Exchange) -> None:
        nonlocal left, num_events
        while left > 0:
            left -= 1
            if load.rate and not load.streams:
                await asyncio.sleep(began + (load.num_requests - left) / load.rate - loop.time())
            answer = await exchange.ask(data)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"{server.name}: wanted 200, found {answer[:1000]!r}")
            num_events += answer.count(b"data: ") - 1  # [DONE]

    own = psutil.Process()
    scrapes_ms: list[float] = []
    scraping = asyncio.create_task(scrape(server, scrape_s, scrapes_ms))
    before, busy, mine = server.cpu_s(), busy_s(), sum(own.cpu_times()[:2])
    began = loop.time()
    await asyncio.gather(*map(work, made))
    took = loop.time() - began
    cpu_s = server.cpu_s() - before
    others = busy_s() - busy - cpu_s - (sum(own.cpu_times()[:2]) - mine)
    scraping.cancel()
    for exchange in made:
        exchange.close()
    num_tokens = load.num_requests * load.num_tokens
    num = num_tokens if load.streams else load.num_requests
    chunks = 100 * num_events / num_tokens if load.streams else 0.0
    return Figures(num / took, 1e3 * cpu_s / num, chunks, others / took, scrapes_ms)


async def scrape(server: Server, every_s: float, took_ms: list[float]) -> None:
    """Read /metrics of our server again and again, as Prometheus does."""
    while every_s and server.name == OURS:
        began = time.monotonic()
        answer = await ask(server.address, "GET", "/metrics")
        took_ms.append(1e3 * (time.monotonic() - began))
        if answer.status != 200:
            raise SystemExit(f"/metrics: wanted 200, found {answer.status}")
        await asyncio.sleep(every_s)


async def answers_of(server: Server, case: str, num_tokens: int) -> Answers:
    """Return what our server answers, whole and streamed."""
    [made] = [(await asyncio.get_running_loop().create_connection(Exchange, *server.address))[1]]
    whole = await made.ask(Load(case, 0, WHOLE_TOKENS, 1, 0).request())
    stream = await made.ask(Load(case, 1, num_tokens, 1, 0).request())
    made.close()
    lines = [line for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return Answers(
        whole=msgspec.json.decode(whole.partition(b"\r\n\r\n")[2]),
        events=[msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines],
    )


def measure(case: str, loads: list[Load], options: argparse.Namespace) -> list[Row]:
    """Return the rows of one case."""
    pace = f"--step-ms={options.step_ms}"
    arguments = [
        pace,
        f"--engines={options.engines}",
        *ARGUMENTS.get(case, []),
        *(["--text", TEXTS[case]] if case in TEXTS else []),
    ]
    peers = [Server(name, int(port), int(pid)) for name, port, pid in options.peer]
    names = [OURS, *(peer.name for peer in peers), BARE]
    rows = [Row(name, load) for load in loads for name in names]
    with tempfile.TemporaryDirectory() as directory, running(OURS, *arguments) as ours:
        file = Path(directory) / "answers.json"
        answers = asyncio.run(answers_of(ours, case, loads[-1].num_tokens))
        file.write_bytes(msgspec.json.encode(answers))
        with running(BARE, pace, "--answers", str(file)) as bare:
            servers = {server.name: server for server in (ours, *peers, bare)}
            for row in rows:
                asyncio.run(run(servers[row.server], row.load))
            for _ in range(options.repeats):
                for row in rows:
                    repeat(servers[row.server], row, options.scrape_s, options.others)
    return rows


def repeat(server: Server, row: Row, scrape_s: float, max_others: float) -> None:
    """Ask everything once, again if it was disturbed, and add what was seen."""
    for _ in range(MAX_ATTEMPTS):
        found = asyncio.run(run(server, row.load, scrape_s))
        if found.others <= max_others:
            row.figures.append(found)
            return
        row.num_disturbed += 1


def print_rows(rows: list[Row]) -> None:
    """Print the medians."""
    columns = ("rate", "cpu_s", "chunks")
    print(
        f"{'case':<8}{'streams':>7} {'server':<15}"
        + "".join(f"{name:>18}" for name in ("rate", "cpu", "chunks"))
        + "   repetitions"
    )
    for row in rows:
        head = f"{row.load.case:<8}{row.load.streams:7} {row.server:<15}"
        if not row.figures:
            print(f"{head} disturbed {row.num_disturbed} times")
            continue
        [bare] = [each for each in rows if each.server == BARE and each.load == row.load]
        cells = []
        for name in columns:
            median = row.median(name)
            is_compared = row is not bare and bare.figures and bare.median(name)
            ratio = f" ({median / bare.median(name):.2f})" if is_compared else ""
            cells.append(f"{f'{median:.4g}{ratio}':>18}")
        cpu = [found.cpu_s for found in row.figures]
        print(head + "".join(cells) + f"   {len(cpu)}, cpu {min(cpu):.4g} to {max(cpu):.4g}")
    took = [ms for row in rows for found in row.figures for ms in found.scrapes_ms]
    if took:
        median = statistics.median(took)
        print(f"{len(took)} scrapes: median {median:.1f} ms, longest {max(took):.1f} ms")


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=FIELDS, default=list(FIELDS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--others", type=float, default=OTHERS_SHARE, help="cores of others")
    parser.add_argument("--scrape-s", type=float, default=0.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument(
        "--peer", nargs=3, action="append", default=[], metavar=("NAME", "PORT", "PID")
    )
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    options = parser.parse_args()
    rows: list[Row] = []
    for case in options.cases:
        loads = [
            Load(
                case,
                streams=n,
                num_tokens=options.tokens if n else WHOLE_TOKENS,
                num_requests=n * PACED_ROUNDS if n and options.step_ms else options.requests,
                rate=options.rate,
            )
            for n in (0, *options.streams)
        ]
        rows += measure(case, loads, options)
    print(f"{platform.platform()}; {vars(options)}")
    print_rows(rows)
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))


if __name__ == "__main__":
    main()
