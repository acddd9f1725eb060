"""What an attacked server shows: to an honest client, on `/health`, in memory and processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
import psutil
from default_app import DefaultApp
from hostile_target import CHAT
from raw_http import Answer, Connection, ask, request

HEALTH_PERIOD_S = 0.1
MEMORY_PERIOD_S = 0.05
NOISE_PERIOD_S = 0.01
TIMEOUT_S = 60.0
"""Of an honest stream; nothing that is measured here takes as long."""
HEALTH_TIMEOUT_S = 10.0
SPARE_SHARE = 0.3
"""Cores that may be busy beside what the honest client costs."""
RECOVERY_S = 30.0
"""How long the first right answer behind an attack is waited for."""

HONEST = {
    "messages": [{"role": "user", "content": "Count from 1 to 99."}],
    "temperature": 0,
    "seed": 7,
    "max_tokens": 1000,
    "ignore_eos": True,
    "stream": True,
}
"""Long, so that tokens are on their way at nearly every moment."""
ORDINARY = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
ORDINARY_ANSWER = "42"


class Longest:
    """The longest of some waits that follow one another, the one that still lasts included."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._since: float | None = None

    def reset(self) -> None:
        """Forget what was; a wait that lasts counts from now on."""
        self._longest_s = 0.0
        if self._since is not None:
            self._since = time.monotonic()

    def begin(self) -> None:
        """Begin a wait, after the end of the one before."""
        self.end()
        self._since = time.monotonic()

    def end(self) -> None:
        """End the wait, if there is one."""
        self._longest_s, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        """The longest so far."""
        lasts_s = 0.0 if self._since is None else time.monotonic() - self._since
        return max(self._longest_s, lasts_s)


class HonestSeen(msgspec.Struct):
    """What the honest client saw."""

    answers: int = 0
    wrong: int = 0
    refused: int = 0
    broken: int = 0
    """Streams that broke off, or ended in an error."""
    token_gap_s: float = 0.0
    first_token_s: float = 0.0
    """From a request to its first token, the longest."""


class Honest:
    """A client that asks for the same long answer over and over; it has to stay the first one."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._seen = HonestSeen()
        self._between = Longest()
        self._before_first = Longest()
        self._text: str | None = None

    def reset(self) -> None:
        """Begin to count anew."""
        self._seen = HonestSeen()
        self._between.reset()
        self._before_first.reset()

    def seen(self) -> HonestSeen:
        """Return what was seen since the last reset."""
        gaps = {
            "token_gap_s": self._between.seconds,
            "first_token_s": self._before_first.seconds,
        }
        return msgspec.structs.replace(self._seen, **gaps)

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._ask()
            except (OSError, ValueError, KeyError, msgspec.MsgspecError):
                self._seen.broken += 1
                await asyncio.sleep(HEALTH_PERIOD_S)
            finally:
                self._between.end()
                self._before_first.end()

    async def _ask(self) -> None:
        self._before_first.begin()
        async with await Connection.open(self._address) as made:
            await made.send(request("POST", CHAT, msgspec.json.encode(HONEST)))
            status, headers = await made.head()
            if status in (429, 503):
                self._seen.refused += 1
                self._before_first.end()
                await asyncio.sleep(float(headers.get("retry-after", 1)))
                return
            if status != 200:
                raise ValueError(f"status {status}")
            self._judge("".join([text async for text in self._texts(made, headers)]))

    async def _texts(self, made: Connection, headers: dict[str, str]) -> AsyncIterator[str]:
        has_ended = False
        async for event in made.events(headers):
            if event == b"[DONE]":
                has_ended = True
            elif text := text_of(event):
                self._before_first.end()
                self._between.begin()
                yield text
        self._between.end()
        if not has_ended:
            raise ValueError("the stream broke off")

    def _judge(self, text: str) -> None:
        self._seen.answers += 1
        if self._text is None:
            self._text = text
        self._seen.wrong += text != self._text


def text_of(event: bytes) -> str:
    """Return the text of a chunk of a conversation; one that tells of an error is a ValueError."""
    chunk = msgspec.json.decode(event)
    if "error" in chunk:
        raise ValueError(chunk["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


class HealthSeen(msgspec.Struct):
    """What `/health` answered."""

    polls: int = 0
    failed: int = 0
    latency_s: float = 0.0
    """The longest."""


class Health:
    """Asks `/health` ten times a second, on a new connection each time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._seen = HealthSeen()
        self._latency = Longest()

    def reset(self) -> None:
        """Begin to count anew."""
        self._seen = HealthSeen()
        self._latency.reset()

    def seen(self) -> HealthSeen:
        """Return what was seen since the last reset."""
        return msgspec.structs.replace(self._seen, latency_s=self._latency.seconds)

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._latency.begin()
            is_well = await self._ask()
            self._latency.end()
            self._seen.polls += 1
            self._seen.failed += not is_well
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def _ask(self) -> bool:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return (await ask(self._address, "GET", "/health")).status == 200
        return False


class Processes:
    """The application's processes, and the private memory that they hold.

    Memory that is shared does not count: KV is, and is held from the start on.
    """

    def __init__(self, app: DefaultApp) -> None:
        self._app = app
        self._found: dict[str, list[psutil.Process]] = {}
        self._before: dict[str, int] = {}
        self._most: dict[str, int] = {}

    def reset(self) -> None:
        """Begin to count anew."""
        self._found = self._app.processes()
        self._before = self._bytes()
        self._most = dict(self._before)

    def growth_bytes(self) -> dict[str, int]:
        """Return by role how much more memory there was at the most than at the last reset."""
        return {role: most - self._before[role] for role, most in self._most.items()}

    def restarted(self) -> list[str]:
        """Return the processes that are gone since the last reset, or new, by role and number."""
        now = {(role, p.pid) for role, found in self._app.processes().items() for p in found}
        before = {(role, p.pid) for role, found in self._found.items() for p in found}
        return [f"{role} {pid}" for role, pid in sorted(now ^ before)]

    def cpu_s(self) -> float:
        """Return the seconds of processors that all of them have used so far."""
        return sum(_cpu_s(process) for found in self._found.values() for process in found)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            for role, found in self._bytes().items():
                self._most[role] = max(self._most.get(role, 0), found)
            await asyncio.sleep(MEMORY_PERIOD_S)

    def _bytes(self) -> dict[str, int]:
        return {role: sum(map(_own_bytes, found)) for role, found in self._found.items()}


def _own_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0
    return int(memory.rss - getattr(memory, "shared", 0))


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


class Noise:
    """How late the machine wakes a process that has nothing else to do."""

    def __init__(self) -> None:
        self.late_s = 0.0

    def reset(self) -> None:
        """Begin to count anew."""
        self.late_s = 0.0

    async def run(self) -> None:
        """Sleep again and again until cancelled."""
        while True:
            asked = time.monotonic()
            await asyncio.sleep(NOISE_PERIOD_S)
            self.late_s = max(self.late_s, time.monotonic() - asked - NOISE_PERIOD_S)


class Seen(msgspec.Struct, frozen=True):
    """What was seen between two moments."""

    honest: HonestSeen
    health: HealthSeen
    loop_gap_s: float | None
    """The longest that the ingress's event loop did not turn; None where it does not tell."""
    noise_s: float
    """The most by which the watching process itself was woken late."""
    growth_bytes: dict[str, int]
    restarted: list[str]


class Watch:
    """Watches an application from the beginning of its block on."""

    def __init__(self, app: DefaultApp) -> None:
        self._app = app
        self._honest = Honest(app.address)
        self._health = Health(app.address)
        self._processes = Processes(app)
        self._noise = Noise()
        self._tasks: list[asyncio.Task[None]] = []
        self._idle_share = 0.0

    async def __aenter__(self) -> Watch:
        self._processes.reset()
        running = (self._honest, self._health, self._processes, self._noise)
        self._tasks = [asyncio.create_task(each.run()) for each in running]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begin(self) -> None:
        """Forget what was seen so far."""
        self._processes.reset()
        await self._loop_gap_s()
        self._honest.reset()
        self._health.reset()
        self._noise.reset()

    async def seen(self) -> Seen:
        """Return what was seen since `begin`."""
        if failed := [task for task in self._tasks if task.done()]:
            failed[0].result()
        return Seen(
            honest=self._honest.seen(),
            health=self._health.seen(),
            loop_gap_s=await self._loop_gap_s(),
            noise_s=self._noise.late_s,
            growth_bytes=self._processes.growth_bytes(),
            restarted=self._processes.restarted(),
        )

    async def settle(self) -> None:
        """Wait for the honest client's first answers, and learn what they cost."""
        async with asyncio.timeout(2 * TIMEOUT_S):
            while self._honest.seen().answers < 2:
                await asyncio.sleep(HEALTH_PERIOD_S)
        self._idle_share = max([await self._cpu_share() for _ in range(3)])

    async def recovery_s(self) -> float | None:
        """Return after how many seconds an ordinary request is answered right, or None."""
        began = time.monotonic()
        while time.monotonic() < began + RECOVERY_S:
            with suppress(OSError, TimeoutError, ValueError, KeyError):
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + RECOVERY_S):
                    answer = await self._post(msgspec.json.encode(ORDINARY))
                if answer.status == 200:
                    is_right = _content(answer) == ORDINARY_ANSWER
                    return time.monotonic() - began if is_right else None
            await asyncio.sleep(HEALTH_PERIOD_S)
        return None

    async def calm(self, limit_s: float) -> bool:
        """Wait until nothing is left of what was asked before; return whether that came true.

        Then `/health` is quick, ranks hold no more than the honest client's sequence, and the
        processes compute hardly more than they did for it alone.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self._health.reset()
            share = await self._cpu_share()
            is_quick = self._health.seen().latency_s < HEALTH_PERIOD_S
            is_idle = share < self._idle_share + SPARE_SHARE
            if is_quick and is_idle and await asyncio.to_thread(self._app.num_held) <= 2:
                return True
        return False

    async def _cpu_share(self) -> float:
        """Return how many cores the processes have kept busy for a second."""
        before, began = self._processes.cpu_s(), time.monotonic()
        await asyncio.sleep(1)
        return (self._processes.cpu_s() - before) / (time.monotonic() - began)

    async def _post(self, body: bytes) -> Answer:
        return await ask(self._app.address, "POST", CHAT, body)

    async def _loop_gap_s(self) -> float | None:
        with suppress(OSError, TimeoutError, ValueError, KeyError):
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                answer = await ask(self._app.address, "GET", "/debug/ingress")
            if answer.status == 200:
                return float(msgspec.json.decode(answer.body)["loop_gap_s"])
        return None


def _content(answer: Answer) -> str:
    return str(msgspec.json.decode(answer.body)["choices"][0]["message"]["content"])
