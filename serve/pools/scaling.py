"""How many replicas a pool should have, and the policy through which Ray Serve asks.

1. A thread of the policy reads the status board twice a second. `Meter` makes `Signals` of what
   leaders have counted since.
2. `load_of` expresses them in replicas: how many would just keep the targets. It does not depend
   on how many there are, or else each step would give a reason for its opposite.
3. `decide` goes up at once where that is more than there are, those that start included, and down
   by one where one less has clearly been enough for a while.

Serve's controller calls the policy ten times a second between everything else that it does, and an
error there would keep applications from being deployed. So nothing here waits, and nothing raises.
The controller gets this module by value and may not have Lockstep installed: only the standard
library and ray are used, and of other modules only constants.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.serve.config import AutoscalingContext

from cluster.actors.status_board import BOARD_PREFIX, NAMESPACE
from serve.arguments import DeployArgs

log = logging.getLogger("ray.serve")
"""Serve's own, which the controller writes to its file."""

PERIOD_S = 0.5
"""How often the board is read."""
ANSWER_S = 3.0
"""How long it may take to answer."""
STALE_S = 5.0
"""What it said longer ago is no news."""
WINDOW_S = 30.0
"""The time over which rates are taken. Shorter ones take the chance of arrivals for a change."""
LEAST_WINDOW_S = 10.0
"""At first, too. A step counts once it has ended, so in a shorter time all of a long one would."""
STEPS_KEPT_S = 600.0
"""How long step times count."""
START_S = 30.0
"""How long a replica is taken to load until one has."""

LOW = 0.85
"""A replica goes where the load stays below this share of what one less should have."""
COOL_DOWN_S = DeployArgs().scale_down_after_s
"""For how long it has to, where nothing else is said."""
MAX_TIMES = 8
"""How much longer it may take, if steps down turn out wrong."""
MAX_BUSY = 0.65
"""The share of the time in which a replica may compute prompts: at more they wait for one another
longer than they compute."""
MAX_WAIT = 0.5
"""The share of its target that a queue may take before another replica is asked for."""
MAX_FULL = 0.9
"""The share of the rows or KV blocks of a replica that may be in use: their number varies."""

REBUILDING = ("restarting", "stuck", "failed")


@dataclass(frozen=True)
class Signals:
    """What a pool has to do. Sums over all its replicas, where nothing else is said."""

    num_ready: int
    num_draining: int
    num_rebuilding: int
    """Replicas whose rank group has ended or does not answer."""
    ttft_target_s: float
    tpot_target_s: float
    start_s: float
    """How long a replica took to load last."""
    prompts_busy: float = 0.0
    """Replicas that prompts kept busy, on average over `WINDOW_S`."""
    queued_s: float = 0.0
    """How long one replica would take to compute the prompts that wait."""
    decode_tokens_per_s: float = 0.0
    num_rows: int = 0
    """Sequences that decode or wait for that."""
    rows_at_target: float = math.inf
    """Those that one replica decodes within the target and has KV for."""
    step_s_at_target: float = 0.0
    """How long its step takes with so many."""


class Load(NamedTuple):
    """A pool's load in replicas: those with which it would just keep its targets."""

    steady: float
    """For what arrives."""
    surge: float
    """For what arrives and is there, with what waits worked off by when another replica could
    come."""
    late: float
    """For what waits to be worked off well within the target; so many may come too late for it."""


def load_of(signals: Signals) -> Load:
    """Return a pool's load. A replica that computes prompts and decodes divides its time."""
    busy = signals.prompts_busy / MAX_BUSY
    backlog_s = max(signals.ttft_target_s, signals.start_s)
    rows = MAX_FULL * signals.rows_at_target
    # The rate of tokens is the clients'. Rows follow from how long steps take, so from the number
    # of replicas too.
    decoding = signals.decode_tokens_per_s * signals.step_s_at_target / rows
    return Load(
        busy + decoding,
        busy + signals.queued_s / backlog_s + signals.num_rows / rows,
        signals.queued_s / (MAX_WAIT * signals.ttft_target_s),
    )


@dataclass(frozen=True)
class Memory:
    """What `decide` knows of its earlier calls."""

    calm_since: float | None = None
    """Since when one replica less has been enough."""
    times: int = 1
    """How many times the cool-down has to last."""
    changed_at: float = -math.inf
    went_down: bool = False
    """By the last change."""


@dataclass(frozen=True)
class Decision:
    wanted: int
    why: str
    """In a word; empty where nothing changes."""


def decide(
    signals: Signals,
    n: int,
    now: float,
    *,
    least: int,
    most: int,
    memory: Memory,
    cool_down_s: float = COOL_DOWN_S,
) -> tuple[Decision, Memory]:
    """Return how many replicas a pool should have that is to have `n`, those that start included,
    and what to remember.

    - Up as soon as the load exceeds `n`, to what it asks for. Where only the queue is too long for
      its target, by one, and once all `n` serve.
    - Down by one, after the load has been at most `LOW` of n - 1 for `cool_down_s`. Not while a
      replica drains or rebuilds. While one starts, only if those that serve would be enough: one
      that cannot be placed does not keep a pool large, and Serve takes it first.
    - So after a step up the load must have fallen by `1 - LOW` before a step down, and the reverse:
      a load that varies by less than that, or not at all, only ever moves it in one direction. If
      the load depends on the number after all, each step down that has to be undone soon doubles
      the cool-down, up to `MAX_TIMES` as long.
    - Always within `least` and `most`, and never fewer for a higher load.
    """
    load = load_of(signals)
    asked = math.ceil(min(max(load.steady, load.surge), most))
    is_late = load.late > n and signals.num_ready >= n
    wanted = min(max(asked, n + is_late, least), most)
    if wanted != n:
        why = "bounds" if not least <= n <= most else "load" if asked > n else "queue"
        return Decision(wanted, why), _changed(memory, now, cool_down_s, is_up=wanted > n)
    cool_down_s *= memory.times
    if now - memory.changed_at > 4 * cool_down_s:
        memory = replace(memory, times=1)
    is_settled = not signals.num_draining and not signals.num_rebuilding and signals.num_ready <= n
    enough = LOW * min(n - 1, signals.num_ready)
    if not is_settled or n <= least or max(load) > enough:
        return Decision(n, ""), replace(memory, calm_since=None)
    since = now if memory.calm_since is None else memory.calm_since
    if now - since < cool_down_s:
        return Decision(n, ""), replace(memory, calm_since=since)
    return Decision(n - 1, "calm"), _changed(memory, now, cool_down_s, is_up=False)


def _changed(memory: Memory, now: float, cool_down_s: float, *, is_up: bool) -> Memory:
    times = memory.times
    if is_up and memory.went_down and now - memory.changed_at < 2 * cool_down_s * times:
        times = min(2 * times, MAX_TIMES)
    return Memory(None, times, now, went_down=not is_up)


class StepTimes:
    """How long a decode step takes by its rows: a straight line through what was measured, of which
    newer steps count more. (The weights are read once a step, and KV once a row.)"""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Weights, and with them rows, their squares, seconds, and rows times seconds."""
        self._most_rows = 0.0
        self._at = 0.0

    def add(self, rows: float, seconds: float, now: float) -> None:
        kept = math.exp(min(0.0, self._at - now) / STEPS_KEPT_S)
        new = (1.0, rows, rows * rows, seconds, rows * seconds)
        self._sums = tuple(  # type: ignore[assignment]
            kept * old + each for old, each in zip(self._sums, new, strict=True)
        )
        self._most_rows, self._at = max(self._most_rows, rows), now

    def rows_within(self, target_s: float, most: float) -> tuple[float, float]:
        """Return how many rows a step may have, and how long it then takes. At least one, and at
        most twice as many as any had: further the line has not been tried."""
        weight, rows, squares, seconds, products = self._sums
        if not weight:
            return most, target_s
        rows, seconds = rows / weight, seconds / weight
        spread = squares / weight - rows * rows
        row_s = seconds / rows
        if spread > 1e-6 * rows * rows:
            row_s = min(max((products / weight - rows * seconds) / spread, 0.0), row_s)
        rest_s = seconds - row_s * rows
        within = min(most, 2 * self._most_rows)
        if row_s:
            within = min(within, (target_s - rest_s) / row_s)
        within = max(1.0, within)
        return within, rest_s + row_s * within


class _Sums(NamedTuple):
    """What has been counted since the policy began, by all engines that were there."""

    prompts_s: float = 0.0
    decode_tokens: float = 0.0
    first_tokens: float = 0.0


class Meter:
    """Turns what the board says of a pool into `Signals`."""

    def __init__(self) -> None:
        self.steps = StepTimes()
        self._last: Mapping[str, Mapping[str, Any]] = {}
        """By engine: what it had counted."""
        self._last_first_tokens: float | None = None
        self._sums = _Sums()
        self._window: deque[tuple[float, _Sums]] = deque()
        self._loading_since: dict[str, float] = {}
        self._start_s = START_S
        self._prompt_s = 0.0
        """How long an engine takes for a sequence's prompt."""
        self._row_blocks = 0.0

    def see(self, told: Mapping[str, Any], now: float) -> Signals:
        """Take `StatusBoard.scale`'s answer."""
        targets, engines = told["targets"], told["engines"]
        states = [*told["replicas"].values()]
        self._see_starts(told["replicas"], now)
        self._see_counts(engines, told["first_tokens"], now)
        began_at, began = self._window[0]
        passed_s = max(now - began_at, LEAST_WINDOW_S)
        prompts_s, decode_tokens, first_tokens = (
            new - old for new, old in zip(self._sums, began, strict=True)
        )
        if first_tokens >= 1 and prompts_s:
            self._prompt_s = prompts_s / first_tokens
        loads = [engine["load"] for engine in engines.values()]
        num_running = sum(load["num_running"] for load in loads)
        num_waiting = sum(load["num_waiting"] for load in loads)
        is_decoder, is_prefiller = (told["pool"] == name for name in ("decode", "prefill"))
        num_rows = num_running + num_waiting if is_decoder else num_running
        num_engines = targets["data_parallel_size"]
        most = min(targets["max_num_seqs"], self._rows_with_kv(loads, num_running))
        within, step_s = self.steps.rows_within(targets["tpot_target_s"], most)
        return Signals(
            num_ready=states.count("ready"),
            num_draining=states.count("draining"),
            num_rebuilding=sum(state in REBUILDING for state in states),
            ttft_target_s=targets["ttft_target_s"],
            tpot_target_s=targets["tpot_target_s"],
            start_s=self._start_s,
            prompts_busy=prompts_s / num_engines / passed_s,
            queued_s=0.0 if is_decoder else num_waiting * self._prompt_s / num_engines,
            decode_tokens_per_s=0.0 if is_prefiller else decode_tokens / passed_s,
            num_rows=0 if is_prefiller else num_rows,
            rows_at_target=num_engines * within,
            step_s_at_target=step_s,
        )

    def _see_starts(self, replicas: Mapping[str, str], now: float) -> None:
        for replica_id, state in replicas.items():
            if state == "loading":
                self._loading_since.setdefault(replica_id, now)
            elif (since := self._loading_since.pop(replica_id, None)) and state == "ready":
                self._start_s = now - since
        for replica_id in [*self._loading_since]:
            if replica_id not in replicas:
                del self._loading_since[replica_id]

    def _see_counts(
        self, engines: Mapping[str, Mapping[str, Any]], first_tokens: float, now: float
    ) -> None:
        prompts_s, decode_tokens, firsts = self._sums
        for name, engine in engines.items():
            counts = engine["counts"]
            if (last := self._last.get(name)) is None:
                continue  # what it counted before may have been long ago
            grown = {key: max(0.0, value - last.get(key, 0.0)) for key, value in counts.items()}
            prompts_s += grown["prompt_step_seconds"]
            tokens = grown["tokens"] - grown["prompt_tokens"]
            decode_tokens += max(0.0, tokens)
            if grown["decode_steps"] and tokens > 0 and not grown["prompt_steps"]:
                num_steps = grown["decode_steps"]
                self.steps.add(tokens / num_steps, grown["decode_step_seconds"] / num_steps, now)
        self._last = {name: engine["counts"] for name, engine in engines.items()}
        if self._last_first_tokens is not None:
            firsts += max(0.0, first_tokens - self._last_first_tokens)
        self._last_first_tokens = first_tokens
        self._sums = _Sums(prompts_s, decode_tokens, firsts)
        self._window.append((now, self._sums))
        while len(self._window) > 2 and self._window[1][0] <= now - WINDOW_S:
            self._window.popleft()

    def _rows_with_kv(self, loads: list[Mapping[str, int]], num_running: int) -> float:
        """Return for how many sequences of the present length an engine has blocks."""
        num_blocks = sum(load["num_blocks"] for load in loads)
        num_used = num_blocks - sum(load["num_free_blocks"] for load in loads)
        if num_running and num_used:
            self._row_blocks = num_used / num_running
        if not self._row_blocks or not num_blocks:
            return math.inf
        return max(1.0, num_blocks / len(loads) / self._row_blocks)


@dataclass
class _News:
    """What a policy and its reader's thread share. Each attribute is replaced whole."""

    stop: threading.Event
    signals: Signals | None = None
    at: float = -math.inf
    decided: dict[str, Any] | None = None
    """What the board is told, for those who look at it."""


def _read(app_name: str, deployment_name: str, news: _News) -> None:
    """Read the board until the policy has gone."""
    pool, meter, board = deployment_name.removesuffix("Pool").lower(), Meter(), None
    while not news.stop.wait(PERIOD_S):
        try:
            if board is None:
                board = ray.get_actor(BOARD_PREFIX + app_name, namespace=NAMESPACE)
            told = ray.get(board.scale.remote(pool, news.decided), timeout=ANSWER_S)
            if told["targets"] is not None:
                news.signals, news.at = meter.see(told, time.monotonic()), time.monotonic()
        except Exception as error:  # whatever it was, there may be a board again
            log.debug("%s: wanted what the status board says, found %s", deployment_name, error)
            board = None


class ScalingPolicy:
    """What Serve calls for a deployment that is scaled; made anew when its bounds change."""

    def __init__(self, cool_down_s: float = COOL_DOWN_S) -> None:
        self._cool_down_s = cool_down_s
        self._news = _News(threading.Event())
        self._memory = Memory()
        self._is_reading = False
        weakref.finalize(self, self._news.stop.set)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be: as many as there are to be, if nothing new is
        known."""
        n = context.target_num_replicas
        try:
            self._start_reading(context)
            return self._decide(context, n, time.monotonic()), {}
        except Exception:
            log.exception("%s: keeps %d replicas", context.deployment_name, n)
            return n, {}

    def _start_reading(self, context: AutoscalingContext) -> None:
        if not self._is_reading:
            self._is_reading = True
            args = (context.app_name, context.deployment_name, self._news)
            threading.Thread(target=_read, args=args, name="lockstep-scaling", daemon=True).start()

    def _decide(self, context: AutoscalingContext, n: int, now: float) -> int:
        news = self._news
        least = context.capacity_adjusted_min_replicas
        most = context.capacity_adjusted_max_replicas
        signals = news.signals
        if signals is None or now - news.at > STALE_S:
            self._memory = replace(self._memory, calm_since=None)
            return n
        decision, self._memory = decide(
            signals,
            n,
            now,
            least=least,
            most=most,
            memory=self._memory,
            cool_down_s=self._cool_down_s,
        )
        told = {"wanted": decision.wanted, "least": least, "most": most}
        told |= {"load": load_of(signals)._asdict(), "signals": asdict(signals)}
        if decision.wanted != n:
            told |= {"was": n, "why": decision.why}
            log.info("%s: %s", context.deployment_name, told)
        elif news.decided is not None:
            told |= {"was": news.decided["was"], "why": news.decided["why"]}
        else:
            told |= {"was": n, "why": ""}
        news.decided = told
        return decision.wanted
