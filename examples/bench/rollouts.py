"""Roll changed arguments out and scale pools under streams, and report what the streams notice.

    python examples/bench/rollouts.py [--streams 1000] [--rollouts 3] [--steps 10] [--clients 32]

A Serve YAML with a prefill and a decode pool is deployed on a cluster of its own, and then again
and again with changes, as `serve deploy` does: other `args`, which replace every replica and the
ingress, or another `num_replicas` of a pool. Meanwhile clients stream without a break, in float32
and with seeds, at least `--streams` answers. A quarter of them ask by handle, from another Ray app,
as `examples/handle.py` does. Some answers have 1,900 tokens. Printed are, by change:

    settled  seconds until exactly those replicas were there that are wanted, and served
    pause    the longest pause of a stream, in seconds
    answers  that ended since the change before
    refused  requests that came while nothing could take them, and were told to come again
    lost     requests that ended without their answer
    wrong    answers that differ from those of the model in one process in any token

At the end: requests that failed, those of them that were cut, the longest pause and the longest
stream, and from the log of requests how many sequences moved between engines of one pool, how many
of them with their KV, and how many were computed again. Exit code 1 if a request failed, an answer
differs, or a stream paused for more than 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

from faults import wait_until
from faults_app import (
    LONG,
    QUESTIONS,
    App,
    Ask,
    Cluster,
    Load,
    Lost,
    Refused,
    deployed,
    over_http,
    right_answers,
    tokens_of,
)
from ray import serve as ray_serve

SHORT = ("seeded", "penalties", "grammar")
# Rows and blocks for every stream: one that waits for either pauses as well.
ARGS = {"dtype": "float32", "O": 0, "max_num_seqs": 64, "log_format": "json"}
ARGS |= {"kv_memory": "512MiB", "drain_timeout_s": 300}
CHANGES: tuple[dict[str, Any], ...] = (
    {"max_queue_wait_s": 90},
    {"max_num_seqs": 63},
    {"block_size": 32},
)
"""What is rolled out, in turn; KV does not fit what the last one makes, so streams stay."""
MAX_PAUSE_S = 5.0
RETRY_S = 1.0
POOLS = ("decode", "prefill")


@ray_serve.deployment(ray_actor_options={"num_cpus": 0.01}, max_ongoing_requests=1000)
class Asker:
    """Another app, which asks by a handle that it keeps."""

    def __init__(self, app: str) -> None:
        self._lockstep = ray_serve.get_app_handle(app).options(stream=True)

    async def ask(self, body: dict[str, Any]) -> Any:
        async for chunk in self._lockstep.stream_chat.remote(body):
            yield chunk


def by_handle(app: App) -> Ask:
    """Ask an application from another one."""
    asker = ray_serve.run(Asker.bind(app.name), name="asker", route_prefix=None)
    handle = asker.options(stream=True)

    def ask(body: dict[str, Any]) -> Iterator[list[int]]:
        try:
            for chunk in handle.ask.remote(body):
                yield tokens_of(chunk)
        except Lost:
            raise
        except Exception as error:  # of Ray, in many kinds
            if "RequestRefused: 503" in str(error):
                raise Refused(RETRY_S) from error
            raise Lost(f"by handle: {error}") from error

    return ask


class Rollouts:
    """An application that is changed while it is asked."""

    def __init__(self, app: App, load: Load) -> None:
        self._app, self._load = app, load
        self._args: dict[str, Any] = dict(ARGS)
        self._replicas = dict.fromkeys(POOLS, 1)
        self._num_rollouts = self._num_steps = 0
        self._num_answers = self._num_refused = 0
        self.longest_pause_s = 0.0
        """Up to the last change."""

    def roll_out(self) -> None:
        """Replace all replicas by those of changed arguments."""
        change = CHANGES[self._num_rollouts % len(CHANGES)]
        self._num_rollouts += 1
        self._args |= change
        self._change(" ".join(f"{key}={value}" for key, value in change.items()), is_rollout=True)

    def scale(self) -> None:
        """Add a replica to a pool, or take it away again; another pool's turn is next."""
        pool = POOLS[self._num_steps // 2 % len(POOLS)]
        self._replicas[pool] = 2 - self._num_steps % 2
        self._num_steps += 1
        self._change(f"{pool}: num_replicas={self._replicas[pool]}", is_rollout=False)

    def _change(self, what: str, *, is_rollout: bool) -> None:
        load = self._load
        load.wait_for(load.num_active)
        before, began = self._ids(), time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, load.longest_pause_s)
        load.longest_pause_s = 0.0
        self._app.deploy(self._args, deployments(self._replicas))
        wait_until(
            lambda: self._is_settled(before if is_rollout else set()),
            f"{what}: replicas {self._replicas}",
            pause_s=0.25,
            told=self._app.ready,
        )
        settled_s = time.monotonic() - began
        load.wait_for(load.num_active)
        num_answers, self._num_answers = load.num_answers - self._num_answers, load.num_answers
        num_refused, self._num_refused = load.num_refused - self._num_refused, load.num_refused
        print_row(
            *(what, settled_s, load.longest_pause_s, num_answers, num_refused),
            *(len(load.lost), len(load.wrong)),
        )

    def _ids(self) -> set[str]:
        _, body = self._app.ready()
        return {each["id"] for pool in POOLS for each in body["pools"][pool]["replicas"]}

    def _is_settled(self, gone: set[str]) -> bool:
        status, body = self._app.ready()
        return status == 200 and all(
            [each["state"] for each in body["pools"][pool]["replicas"]] == ["ready"] * wanted
            and gone.isdisjoint(each["id"] for each in body["pools"][pool]["replicas"])
            for pool, wanted in self._replicas.items()
        )


def deployments(replicas: dict[str, int]) -> list[dict[str, Any]]:
    """Return what stands below `deployments:`. Streams move where a replica's successor is there
    before it goes."""
    return [
        {"name": f"{pool.capitalize()}Pool", "num_replicas": number, "max_surge_percent": 100}
        for pool, number in replicas.items()
    ]


def moves(cluster: Cluster) -> tuple[int, int, int]:
    """Return how many sequences moved within a pool, how many with their KV, and how many were
    computed again, by the lines that ingresses have logged."""
    moved = with_kv = again = 0
    for log in cluster.logs.glob("worker-*.err"):
        for line in log.read_text(errors="replace").splitlines():
            if not (line.startswith("{") and '"engines"' in line):
                continue
            fields = json.loads(line)
            pools = [engine.partition("/")[0] for engine in fields["engines"].split(",")]
            again += fields["attempts"] > 1
            moved += len(pools) > len({*pools})
            with_kv += ("decode", "decode") in pairwise(pools) and fields["attempts"] == 1
    return moved, with_kv, again


WIDTHS = (28, 8, 6, 8, 8, 5, 6)


def print_row(*values: object) -> None:
    """Print a line of the table."""
    texts = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
    print(" ".join(map(str.ljust, texts, WIDTHS)).rstrip(), flush=True)


def plan(num_rollouts: int, num_steps: int) -> Iterator[bool]:
    """Yield whether the next change is a rollout; steps are spread evenly behind them."""
    for number in range(max(num_rollouts, 1)):
        if num_rollouts:
            yield True
        first, end = (i * num_steps // max(num_rollouts, 1) for i in (number, number + 1))
        for _ in range(first, end):
            yield False


def main() -> int:
    """Change the application while clients ask, and tell what they noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=1000, help="answers, at least")
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="replicas added and taken away")
    parser.add_argument("--clients", type=int, default=32, help="a quarter of them by handle")
    parser.add_argument(
        "--long", type=int, default=3, help="questions with a long answer, beside 18 others"
    )
    options = parser.parse_args()
    asked = [*product(QUESTIONS, SHORT), *product(QUESTIONS[: options.long], LONG)]
    began, right = time.monotonic(), right_answers(asked)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.clients} clients")
    print_row("change", "settled", "pause", "answers", "refused", "lost", "wrong")
    with (
        Cluster(has_dashboard=True) as cluster,
        deployed(cluster, "rollouts", ARGS, deployments(dict.fromkeys(POOLS, 1))) as app,
    ):
        wait_until(app.has_started, "the application to be ready", told=app.ready)
        ways = [over_http(app.url)] * 3 + [by_handle(app)]
        with Load([ways[i % 4] for i in range(options.clients)], right) as load:
            rollouts = Rollouts(app, load)
            for is_rollout in plan(options.rollouts, options.steps):
                rollouts.roll_out() if is_rollout else rollouts.scale()
            while load.num_answers < options.streams:
                load.wait_for(1)
        pause_s = max(rollouts.longest_pause_s, load.longest_pause_s)
        moved, with_kv, again = moves(cluster)
    print(f"{load.num_answers} answers, {len(load.lost)} failed, {load.num_cut} of them cut")
    print(f"{len(load.wrong)} differ from those of the model in one process")
    print(f"longest pause {pause_s:.1f} s, longest stream {load.longest_s:.1f} s")
    print(f"{moved} sequences moved, {with_kv} with their KV; {again} computed again")
    print(f"{time.monotonic() - began:.0f} s")
    for text in (*load.lost, *load.wrong):
        print(text[:500])
    return 1 if load.lost or load.wrong or pause_s > MAX_PAUSE_S else 0


if __name__ == "__main__":
    raise SystemExit(main())
