"""What lies between engine and client: streams of an engine that computes nothing.

    python examples/bench/serving_path.py [--haproxy] [--streams 1 8 32] [--output 256]
        [--step-ms 0] [--repeats 3] [--out FILE] [key=value ...]

An application of the bundled model is started as `serve run` does, with one mixed pool. Then its
rank stops computing: each step returns the same token at once, or after `--step-ms` in which it
sleeps. Scheduler, sockets, router, ingress and proxy work as ever. So without a step time what is
left is their rate, the ceiling of any model behind them; with one, the processor time that they
take from a model whose steps are that long. A bare Starlette server under uvicorn, which makes up
its chunks at the same pace, takes turns with it.

    tokens/s  output tokens a second through HTTP, median
    cpu       processor milliseconds of all server processes per token
    ingress, proxy, ranks, rest   the same of each role's
    chunks    per 100 tokens

The client runs on the same machine. Arguments of `deploy` come last.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import psutil
from default_app import HOST, TITLES, DefaultApp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from streams import Load, measure, memory_bytes

from cluster.engine.compile_switch import CompileSwitch
from cluster.engine.sequence import SampledTokens
from cluster.wire.messages import StepAgreement, StepPlan

BARE = "bare Starlette"
OURS = "Lockstep"
TEXT = " word"
SETTLE_S = 0.2


class InstantEngine:
    """Executes a plan by returning the same token for every sequence that samples."""

    def __init__(self, token_id: int, step_s: float) -> None:
        self.switch = CompileSwitch()
        self._token_id = token_id
        self._step_s = step_s

    def execute(
        self, plan: StepPlan, agreed: StepAgreement, confirm: Callable[[], None]
    ) -> SampledTokens:
        """Confirm the step and return its tokens, without computing anything."""
        confirm()
        if self._step_s:
            time.sleep(self._step_s)
        num_sampled = sum(index >= 0 for index in plan.output_index)
        return SampledTokens([self._token_id] * num_sampled, [], [], [])


def stop_computing(actor: Any, token_id: int, step_s: float) -> None:
    """Put an instant engine in the place of a rank actor's runner. Runs in its process."""
    actor._rank.engine.runner = InstantEngine(token_id, step_s)


def arm(step_s: float, app_name: str = "default", token_id: int = 65) -> None:
    """Let every rank of an application stop computing."""
    import ray
    import ray.cloudpickle

    from cluster.actors.status_board import NAMESPACE, board_name

    # Ranks need not find this file: it is sent along.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    board = ray.get_actor(board_name(app_name), namespace=NAMESPACE)
    pools = ray.get(board.actors.remote()).values()
    ranks = [actor for replicas in pools for actors in replicas.values() for actor in actors]
    calls = [rank.__ray_call__.options(concurrency_group="ctl") for rank in ranks]
    ray.get([call.remote(stop_computing, token_id, step_s) for call in calls])


# --- a bare server ------------------------------------------------------------------------------


async def models(_: Request) -> Response:
    """Answer as a server with one model."""
    return JSONResponse({"data": [{"id": "bare"}]})


async def complete(request: Request) -> Response:
    """Stream a chunk per token."""
    asked = msgspec.json.decode(await request.body())
    chunks = events(asked["max_tokens"], request.app.state.step_s)
    return StreamingResponse(chunks, media_type="text/event-stream")


async def events(num_tokens: int, step_s: float) -> AsyncIterator[bytes]:
    """Yield the events of an answer; the loop serves other streams between two."""
    chunk = {"id": "cmpl-0", "choices": [{"index": 0, "text": TEXT, "finish_reason": None}]}
    for _ in range(num_tokens):
        yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        await asyncio.sleep(step_s)
    usage = {"id": "cmpl-0", "choices": [], "usage": {"completion_tokens": num_tokens}}
    yield b"data: " + msgspec.json.encode(usage) + b"\n\n"
    yield b"data: [DONE]\n\n"


def run_bare_server(port: int, step_s: float) -> None:
    """Serve until killed."""
    import uvicorn

    routes = [Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])]
    app = Starlette(routes=routes)
    app.state.step_s = step_s
    uvicorn.run(app, host=HOST, port=port, log_level="error")


# --- measuring ----------------------------------------------------------------------------------


class Target:
    """A running server, with the processes of each of its roles."""

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        model: str,
        processes: Callable[[], dict[str, list[psutil.Process]]],
    ) -> None:
        self.name, self.address, self.model = name, address, model
        self._processes = processes

    def cpu_by_role(self) -> dict[str, float]:
        """Return the processor seconds of each role so far."""
        found = {}
        for role, processes in self._processes().items():
            found[role] = 0.0
            for process in processes:
                with suppress(psutil.Error):
                    found[role] += sum(process.cpu_times()[:2])
        return found

    def cpu_s(self) -> float:
        """Return those of all roles."""
        return sum(self.cpu_by_role().values())

    def memory_bytes(self) -> int:
        """Return the memory of all roles' processes."""
        return memory_bytes(chain.from_iterable(self._processes().values()))


class Row(msgspec.Struct):
    """All repetitions of a server at a number of streams."""

    server: str
    streams: int
    tokens_per_s: list[float] = []
    chunks: list[float] = []
    ttft_ms: list[float] = []
    cpu_ms: dict[str, list[float]] = {}
    """Per token, by role."""


def repeat(target: Target, load: Load, row: Row) -> None:
    """Ask everything once and add what was seen."""
    before = target.cpu_by_role()
    found = asyncio.run(measure(target, load, "same"))
    time.sleep(SETTLE_S)  # what a request's end still costs
    num_tokens = load.streams * load.requests_per_stream * load.output_len
    row.tokens_per_s.append(found.tokens_per_s)
    row.chunks.append(found.chunks)
    row.ttft_ms.append(found.ttft_ms)
    for role, seconds in target.cpu_by_role().items():
        spent = 1e3 * (seconds - before.get(role, 0.0)) / num_tokens
        row.cpu_ms.setdefault(role, []).append(spent)


def print_rows(rows: list[Row]) -> None:
    """Print the medians."""
    roles = list(TITLES)
    print(
        f"{'streams':>7} {'server':<15}"
        + "".join(f"{n:>10}" for n in ("tokens/s", "ttft ms", "chunks", "cpu ms", *roles))
    )
    for row in rows:
        cpu = {role: statistics.median(spent) for role, spent in row.cpu_ms.items()}
        medians = [statistics.median(x) for x in (row.tokens_per_s, row.ttft_ms, row.chunks)]
        cells = [f"{m:.1f}" for m in medians] + [f"{sum(cpu.values()):.3f}"]
        cells += [f"{cpu[role]:.3f}" if role in cpu else "-" for role in roles]
        print(f"{row.streams:7} {row.server:<15}" + "".join(f"{cell:>10}" for cell in cells))


@contextmanager
def bare_server(step_ms: float) -> Iterator[Target]:
    """Run the bare server in a process of its own; the value is its target."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, __file__, "--bare-server", str(port), f"--step-ms={step_ms}"]
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection((HOST, port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("bare server: wanted it to listen, found it does not")
            time.sleep(0.1)
        processes = {"ingress": [psutil.Process(process.pid)]}
        yield Target(BARE, (HOST, port), "bare", lambda: processes)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--haproxy", action="store_true", help="behind HAProxy, not Ray's proxy")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=16)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long a step sleeps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--bare-server", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    if options.bare_server:
        run_bare_server(options.bare_server, options.step_ms / 1e3)
        return
    arguments = ("pools=mixed", "O=0", *options.arguments)
    loads = [Load(n, 1, options.input, options.output, 500) for n in options.streams]
    rows = [Row(name, load.streams) for load in loads for name in (OURS, BARE)]
    with (
        DefaultApp(arguments, has_haproxy=options.haproxy) as app,
        bare_server(options.step_ms) as bare,
    ):
        arm(options.step_ms / 1e3)
        [model] = app.get("/v1/models")[1]["data"]
        ours = Target(OURS, app.address, model["id"], app.processes)
        for load in loads:
            for target in (ours, bare):
                # Connections and code are warm afterwards.
                asyncio.run(measure(target, load, "warm"))
        for _ in range(options.repeats):
            for row in rows:
                target = ours if row.server == OURS else bare
                repeat(target, loads[options.streams.index(row.streams)], row)
    print_rows(rows)
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))


if __name__ == "__main__":
    main()
