"""A pool that Ray Serve scales while the load rises and falls, in real time.

    python examples/bench/scaling_live.py [--minutes 15] [--period 5]

A mixed pool of one or two replicas, of four sequences each, is asked by as many clients as a wave
of `--period` minutes says: at its foot one, who rests between two requests, at its crest ten. After
the time only that one is left, until the pool is at its least again. Printed is for each decision:

    at       seconds since the load began
    step     from how many replicas to how many, and why
    clients  that asked then
    decided  seconds since there were so many clients, or so few, that another number was needed
    done     seconds from the decision until the new replica served, or the one that went was gone

At the end: answers, and requests that were refused, failed, or answered with other tokens than the
model in one process generates. Exit code 1 if there was one, or if the pool never grew and shrank.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

from faults import wait_until
from faults_app import App, Cluster, Load, over_http, right_answers, run_app

ROWS = 4
"""Sequences of a replica."""
MOST_CLIENTS = 10
REST_S = 5.0
"""Between two requests at the foot of a wave, so that one replica has little to do."""
LOOK_S = 0.25
ARGUMENTS = ("pools=mixed", "dtype=float32", "O=0", "kv_memory=64MiB", f"max_num_seqs={ROWS}")
# Queue and rows decide: the targets are far from any step that a busy machine may take.
ARGUMENTS += ("mixed.max_replicas=2", "ttft_target_s=60", "tpot_target_s=60")
ARGUMENTS += ("scale_down_after_s=30", "drain_timeout_s=300")


def clients_at(now_s: float, period_s: float) -> int:
    """Return how many clients ask at a time."""
    return 1 + round((MOST_CLIENTS - 1) * math.sin(math.pi * now_s / period_s) ** 2)


class Watch:
    """Looks at a pool and prints a row for each decision once it has been carried out."""

    def __init__(self, app: App, load: Load) -> None:
        self._app, self._load = app, load
        self._began = time.monotonic()
        self._is_high = False
        self._turned_at = 0.0
        """When the load last passed what one replica can run."""
        self._open: tuple[float, float, int, str] | None = None
        """Of a decision that is not carried out: when, after how long, for how many, and what."""
        self._wanted = 1
        self.steps: list[int] = []
        """To which numbers of replicas it went."""

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began

    def look(self) -> bool:
        """Return whether the pool is at its least, and nothing is on its way."""
        now, num_clients = self.now_s, self._load.num_active
        if (num_clients > ROWS) != self._is_high:
            self._is_high, self._turned_at = not self._is_high, now
        _, body = self._app.get("/status")
        pool: dict[str, Any] = body.get("pools", {}).get("mixed", {})
        scaling, states = pool.get("scaling"), [each["state"] for each in pool.get("replicas", [])]
        if scaling and scaling["wanted"] != self._wanted:
            step = f"{self._wanted} to {scaling['wanted']} ({scaling['why']})"
            self._wanted = scaling["wanted"]
            self.steps.append(self._wanted)
            self._print_step("not done")
            self._open = now, now - self._turned_at, num_clients, step
        is_done = states == ["ready"] * self._wanted
        if is_done and self._open:
            self._print_step(f"{now - self._open[0]:.1f}")
        return is_done and self._wanted == 1

    def _print_step(self, done: str) -> None:
        if self._open:
            at, after_s, num_clients, step = self._open
            print_row(f"{at:.0f}", step, num_clients, f"{after_s:.1f}", done)
        self._open = None


def print_row(*values: object) -> None:
    """Print a line of the table."""
    widths = (6, 16, 8, 8, 8)
    print(" ".join(str(v).ljust(n) for v, n in zip(values, widths, strict=True)), flush=True)


def main() -> int:
    """Let the load rise and fall, and tell what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--period", type=float, default=5.0, help="minutes of one wave")
    options = parser.parse_args()
    period_s = 60 * min(options.period, options.minutes)
    right = right_answers()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.minutes:g} minutes")
    with Cluster() as cluster, run_app(cluster, "scaled", ARGUMENTS) as app:
        wait_until(app.has_started, "the application to be ready", told=app.ready)
        print_row("at", "step", "clients", "decided", "done")
        load = Load([over_http(app.url)] * MOST_CLIENTS, right)
        load.num_active, load.rest_s = 1, REST_S
        with load:
            watch = Watch(app, load)
            while watch.now_s < 60 * options.minutes:
                load.num_active = clients_at(watch.now_s, period_s)
                load.rest_s = REST_S if load.num_active == 1 else 0.0
                watch.look()
                time.sleep(LOOK_S)
            load.num_active, load.rest_s = 1, REST_S
            wait_until(watch.look, "one replica", pause_s=LOOK_S, told=app.ready)
    num_errors = load.num_refused + len(load.lost) + len(load.wrong)
    print(f"{load.num_answers} answers, {load.num_refused} refused, {len(load.lost)} failed")
    print(f"{len(load.wrong)} wrong; longest pause {load.longest_pause_s:.1f} s")
    for text in (*load.lost, *load.wrong):
        print(text[:500])
    return 0 if not num_errors and {1, 2} <= {*watch.steps} else 1


if __name__ == "__main__":
    raise SystemExit(main())
