"""What `/ready` and `/health` answer, from what the status board said last. Ready: all ingresses
serve, and of every pool as many replicas as there always are. Degraded: some are missing, and the
rest serves. What a pool has beyond its fewest may load, drain or rebuild. Nothing here does I/O;
times are given to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from cluster.actors.reports import OUTDATED, num_in, num_ready
from cluster.config import PLACEMENT_TIMEOUT_S
from cluster.observe.load_progress import LoadProgress
from serve.config import DeployConfig, PoolConfig

log = logging.getLogger("lockstep.ingress")

STALE_S = 5.0
"""What the board said longer ago no longer counts."""
LEAVING = ("draining", OUTDATED)
OWNING_PLACES = ("ready", "restarting", "stuck")
"""States of replicas that serve, or do again within seconds."""
LINE_PERIOD_S = 5.0
"""How often a line is logged while something loads."""


class Readiness:
    def __init__(self, config: DeployConfig, ingress_id: str, now: float) -> None:
        nothing: dict[str, Any] = {"pools": {}, "ingresses": [], "loading": []}
        self.body: dict[str, Any] = {"status": "loading", "compiling": False, **nothing}
        """Of `/ready`."""
        self.has_tokenizer = False
        self._config = config
        self._ingress_id = ingress_id
        self._is_draining = False
        self._complete_at = self._heard_at = now
        """When all replicas and the tokenizer were there last; before that, the start."""
        self._late_at = self._complain_at = now + PLACEMENT_TIMEOUT_S

    @property
    def takes_requests(self) -> bool:
        return self.has_tokenizer and not self._is_draining

    @property
    def is_anyone_ready(self) -> bool:
        """Whether an ingress has loaded, this one or another."""
        return any(ingress["state"] == "ready" for ingress in self.body["ingresses"])

    @property
    def speaks(self) -> bool:
        """Whether what concerns all is logged here: by the ingress that came first."""
        ingresses = self.body["ingresses"]
        return not ingresses or ingresses[0]["id"] == self._ingress_id

    @property
    def num_live_elsewhere(self) -> int:
        ingresses = self.body["ingresses"]
        return sum(each["num_live"] for each in ingresses if each["id"] != self._ingress_id)

    @property
    def num_live(self) -> int:
        """Replicas of the last pool that have places for sequences; at least one."""
        pool = self.body["pools"].get(self._config.pools[-1].name, _NO_POOL)
        return max(1, num_in(pool, OWNING_PLACES))

    def failure(self) -> str:
        """Return which pool hangs or is gone, and why; empty if none."""
        pools = self.body["pools"].items()
        found = (f"{name} pool: {error}" for name, pool in pools if (error := _why_down(pool)))
        return next(found, "")

    def drain(self) -> None:
        self._is_draining = True
        self.body = {**self.body, "status": "draining"}

    def elapsed_s(self, now: float) -> float:
        return now - self._complete_at

    def are_pools_late(self, body: dict[str, Any], now: float) -> bool:
        """Return whether replicas have been missing for so long that it is told what they want."""
        return now > self._late_at and any(
            _num_placed(body, pool.name) < _fewest(body, pool) for pool in self._config.pools
        )

    def see(
        self, body: dict[str, Any], free: Mapping[str, float], now: float, *, is_board_new: bool
    ) -> bool:
        """Take what the board says of all; return whether that is news. A board that is new may not
        have heard of all yet. `free`: the cluster's resources that are not reserved, where pools
        are late."""
        self._heard_at = now
        missing = self._missing(body, free, now)
        if missing and is_board_new and self.body["status"] != "loading":
            return False  # nothing here has changed
        states = {ingress["state"] for ingress in body["ingresses"]}
        status = body["status"]
        if "ready" not in states:
            status = "loading"
        elif status == "ready" and (missing or "loading" in states or self._lacks_any(body)):
            status = "degraded"
        if self._is_draining:
            status = "draining"
        self.body = {**body, "status": status, "loading": body["loading"] + missing}
        return True

    def see_silence(self, now: float) -> None:
        if now - self._heard_at > STALE_S and self.body["status"] == "ready":
            what = f"status board: wanted an answer, found none for {STALE_S:g} s"
            loading = [self._awaited(what, now)]
            self.body = {**self.body, "status": "degraded", "loading": loading}

    def _lacks_any(self, body: dict[str, Any]) -> bool:
        return any(
            num_ready(body["pools"].get(pool.name, _NO_POOL)) < _fewest(body, pool)
            for pool in self._config.pools
        )

    def _missing(
        self, body: dict[str, Any], free: Mapping[str, float], now: float
    ) -> list[dict[str, Any]]:
        """Tell of what has fewer replicas than wanted; after a while also what they wait for."""
        missing: list[dict[str, Any]] = []
        if (there := len(body["ingresses"])) < (wanted := self._config.num_ingresses):
            missing.append(self._awaited("ingress: replicas", now, there, wanted))
        is_late = self.are_pools_late(body, now)
        for pool in self._config.pools:
            wanted = _fewest(body, pool)
            if (placed := _num_placed(body, pool.name)) >= wanted:
                continue
            what = f"{pool.name}: replicas"
            if is_late:
                bundles = pool.placement.bundles(pool.engine.parallel)
                labels = pool.placement.label_selector
                on = f" on nodes with {labels}" if labels else ""
                how = f"{bundles}{on} by {pool.placement.strategy}"
                what += f" not placed: each wanted {how}, found free {dict(free)}"
                if now > self._complain_at and self.speaks:
                    self._complain_at = now + PLACEMENT_TIMEOUT_S
                    log.error("%s", what)
            missing.append(self._awaited(what, now, placed, wanted, pool=pool.name))
        if not missing:
            self._late_at = now + PLACEMENT_TIMEOUT_S
            if self.has_tokenizer:
                self._complete_at = now
        return missing

    def _awaited(
        self, what: str, now: float, done: int = 0, total: int = 1, pool: str | None = None
    ) -> dict[str, Any]:
        """Return an entry of `loading` for what no rank does, since all there was."""
        progress = LoadProgress(what, done, total, self.elapsed_s(now))
        return {**asdict(progress), "pool": pool, "replica": None}


_NO_POOL: dict[str, Any] = {"replicas": []}


def _fewest(body: dict[str, Any], pool: PoolConfig) -> int:
    """Return how many replicas a pool always has. Serve's configuration may say so after us."""
    scaling = body["pools"].get(pool.name, _NO_POOL).get("scaling")
    return int(scaling["least"]) if scaling else pool.min_replicas


def _num_placed(body: dict[str, Any], pool: str) -> int:
    replicas = body["pools"].get(pool, _NO_POOL)["replicas"]
    return sum(replica["state"] not in LEAVING for replica in replicas)


def _why_down(pool: dict[str, Any]) -> str:
    """Return why a pool serves nobody and will not do so by itself soon; empty if it does. None of
    its replicas serves, and one has failed, or its watchdog called a step of it stuck."""
    replicas = [replica for replica in pool["replicas"] if replica["state"] != OUTDATED]
    if any(replica["state"] == "ready" for replica in replicas):
        return ""
    down = [each for each in replicas if each["state"] == "failed" or each.get("stuck")]
    return str(down[0].get("error") or "no rank serves") if down else ""


def summary(loading: list[dict[str, Any]]) -> str:
    """Return one line; ranks that do the same share a part, which tells of the last of them."""
    by_what: dict[str, list[dict[str, Any]]] = {}
    for entry in loading:
        by_what.setdefault(entry["what"], []).append(entry)
    return "; ".join(_part(what, entries) for what, entries in by_what.items())


def _part(what: str, entries: list[dict[str, Any]]) -> str:
    last = min(entries, key=lambda entry: entry["done"] / max(entry["total"], 1))
    elapsed_s = max(entry["elapsed_s"] for entry in entries)
    ranks = f" ({len(entries)} ranks)" if len(entries) > 1 else ""
    counts = f" {last['done']}/{last['total']}" if last["total"] > 1 else ""
    remaining_s = last["remaining_s"]
    left = f", about {remaining_s:.0f} s to go" if remaining_s else ""
    return f"{what}{counts}{ranks} for {elapsed_s:.0f} s{left}"


def scaled(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each pool that is scaled to another number of replicas since."""
    lines = []
    for name, pool in after["pools"].items():
        now, then = pool.get("scaling"), before["pools"].get(name, _NO_POOL).get("scaling")
        if now and then and now["wanted"] != then["wanted"]:
            signals = ", ".join(
                f"{key} {value:.4g}" for key, value in {**now["load"], **now["signals"]}.items()
            )
            step = f"{then['wanted']} to {now['wanted']} replicas ({now['why']})"
            lines.append(f"{name} pool: {step}: {signals}")
    return lines


class StartLog:
    """What is logged of an application that starts, rebuilds a group or compiles while it serves.
    Ray brings the ingress's log to the console of `serve run`."""

    def __init__(
        self,
        write: Callable[[str], None],
        period_s: float = LINE_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Say it to `write`: at most one line in `period_s`, and each change of the state."""
        self._write = write
        self._period_s = period_s
        self._clock = clock
        self._began_at = clock()
        self._wrote_at = self._began_at - period_s
        self._state = "loading"

    def see(self, body: dict[str, Any]) -> None:
        is_compiling = body["status"] == "ready" and body["compiling"]
        state = "compiling" if is_compiling else body["status"]
        now = self._clock()
        if state != self._state:
            self._change(state, now)
        if body["loading"] and now - self._wrote_at >= self._period_s:
            self._wrote_at = now
            verb = "compiling while it serves" if is_compiling else body["status"]
            self._write(f"{verb}, {now - self._began_at:.0f} s: {summary(body['loading'])}")

    def _change(self, state: str, now: float) -> None:
        took = f"after {now - self._began_at:.1f} s"
        if state == "ready":
            self._write(f"ready {took}")
        elif state == "compiling" and self._state != "ready":
            self._write(f"serves {took}, and compiles meanwhile")
        if self._state == "ready":  # what comes now takes a time of its own
            self._began_at = now
        self._state = state
