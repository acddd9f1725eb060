"""Ask the default application for ten times what it can do, and see what becomes of each request.

    python examples/bench/overload.py [--max-num-seqs 64] [--max-queued-requests 256] [--seconds 60]
        [--times 10] [--out FILE] [--haproxy]

1. *Unloaded*: one client asks again and again.
2. *Full queue*: as many clients as there are places, running and waiting, ask without a break.
   What they are answered in a second is the capacity.
3. *Overload*: requests arrive at ten times that rate, at random moments, whether or not those
   before them are answered. There is no more room than before: an admitted request should wait as
   long as in the full queue (`MAX_RATIO`), all others should be told at once when to come again.
4. *Recovery*: no new request arrives. Soon after the last admitted one is answered, a client should
   be served as in 1.

All ask the same greedy question as a stream. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from default_app import DefaultApp
from hostile_target import CHAT, failure_of
from hostile_watch import text_of
from raw_http import Connection, request

MAX_RATIO = 1.5
"""The largest allowed ratio of a latency to the same one with a full queue."""
MAX_RECOVERY_S = 5.0
SLACK = 1.5
"""A latency is the unloaded one if it is not above its 90th percentile times this."""
NUM_UNLOADED = 20
RECOVERY_LIMIT_S = 120.0
TIMEOUT_S = 300.0
SEED = 7

QUESTION = {
    "messages": [{"role": "user", "content": "Count from 3 to 20."}],
    "temperature": 0,
    "max_tokens": 60,
    "stream": True,
}


class Outcome(msgspec.Struct, frozen=True):
    """What became of one request."""

    status: str
    """The code, or how the connection ended without one."""
    has_retry_after: bool
    began: float
    """By the monotonic clock, as `ended`."""
    ended: float
    first_s: float | None
    """Until the first token."""
    text: str

    @property
    def total_s(self) -> float:
        """Until the last byte."""
        return self.ended - self.began


class Latency(msgspec.Struct, frozen=True):
    """Seconds below which half, nine tenths and 99 hundredths of some requests were answered."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Return the percentiles; all are 0 where there is nothing."""
        ordered = sorted(seconds) or [0.0]
        return cls(*(ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)))

    def ratio(self, other: Latency) -> float:
        """Return the largest ratio of a percentile to that of the other."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return max(own / theirs if theirs else 0.0 for own, theirs in pairs)


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that belong together."""

    seconds: float
    outcomes: dict[str, int]
    """By status."""
    no_retry_after: int
    """Refused ones that were not told when to come again."""
    wrong: int
    """Answers other than the unloaded one."""
    per_second: float
    """Answers."""
    first_token_s: Latency
    total_s: Latency
    """Both of what was answered."""
    refusal_s: Latency

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], seconds: float, text: str) -> Phase:
        """Sum up what became of requests in so many seconds; `text` is the right answer."""
        answered = [each for each in outcomes if each.status == "200"]
        refused = [each for each in outcomes if each.status in ("429", "503")]
        return cls(
            seconds=seconds,
            outcomes=dict(Counter(each.status for each in outcomes)),
            no_retry_after=sum(not each.has_retry_after for each in refused),
            wrong=sum(each.text != text for each in answered),
            per_second=len(answered) / seconds,
            first_token_s=Latency.of([each.first_s for each in answered if each.first_s]),
            total_s=Latency.of([each.total_s for each in answered]),
            refusal_s=Latency.of([each.total_s for each in refused]),
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    machine: str
    arguments: list[str]
    has_haproxy: bool
    num_places: int
    unloaded: Phase
    full_queue: Phase
    overload: Phase
    arrivals_per_second: float
    """As they were; the rate that was meant is `times` the capacity."""
    times: float
    ratio: float
    """The largest of a percentile of `total_s` in the overload to that in the full queue."""
    drain_s: float
    """From the last arrival until the last one that was admitted was answered."""
    recovery_s: float | None
    """From there until a request was served as unloaded; None: none was."""

    def failures(self) -> list[str]:
        """Return the targets that were missed."""
        other = {k: v for k, v in self.overload.outcomes.items() if k not in ("200", "429", "503")}
        found = {
            f"other outcomes {other}": bool(other),
            f"{self.overload.no_retry_after} without Retry-After": self.overload.no_retry_after,
            f"{self.overload.wrong} wrong answers": self.overload.wrong,
            f"{self.ratio:.2f} times the full queue's latency": self.ratio > MAX_RATIO,
            f"recovered after {self.recovery_s} s": (
                self.recovery_s is None or self.recovery_s > MAX_RECOVERY_S
            ),
        }
        return [what for what, is_missed in found.items() if is_missed]


# --- requests ------------------------------------------------------------------------------------


async def ask(address: tuple[str, int]) -> Outcome:
    """Ask the question on a connection of its own."""
    began, first_s, text, status, has_retry_after = time.monotonic(), None, "", "silent", False
    try:
        async with asyncio.timeout(TIMEOUT_S), await Connection.open(address) as made:
            await made.send(request("POST", CHAT, msgspec.json.encode(QUESTION)))
            code, headers = await made.head()
            has_retry_after = "retry-after" in headers
            if code not in (200, 429, 503):
                body = b"".join([part async for part in made.parts(headers)])[:200]
                status = f"{code} {body.decode(errors='replace')}"
                return Outcome(status, False, began, time.monotonic(), None, "")
            async for event in made.events(headers if code == 200 else {"content-length": "0"}):
                if event != b"[DONE]" and (piece := text_of(event)):
                    first_s = first_s or time.monotonic() - began
                    text += piece
            status = str(code)
    except TimeoutError:
        pass
    except ValueError as error:
        status = f"error in the stream: {error}"
    except OSError as error:
        status = failure_of(error)
    return Outcome(status, has_retry_after, began, time.monotonic(), first_s, text)


async def closed_loop(address: tuple[str, int], num_clients: int, seconds: float) -> list[Outcome]:
    """Return what became of the requests of clients that ask again as soon as they are answered.

    Each asks twice at least.
    """
    ends_at = time.monotonic() + seconds

    async def client() -> list[Outcome]:
        outcomes = [await ask(address), await ask(address)]
        while time.monotonic() < ends_at:
            outcomes.append(await ask(address))
        return outcomes

    found = await asyncio.gather(*(client() for _ in range(num_clients)))
    return [outcome for outcomes in found for outcome in outcomes]


async def open_loop(address: tuple[str, int], rate: float, seconds: float) -> list[Outcome]:
    """Return what became of requests that arrive at a rate, at random moments."""
    rng = random.Random(SEED)
    asked: list[asyncio.Task[Outcome]] = []
    began, at_s = time.monotonic(), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(began + at_s - time.monotonic())
        asked.append(asyncio.create_task(ask(address)))
    return await asyncio.gather(*asked)


async def recovery_s(address: tuple[str, int], unloaded: Phase) -> float | None:
    """Return after how many seconds a request is served as unloaded."""
    began = time.monotonic()
    while time.monotonic() < began + RECOVERY_LIMIT_S:
        outcome = await ask(address)
        if outcome.status == "200" and outcome.total_s <= SLACK * unloaded.total_s.p90:
            return outcome.began - began
        await asyncio.sleep(0.1)
    return None


# --- the run -------------------------------------------------------------------------------------


async def unloaded_phase(address: tuple[str, int]) -> tuple[Phase, str]:
    """Return what a single client sees, and the answer."""
    first = await ask(address)
    began = time.monotonic()
    outcomes = [await ask(address) for _ in range(NUM_UNLOADED)]
    return Phase.of(outcomes, time.monotonic() - began, first.text), first.text


async def full_queue_phase(
    address: tuple[str, int], num_places: int, seconds: float, text: str
) -> Phase:
    """Return what clients see that are as many as there are places."""
    found = await closed_loop(address, num_places, seconds)
    # Between its first answer and its last request the queue is full.
    full_from, full_to = min(each.ended for each in found), max(each.began for each in found)
    answered = [each for each in found if each.status == "200"]
    in_time = [each for each in answered if full_from <= each.ended <= full_to]
    if not in_time:
        raise SystemExit(f"full queue: wanted answers, found none from {num_places} clients")
    phase = Phase.of([each for each in found if each.began >= full_from], seconds, text)
    return msgspec.structs.replace(phase, per_second=len(in_time) / (full_to - full_from))


async def measure(app: DefaultApp, options: argparse.Namespace) -> Report:
    """Run the phases in order."""
    address = app.address
    num_places = options.max_num_seqs + options.max_queued_requests
    unloaded, text = await unloaded_phase(address)
    print_phase("unloaded", unloaded)
    full_queue = await full_queue_phase(address, num_places, options.seconds / 2, text)
    print_phase("full queue", full_queue)
    outcomes = await open_loop(address, options.times * full_queue.per_second, options.seconds)
    overload = Phase.of(outcomes, options.seconds, text)
    print_phase("overload", overload)
    last_arrival = max(each.began for each in outcomes)
    last_answer = max((each.ended for each in outcomes if each.status == "200"), default=0.0)
    return Report(
        machine=f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        arguments=list(arguments_of(options)),
        has_haproxy=options.haproxy,
        num_places=num_places,
        unloaded=unloaded,
        full_queue=full_queue,
        overload=overload,
        arrivals_per_second=len(outcomes) / options.seconds,
        times=options.times,
        ratio=overload.total_s.ratio(full_queue.total_s),
        drain_s=max(0.0, last_answer - last_arrival),
        recovery_s=await recovery_s(address, unloaded),
    )


def print_phase(name: str, phase: Phase) -> None:
    """Print a phase in a few lines."""
    counts = ", ".join(f"{count} x {status}" for status, count in sorted(phase.outcomes.items()))
    print(f"{name}: {counts} in {phase.seconds:.1f} s, {phase.per_second:.1f} answers a second")
    for what in ("first_token_s", "total_s", "refusal_s"):
        found: Latency = getattr(phase, what)
        print(f"  {what:14} p50 {found.p50:7.3f}  p90 {found.p90:7.3f}  p99 {found.p99:7.3f}")


def arguments_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the arguments of deploy."""
    limits = ("max_num_seqs", "max_queued_requests")
    return (*(f"{name}={getattr(options, name)}" for name in limits), *options.arguments)


def main() -> None:
    """Run and report; exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-queued-requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload")
    parser.add_argument("--times", type=float, default=10.0, help="the capacity")
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument(
        "--haproxy", action="store_true", help="behind HAProxy, not Ray's own proxy"
    )
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    with DefaultApp(arguments_of(options), has_haproxy=options.haproxy) as app:
        report = asyncio.run(measure(app, options))
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    never = report.recovery_s is None
    recovered = "never recovered" if never else f"recovered {report.recovery_s:.1f} s later"
    print(f"{report.arrivals_per_second:.1f} arrivals a second")
    print(f"{report.ratio:.2f} times the full queue's latency")
    print(f"drained {report.drain_s:.1f} s after the last arrival, {recovered}")
    failures = report.failures()
    print("FAIL " + "; ".join(failures) if failures else "PASS")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
