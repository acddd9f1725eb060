"""Streams through HTTP from one server after the other, again and again, and the ratios.

    python examples/bench/streams.py --server NAME URL COMMAND [--server ...] [--streams 1 8 32]
        [--input 128] [--output 64] [--requests 2] [--arriving 0] [--repeats 3]
        [--max-token-id 500] [--sampling '{"temperature": 0}'] [--out FILE]

Each server is any that has OpenAI's completions: it is started by its command, warmed up, asked,
and ended before the next one starts, so that A B A B ... see the same machine. Prompts are random
token ids, the same for all servers and new in every repetition, so that none finds them in its
cache; decoding is greedy, unless `--sampling` has other fields for each request, and ignores the
end token, so that every server has the same to do. With `--arriving`, prompts of so many tokens
arrive meanwhile, each once the one before has its one token; they are not counted. Of each server
and number of streams, the medians of all repetitions:

    tokens/s  output tokens a second, from the first request to the last answer
    ttft      mean milliseconds to the first token
    tpot      mean milliseconds from there, per token
    gap p99   milliseconds between two chunks of a stream, 99th percentile
    cpu       processor seconds of the server per 1,000 output tokens
    chunks    per 100 output tokens
    MiB       memory of all processes of the server afterwards, what they share counted once
    ready     seconds from the command to the first answer, with nothing left to compile

A repetition during which other processes took more than a tenth of a core does not count and is
run again, at most twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import psutil
from raw_http import Connection, ask, request

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
OTHERS_SHARE = 0.1
"""Cores that other processes may take."""
MAX_ATTEMPTS = 3
PATH = "/v1/completions"
GREEDY: dict[str, float] = {"temperature": 0}


class Measurable(Protocol):
    """A running server."""

    address: tuple[str, int]
    model: str

    def cpu_s(self) -> float:
        """Return the processor seconds of all its processes so far."""

    def memory_bytes(self) -> int:
        """Return the memory of all its processes."""


class Load(msgspec.Struct, frozen=True):
    """What is asked of every server."""

    streams: int
    requests_per_stream: int
    input_len: int
    output_len: int
    max_token_id: int
    arriving_len: int = 0
    """Tokens of prompts that arrive meanwhile; 0: none do."""
    sampling: dict[str, float] = msgspec.field(default_factory=GREEDY.copy)

    def arriving(self, turn: str) -> Iterator[list[int]]:
        """Yield prompts without end, which no other turn has."""
        rng = random.Random(f"arriving {turn} {self.streams}")
        while True:
            yield rng.choices(range(10, self.max_token_id), k=self.arriving_len)

    def prompts(self, turn: str, stream: int) -> list[list[int]]:
        """Return the prompts of one stream, which no other turn has: no server has them cached."""
        rng = random.Random(f"{turn} {self.streams} {stream}")
        ids = range(10, self.max_token_id)
        return [rng.choices(ids, k=self.input_len) for _ in range(self.requests_per_stream)]


class Figures(msgspec.Struct, frozen=True):
    """One repetition; see the columns."""

    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    gap_p99_ms: float
    cpu_s: float
    chunks: float
    memory_mib: float
    others: float
    """Cores that other processes took."""


class Row(msgspec.Struct):
    """All repetitions of a server at a number of streams that counted."""

    server: str
    streams: int
    figures: list[Figures] = []
    num_disturbed: int = 0

    def median(self, name: str) -> float:
        """Return the median of one figure."""
        return statistics.median(getattr(found, name) for found in self.figures)


class Report(msgspec.Struct):
    """What `--out` is written from."""

    machine: str
    date: str
    commands: dict[str, str]
    load: dict[str, float]
    ready_s: dict[str, list[float]]
    rows: list[Row]


class Server:
    """A running server; it answers when its block begins."""

    def __init__(self, url: str, command: str) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.ready_s = 0.0
        self.model = ""
        self._command = command
        self._process: subprocess.Popen[bytes]

    async def __aenter__(self) -> Server:
        began = time.monotonic()
        self._process = subprocess.Popen(
            shlex.split(self._command),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while not await self._is_ready():
            if self._process.poll() is not None or time.monotonic() - began > READY_TIMEOUT_S:
                self._end()
                raise SystemExit(f"{self._command}: wanted an answer of {PATH}, found none")
            await asyncio.sleep(0.2)
        self.ready_s = time.monotonic() - began
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def cpu_s(self) -> float:
        """Return the processor seconds of all its processes so far."""
        total = 0.0
        for process in self._processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_bytes(self) -> int:
        """Return the memory of all its processes."""
        return memory_bytes(self._processes())

    async def _is_ready(self) -> bool:
        with suppress(OSError, ValueError, KeyError, IndexError):
            models = await ask(self.address, "GET", "/v1/models")
            self.model = msgspec.json.decode(models.body)["data"][0]["id"]
            body = {"model": self.model, "prompt": [11, 12], "max_tokens": 1}
            answer = await ask(self.address, "POST", PATH, msgspec.json.encode(body))
            return answer.status == 200 and not await self._is_compiling()
        return False

    async def _is_compiling(self) -> bool:
        """Return whether it serves, as ours may, while it still compiles."""
        ready = await ask(self.address, "GET", "/ready")
        return ready.status == 200 and msgspec.json.decode(ready.body)["compiling"] is True

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def _end(self) -> None:
        """End it as a user does, and what it leaves behind."""
        processes = self._processes()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=10)


class Stream:
    """When the chunks of one answer came, and how many tokens it had."""

    def __init__(self) -> None:
        self.asked_at = time.monotonic()
        self.chunks_at: list[float] = []
        self.num_tokens = 0

    async def run(
        self, server: Measurable, prompt: list[int], output_len: int, sampling: dict[str, float]
    ) -> None:
        """Ask; an answer that is not whole is a SystemExit."""
        body = {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": output_len,
            **sampling,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.asked_at = time.monotonic()
        async with await Connection.open(server.address) as made:
            await made.send(request("POST", PATH, msgspec.json.encode(body)))
            status, headers = await made.head()
            if status != 200:
                raise SystemExit(f"{PATH}: wanted 200, found {status}")
            async for event in made.events(headers):
                if event == b"[DONE]":
                    break
                chunk = msgspec.json.decode(event)
                if chunk.get("usage"):
                    self.num_tokens = chunk["usage"]["completion_tokens"]
                if chunk["choices"]:
                    self.chunks_at.append(time.monotonic())
        if self.num_tokens != output_len:
            raise SystemExit(f"{PATH}: wanted {output_len} tokens, found {self.num_tokens}")


async def measure(server: Measurable, load: Load, turn: str) -> Figures:
    """Ask all streams at once and return what was seen."""
    done: list[Stream] = []

    async def run(index: int) -> None:
        for prompt in load.prompts(turn, index):
            done.append(Stream())
            await done[-1].run(server, prompt, load.output_len, load.sampling)

    async def arrive() -> None:
        for prompt in load.arriving(turn):
            await Stream().run(server, prompt, 1, load.sampling)

    own = psutil.Process()
    before, busy, mine = server.cpu_s(), busy_s(), sum(own.cpu_times()[:2])
    began = time.monotonic()
    arriving = asyncio.create_task(arrive()) if load.arriving_len else None
    await asyncio.gather(*(run(i) for i in range(load.streams)))
    took = time.monotonic() - began
    if arriving is not None:
        arriving.cancel()
        await asyncio.wait([arriving])
    cpu_s = server.cpu_s() - before
    others = busy_s() - busy - cpu_s - (sum(own.cpu_times()[:2]) - mine)
    num_tokens = sum(stream.num_tokens for stream in done)
    gaps = [b - a for s in done for a, b in zip(s.chunks_at, s.chunks_at[1:], strict=False)]
    decoding = [s.chunks_at[-1] - s.chunks_at[0] for s in done]
    return Figures(
        tokens_per_s=num_tokens / took,
        ttft_ms=1e3 * statistics.mean(s.chunks_at[0] - s.asked_at for s in done),
        tpot_ms=1e3 * statistics.mean(decoding) / max(load.output_len - 1, 1),
        gap_p99_ms=1e3 * sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1] if gaps else 0.0,
        cpu_s=1e3 * cpu_s / num_tokens,
        chunks=100 * sum(len(s.chunks_at) for s in done) / num_tokens,
        memory_mib=server.memory_bytes() / 2**20,
        others=others / took,
    )


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the memory of processes; of what some share, each has its part."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def busy_s() -> float:
    """Return the seconds that all cores of the machine have been busy."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


async def repeat(name: str, url: str, command: str, loads: list[Load], report: Report) -> None:
    """Start a server, ask it everything once, and end it."""
    async with Server(url, command) as server:
        report.ready_s.setdefault(name, []).append(server.ready_s)
        for load in loads:
            row = row_of(report, name, load.streams)
            await measure(server, load, "warm")  # what is built for the first requests of a size
            for attempt in range(MAX_ATTEMPTS):
                found = await measure(server, load, f"{len(report.ready_s[name])} {attempt}")
                if found.others <= OTHERS_SHARE:
                    row.figures.append(found)
                    break
                row.num_disturbed += 1


def row_of(report: Report, server: str, streams: int) -> Row:
    """Return the row of a server and a number of streams, a new one the first time."""
    for row in report.rows:
        if (row.server, row.streams) == (server, streams):
            return row
    report.rows.append(Row(server, streams))
    return report.rows[-1]


COLUMNS = {
    "tokens/s": "tokens_per_s",
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "gap p99": "gap_p99_ms",
    "cpu": "cpu_s",
    "chunks": "chunks",
    "MiB": "memory_mib",
}


def print_report(report: Report) -> None:
    """Print the medians; behind those of each server but the first, the ratio to that one."""
    head = " ".join(f"{name:>16}" for name in COLUMNS)
    print(f"{'streams':>7} {'server':<16} {head}   repetitions")
    first = next(iter(report.commands))
    for row in sorted(report.rows, key=lambda row: row.streams):
        if not row.figures:
            print(f"{row.streams:7} {row.server:<16} disturbed {row.num_disturbed} times")
            continue
        cells = []
        base = row_of(report, first, row.streams)
        for name in COLUMNS.values():
            median = row.median(name)
            is_compared = row.server != first and base.figures and base.median(name)
            ratio = f" ({median / base.median(name):.2f})" if is_compared else ""
            cells.append(f"{f'{median:.1f}{ratio}':>16}")
        speeds = [found.tokens_per_s for found in row.figures]
        spread = f"{len(speeds)}, {min(speeds):.0f} to {max(speeds):.0f} tokens/s"
        print(f"{row.streams:7} {row.server:<16} {' '.join(cells)}   {spread}")
    for name, found in report.ready_s.items():
        print(f"{name}: ready after {', '.join(f'{s:.1f}' for s in found)} s")


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--server", nargs=3, action="append", required=True, metavar=("NAME", "URL", "COMMAND")
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="of each stream, in turn")
    parser.add_argument("--arriving", type=int, default=0, help="tokens of prompts that arrive")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-token-id", type=int, default=500)
    parser.add_argument("--sampling", type=json.loads, default=GREEDY)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    loads = [
        Load(
            streams,
            given.requests,
            given.input,
            given.output,
            given.max_token_id,
            given.arriving,
            given.sampling,
        )
        for streams in given.streams
    ]
    report = Report(
        machine=f"{platform.platform()}, {os.cpu_count()} cores",
        date=time.strftime("%Y-%m-%d"),
        commands={name: command for name, _, command in given.server},
        load={
            "input": given.input,
            "output": given.output,
            "requests": given.requests,
            "arriving": given.arriving,
            **given.sampling,
        },
        ready_s={},
        rows=[],
    )
    for _ in range(given.repeats):
        for name, url, command in given.server:
            asyncio.run(repeat(name, url, command, loads, report))
            if given.out:
                given.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    print_report(report)


if __name__ == "__main__":
    main()
