"""Strike the ranks of running applications, one after the other, and report what comes of it.

    python examples/bench/faults.py [--only tp-plan dp-decode pd capture-tp diverge-dp ...]

Each application serves the bundled model in float32 to clients that stream without a break. A rank
is killed, stopped, or made to disagree at a known place of a step (`fault_injection.py`), or
struck once `/ready` tells that its group captures graphs. Where a pool has two replicas, under
`--clients` clients, these are struck `--times` times each:

    replicas   leaders and replicas' own processes, at any time
    transfers  a read of KV over TCP: its link is cut, its holder or its reader killed
    followers  followers of two ranks a replica, at any time
    nodes      a node with a replica of each pool: its raylet is killed, or it is drained

Printed are, by strike:

    named    seconds until `/ready` named the rank
    serves   seconds until the group served again
    pause    the longest pause of a stream, in seconds
    answers  that ended since the strike before
    refused  requests that came while a pool was rebuilt, and were told to come again
    lost     requests that ended without their answer
    wrong    answers that differ from those of the model in one process in any token
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fault_injection import Action, Fault, Place, arm_actor
from faults_app import HEAD, App, Asked, Cluster, Load, deployed, over_http, right_answers, run_app

from cluster.actors.status_board import NAMESPACE, board_name
from cluster.wire.group_messages import StepDigest
from cluster.wire.messages import StepAgreement

TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Target:
    """One rank of one pool."""

    pool: str
    dp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"{self.pool} dp={self.dp_rank} tp={self.tp_rank}"

    def find(self, replica: dict[str, Any]) -> dict[str, Any]:
        """Return the rank's figures of its replica's."""
        place = (self.dp_rank, self.tp_rank)
        [rank] = [r for r in replica["ranks"] if (r["dp_rank"], r["tp_rank"]) == place]
        return dict(rank)


@dataclass(frozen=True)
class Strike:
    """A fault that has struck."""

    target: Target
    what: str
    place: str
    rank: dict[str, Any]
    """As `/ready` described it before."""
    began: float
    """By the monotonic clock."""
    replica_id: str = ""
    """Empty for any, where there is one."""
    step: int | None = None
    """None outside a step."""

    def is_named(self, error: str) -> bool:
        """Return whether an error names the rank and, for a divergence, step and field."""
        epoch, target = self.rank["epoch"], self.target
        if f"rank dp={target.dp_rank} tp={target.tp_rank} epoch={epoch}" not in error:
            return False
        if self.step is None or not self.what.startswith(Action.DIVERGE.value):
            return True
        found = re.search(r" step (\d+): (\w+): wanted .*, found ", error)
        # An altered step is named as what it was altered to.
        steps = (self.step, self.step + 1)
        return found is not None and int(found[1]) in steps and found[2] == self.what.split()[1]


class Stage:
    """A loaded application that is struck again and again. Between two strikes each client's
    request ends, so that each meets new ones: one that is lost three times fails."""

    def __init__(self, app: App, load: Load) -> None:
        self.app = app
        self.load = load
        self._num_answers = self._num_refused = 0

    def strike(self, target: Target, place: Place, action: Action, field: str = "") -> None:
        """Arm a rank, wait until it fails and until its group serves again; print a row."""

        self.load.wait_for_each()
        replica = self._replica(target.pool)
        step, began = self._arm(target, replica, place, action, field)
        what, rank = f"{action.value} {field}".strip(), target.find(replica)
        strike = Strike(target, what, place.value, rank, began, replica["id"], step)
        self._await_restart(strike)

    def cut_link(self, target: Target) -> None:
        """Cut the link over which a rank reads KV; nothing ends with it."""
        self.load.wait_for_each()
        self._arm(target, self._replica(target.pool), Place.KV, Action.CUT)
        self.load.wait_for_each()
        self._print(target, Action.CUT.value, Place.KV.value, "", "", "")

    def strike_in_capture(self, target: Target, action: Action) -> None:
        """Let a group be rebuilt, and strike a rank while it captures its graphs."""
        self.load.wait_for_each()
        self.load.longest_pause_s = 0.0
        os.kill(target.find(self._replica(target.pool))["pid"], signal.SIGKILL)
        wait_until(lambda: self._replica(target.pool).get("error"), "the first strike to be named")
        self._await_restart(strike_in_capture(self.app, target, action))

    def strike_beside_another(self, target: Target, action: Action) -> None:
        """Strike a rank at any time, while another replica of its pool serves."""
        self.load.wait_for_each()
        replica = self._replica(target.pool)
        rank = target.find(replica)
        self.load.longest_pause_s, began = 0.0, time.monotonic()
        os.kill(rank["pid"], getattr(signal, action.value))
        self._await_restart(Strike(target, action.value, "any", rank, began, replica["id"]))

    def strike_owner(self, pool: str) -> None:
        """Kill a replica's own process, whose ranks end with it; Serve starts another replica."""
        self.load.wait_for_each()
        before = self._ids(pool)
        self.load.longest_pause_s, began = 0.0, time.monotonic()
        os.kill(
            pid_of(f"ray::ServeReplica:{self.app.name}:{pool.capitalize()}Pool"), signal.SIGKILL
        )
        self._await_replacement({pool: before}, f"{pool} owner", "SIGKILL", began)

    def strike_node(self, is_drained: bool) -> None:
        """Drain the oldest node, beside one that is to replace it, or kill its raylet, and then
        add one. It goes when its replicas have."""
        cluster = self.app.cluster
        node = next(iter(cluster.nodes))
        self.load.wait_for_each()
        before = {pool: self._ids(pool) for pool in POOLS}
        if is_drained:
            cluster.add_node(ROOM)
        self.load.longest_pause_s, began = 0.0, time.monotonic()
        if is_drained:
            cluster.drain_node(node, TIMEOUT_S)
        else:
            cluster.kill_node(node)
            cluster.add_node(ROOM)
        what = "drain" if is_drained else "raylet SIGKILL"
        self._await_replacement(before, "node", what, began)
        if is_drained:
            cluster.kill_node(node)

    def _await_replacement(
        self, before: dict[str, set[str]], target: str, what: str, began: float
    ) -> None:
        """Wait until one replica of each pool has gone and another one serves; print a row."""

        def is_replaced() -> bool:
            status, _ = self.app.ready()
            found = {pool: self._ids(pool) for pool in before}
            return status == 200 and all(
                len(found[pool]) == len(ids) and found[pool] != ids for pool, ids in before.items()
            )

        wait_until(is_replaced, f"{target}: other replicas", told=lambda: self.app.ready())
        serves_s = time.monotonic() - began
        self.load.wait_for_each()
        self._print(target, what, "any", "", serves_s, "")

    def check_leaks(self) -> None:
        """Print what ranks hold once nothing runs; the prefix cache counts as free."""

        def held() -> dict[str, int]:
            _, body = self.app.ready()
            ranks = [
                rank
                for pool in body["pools"].values()
                for replica in pool["replicas"]
                for rank in replica["ranks"]
            ]
            return {
                "blocks": sum(rank["num_blocks"] - rank["num_free_blocks"] for rank in ranks),
                "handoffs": sum(rank["num_handoffs"] for rank in ranks),
                "requests": sum(rank["num_running"] + rank["num_waiting"] for rank in ranks),
            }

        wait_until(lambda: not any(held().values()), "that nothing is held", told=held)
        print("leaked", held(), flush=True)

    def _await_restart(self, strike: Strike) -> None:
        named, named_s, epoch = "", 0.0, strike.rank["epoch"]

        def has_restarted() -> bool:
            nonlocal named, named_s
            status, body = self.app.ready()
            if not status or not body["pools"][strike.target.pool]["replicas"]:
                return False  # on a machine that is too busy to tell
            replicas = body["pools"][strike.target.pool]["replicas"]
            [replica] = [each for each in replicas if strike.replica_id in ("", each["id"])]
            error = replica.get("error", "")
            if not named and f"epoch={epoch}" in error:
                named, named_s = error, time.monotonic() - strike.began
            return status == 200 and {r["epoch"] for r in replica["ranks"]} == {epoch + 1}

        wait_until(has_restarted, f"{strike.target} to serve again")
        serves_s = time.monotonic() - strike.began
        self.load.wait_for_each()
        told_of = told(strike, named)
        self._print(strike.target, strike.what, strike.place, named_s, serves_s, told_of)

    def _print(
        self,
        target: object,
        what: str,
        place: str,
        named_s: float | str,
        serves_s: float | str,
        told_of: str,
    ) -> None:
        load = self.load
        num_answers, self._num_answers = load.num_answers - self._num_answers, load.num_answers
        num_refused, self._num_refused = load.num_refused - self._num_refused, load.num_refused
        print_row(
            self.app.what,
            target,
            what,
            place,
            named_s,
            serves_s,
            load.longest_pause_s,
            num_answers,
            num_refused,
            len(load.lost),
            len(load.wrong),
            told_of,
        )

    def _arm(
        self, target: Target, replica: dict[str, Any], place: Place, action: Action, field: str = ""
    ) -> tuple[int, float]:
        """Arm a rank, wait until its fault strikes, and return the step and the time."""
        with tempfile.TemporaryDirectory() as directory:
            note = Path(directory, "note")
            self.load.longest_pause_s = 0.0
            arm_actor(self._actor(target, replica), Fault(place, action, str(note), field))
            wait_until(note.exists, f"{target} to come to {place.value}")
            step, began = note.read_text().split()
        return int(step), float(began)

    def _replicas(self, pool: str) -> list[dict[str, Any]]:
        _, body = self.app.ready()
        return list(body["pools"][pool]["replicas"]) if body else []

    def _ids(self, pool: str) -> set[str]:
        return {replica["id"] for replica in self._replicas(pool)}

    def _replica(self, pool: str) -> dict[str, Any]:
        return next(each for each in self._replicas(pool) if each["ranks"])

    def _actor(self, target: Target, replica: dict[str, Any]) -> Any:
        """Return the handle of a rank, which the application's board knows."""
        import ray

        board = ray.get_actor(board_name(self.app.name), namespace=NAMESPACE)
        actors = ray.get(board.actors.remote())[target.pool][replica["id"]]
        return actors[replica["ranks"].index(target.find(replica))]


def strike_in_capture(app: App, target: Target, action: Action) -> Strike:
    """Wait until the target's group has captured a graph and wants more, and strike."""
    found: list[dict[str, Any]] = []

    def is_capturing() -> bool:
        _, body = app.ready()
        what = f"{target.pool}: capturing graphs"
        done = [each for each in body.get("loading", []) if each["what"] == what]
        if done and 0 < done[0]["done"] < done[0]["total"]:
            [replica] = body["pools"][target.pool]["replicas"]
            found.append(target.find(replica))
        return bool(found)

    wait_until(is_capturing, f"{target} to capture", pause_s=0.01)
    began = time.monotonic()
    os.kill(found[0]["pid"], getattr(signal, action.value))
    return Strike(target, action.value, "capture", found[0], began)


def told(strike: Strike, error: str) -> str:
    """Return what was reported of a strike: the first sentence of Ray's account of a death."""
    is_gone = not Path(f"/proc/{strike.rank['pid']}").exists()
    parts = ["" if strike.is_named(error) else "NOT NAMED", "" if is_gone else "STILL THERE"]
    return " ".join([*filter(None, parts), error.split(". ")[0]])


def pid_of(name: str) -> int:
    """Return a process that Ray has named so, or longer."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cmdline").read_text().startswith(name):
                return int(process.name)
    raise SystemExit(f"wanted a process {name}, found none")


def wait_until(
    is_done: Callable[[], object],
    what: str,
    pause_s: float = 0.1,
    told: Callable[[], object] = lambda: "that it has not",
) -> None:
    """Wait for something to become true; end the program when it does not."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise SystemExit(f"wanted {what} in {TIMEOUT_S:g} s, found {told()}")
        time.sleep(pause_s)


# --- the table ----------------------------------------------------------------------------------

COLUMNS = (
    *("group", "rank", "strike", "in", "named", "serves", "pause"),
    *("answers", "refused", "lost", "wrong", "what /ready said"),
)
WIDTHS = (10, 17, 28, 8, 6, 7, 6, 8, 8, 5, 6, 0)


def print_row(*values: object) -> None:
    """Print a line of the table."""
    texts = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
    cells = [text.ljust(width) for text, width in zip(texts, WIDTHS, strict=True)]
    print(" ".join(cells).rstrip(), flush=True)


# --- the groups ---------------------------------------------------------------------------------

COMMON = ("dtype=float32", "O=0", "kv_memory=64MiB", "max_num_seqs=8")
MIXED = ("pools=mixed", "compilation.cudagraph_mode=FULL_DECODE_ONLY")
MANY_GRAPHS = "compilation.cudagraph_capture_sizes=[1,2,3,4,5,6,7,8]"


@dataclass(frozen=True)
class Group:
    """A mixed pool of one group, and those of its ranks that are struck."""

    name: str
    argument: str
    ranks: tuple[Target, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """What `deploy` is told."""
        return (*COMMON, *MIXED, self.argument)


TP = Group(
    "tp 2 mixed", "mixed.tensor_parallel_size=2", (Target("mixed", 0, 0), Target("mixed", 0, 1))
)
DP = Group(
    "dp 2 mixed", "mixed.data_parallel_size=2", (Target("mixed", 0, 0), Target("mixed", 1, 0))
)
TP_4 = Group("tp 4 mixed", "mixed.tensor_parallel_size=4", (Target("mixed", 0, 0),))
RIGHT: dict[Asked, tuple[int, ...]] = {}
"""The right answers, from `main` on."""


@contextmanager
def stage(starting: AbstractContextManager[App], num_clients: int = 4) -> Iterator[Stage]:
    """Start an application and its load, and end both; nothing may be left of what ran."""
    with starting as app:
        wait_until(app.has_started, "the application to be ready")
        with Load([over_http(app.url)] * num_clients, RIGHT) as load:
            struck = Stage(app, load)
            yield struck
        struck.check_leaks()


def strike_steps(group: Group, place: Place, cluster: Cluster) -> None:
    """Kill and stop each rank in a prefill, in a decode or in a plan's transfer."""
    with stage(run_app(cluster, group.name, group.arguments)) as struck:
        for target in group.ranks:
            for action in (Action.KILL, Action.STOP):
                struck.strike(target, place, action)


def tear_plans(cluster: Cluster) -> None:
    """Strike a leader that has sent a plan to two of its three followers."""
    with stage(run_app(cluster, TP_4.name, TP_4.arguments)) as struck:
        for action in (Action.KILL, Action.STOP):
            struck.strike(TP_4.ranks[0], Place.PLAN, action)


def strike_pools(cluster: Cluster) -> None:
    """Strike a prefill and a decode rank, in steps and while KV is on its way."""
    prefill, decode = Target("prefill", 0, 0), Target("decode", 0, 0)
    with stage(run_app(cluster, "pd 1 + 1", COMMON)) as struck:
        for action in (Action.KILL, Action.STOP):
            struck.strike(prefill, Place.PREFILL, action)
            struck.strike(decode, Place.DECODE, action)
            struck.strike(prefill, Place.KV, action)
            struck.strike(decode, Place.KV, action)


POOLS = ("prefill", "decode")
PD_2 = (*COMMON, "prefill.replicas=2", "decode.replicas=2", "max_num_seqs=32")
TP_2 = (*COMMON, *MIXED, "mixed.replicas=2", "mixed.tensor_parallel_size=2", "max_num_seqs=32")


def strike_replicas(cluster: Cluster, times: int, num_clients: int) -> None:
    """Strike leaders, and replicas' own processes, where another replica serves."""
    with stage(run_app(cluster, "pd 2 + 2", PD_2), num_clients) as struck:
        for _ in range(times):
            for pool in POOLS:
                for action in (Action.KILL, Action.STOP):
                    struck.strike_beside_another(Target(pool, 0, 0), action)
                struck.strike_owner(pool)


def strike_transfers(cluster: Cluster, times: int, num_clients: int) -> None:
    """Strike both ends of a read of KV over a socket, and the link between them."""
    prefill, decode = (Target(pool, 0, 0) for pool in POOLS)
    arguments = (*PD_2, "kv.transport=tcp")
    with stage(run_app(cluster, "pd tcp", arguments), num_clients) as struck:
        for _ in range(times):
            struck.cut_link(decode)
            struck.strike(prefill, Place.KV, Action.KILL)
            struck.strike(decode, Place.KV, Action.KILL)


def strike_followers(cluster: Cluster, times: int, num_clients: int) -> None:
    """Strike followers where another replica serves."""
    with stage(run_app(cluster, "tp 2 x 2", TP_2), num_clients) as struck:
        for _ in range(times):
            for action in (Action.KILL, Action.STOP):
                struck.strike_beside_another(Target("mixed", 0, 1), action)


ROOM = {"prefill": 1.0, "decode": 1.0}
"""What a node has, so that it holds one replica of each pool."""


def strike_nodes(cluster: Cluster, times: int, num_clients: int) -> None:
    """Strike nodes that hold a replica of each pool, where another such node serves."""
    bundle = {"CPU": 0.01}
    deployments: list[dict[str, Any]] = [
        {
            "name": f"{pool.capitalize()}Pool",
            "placement_group_bundles": [{**bundle, pool: 0.5}] * 2,
        }
        for pool in POOLS
    ]
    near = {"num_cpus": 0.01, "resources": {HEAD: 1}}
    deployments.append({"name": "Ingress", "ray_actor_options": near})
    for _ in range(2):
        cluster.add_node(ROOM)
    args = dict(each.split("=") for each in PD_2)
    with stage(deployed(cluster, "pd nodes", args, deployments), num_clients) as struck:
        for _ in range(times):
            for is_drained in (False, True):
                struck.strike_node(is_drained)
    for node in [*cluster.nodes]:
        cluster.kill_node(node)


def strike_captures(group: Group, cluster: Cluster) -> None:
    """Strike ranks that capture: in a first start, which Serve repeats, and in restarts."""
    arguments = (*group.arguments, MANY_GRAPHS)
    with run_app(cluster, group.name, arguments) as app:
        await_second_start(app, strike_in_capture(app, group.ranks[1], Action.KILL))
    with stage(run_app(cluster, group.name, arguments)) as struck:
        for action in (Action.KILL, Action.STOP):
            for target in group.ranks:
                struck.strike_in_capture(target, action)


def await_second_start(app: App, strike: Strike) -> None:
    """Wait until an application that was struck in its first start serves; print a row."""
    named, named_s = "", 0.0

    def is_ready() -> bool:
        nonlocal named, named_s
        status, body = app.ready()
        for replica in body.get("pools", {}).get(strike.target.pool, {}).get("replicas", []):
            if not named and replica.get("error"):
                named, named_s = replica["error"], time.monotonic() - strike.began
        return status == 200

    wait_until(is_ready, "the application to be ready")
    serves_s = time.monotonic() - strike.began
    with Load([over_http(app.url)] * 4, RIGHT) as load:
        load.wait_for_each()
    print_row(
        app.what,
        strike.target,
        f"{strike.what} in the first start",
        strike.place,
        named_s,
        serves_s,
        "",
        load.num_answers,
        load.num_refused,
        len(load.lost),
        len(load.wrong),
        told(strike, named),
    )


def diverge_leaders(cluster: Cluster) -> None:
    """Alter each field of what a leader agreed on with its peer."""
    with stage(run_app(cluster, DP.name, DP.arguments)) as struck:
        for number, field in enumerate(StepAgreement.__struct_fields__):
            struck.strike(DP.ranks[number % 2], Place.DECODE, Action.DIVERGE, field)


def diverge_followers(cluster: Cluster) -> None:
    """Alter each part of a follower's digest."""
    with stage(run_app(cluster, TP.name, TP.arguments)) as struck:
        for field in StepDigest.__struct_fields__:
            struck.strike(TP.ranks[1], Place.DECODE, Action.DIVERGE, field)


REPEATED: dict[str, Callable[[Cluster, int, int], None]] = {
    "replicas": strike_replicas,
    "transfers": strike_transfers,
    "followers": strike_followers,
    "nodes": strike_nodes,
}
SLICES: dict[str, Callable[[Cluster], None]] = {
    "tp-prefill": partial(strike_steps, TP, Place.PREFILL),
    "tp-decode": partial(strike_steps, TP, Place.DECODE),
    "tp-plan": partial(strike_steps, TP, Place.PLAN),
    "dp-prefill": partial(strike_steps, DP, Place.PREFILL),
    "dp-decode": partial(strike_steps, DP, Place.DECODE),
    "dp-plan": partial(strike_steps, DP, Place.PLAN),
    "tp4-plan": tear_plans,
    "pd": strike_pools,
    "capture-tp": partial(strike_captures, TP),
    "capture-dp": partial(strike_captures, DP),
    "diverge-tp": diverge_followers,
    "diverge-dp": diverge_leaders,
}


def main() -> None:
    """Run the slices that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*SLICES, *REPEATED]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--times", type=int, default=3, help="how often replicas are struck")
    parser.add_argument("--clients", type=int, default=32, help="of those")
    arguments = parser.parse_args()
    slices = arguments.only
    RIGHT.update(right_answers())
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}: {', '.join(slices)}")
    print_row(*COLUMNS)
    with Cluster(has_dashboard="nodes" in slices) as cluster:
        for name in slices:
            if name in REPEATED:
                REPEATED[name](cluster, arguments.times, arguments.clients)
            else:
                SLICES[name](cluster)


if __name__ == "__main__":
    main()
