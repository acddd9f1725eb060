"""How a start goes on, in lines of the ingress's log: what `/ready` has as `loading`.

Ray brings that log to the console of `serve run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LINE_PERIOD_S = 5.0
"""How often a line is logged while something loads."""


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


class StartLog:
    """What is said of an application that starts, rebuilds a group or compiles while it serves."""

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
        """Say what `/ready`'s body has, if that is due."""
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
