"""How a start goes on, in lines of the ingress's log: what `/ready` has as `loading`.

Ray brings that log to the console of `serve run`. On a terminal `OneLine` draws these lines over
one another there; a pipe or a file gets each of them.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

LINE_PERIOD_S = 5.0
"""How often a line is logged while something loads."""
VERBS = ("loading", "degraded", "compiling while it serves")
"""How such a line begins."""
PROGRESS = re.compile(rf"lockstep\.ingress: ((?:{'|'.join(VERBS)}), \d+ s: .*)")
CLEAR = "\r\x1b[2K"
"""Back to the start of a terminal's line, which is emptied."""


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
        """Say it to `write`: at most one line in `period_s`, but for changes of the state."""
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


class OneLine:
    """A terminal whose progress lines are drawn over one another, below everything else.

    Invariant: what is written to its streams reaches the terminal unchanged and in order, but for
    progress lines; and none of those is on the screen together with another one.
    """

    def __init__(self) -> None:
        """Begin with nothing drawn."""
        self._lock = threading.RLock()
        self._is_drawn = False
        self._is_at_start = True
        """Whether the last text ended with its line."""

    def stream(self, terminal: TextIO) -> OneLineStream:
        """Return what stands in for one of the terminal's streams."""
        return OneLineStream(self, terminal)

    def write(self, text: str, terminal: TextIO) -> None:
        """Write text, in which a progress line stands whole."""
        with self._lock:
            for line in text.splitlines(keepends=True):
                found = PROGRESS.search(line) if self._is_at_start else None
                if found:
                    width = shutil.get_terminal_size().columns
                    terminal.write(CLEAR + found[1][: width - 1])
                    terminal.flush()
                    self._is_drawn = True
                elif line == "\n" and self._is_drawn:
                    pass  # `print` writes the end of a progress line by itself
                else:
                    self._clear(terminal)
                    terminal.write(line)
                    self._is_at_start = line.endswith("\n")

    def _clear(self, terminal: TextIO) -> None:
        if self._is_drawn:
            terminal.write(CLEAR)
        self._is_drawn = False


class OneLineStream:
    """Stands in for `sys.stdout` or `sys.stderr`."""

    def __init__(self, line: OneLine, terminal: TextIO) -> None:
        self._line = line
        self._terminal = terminal

    def write(self, text: str) -> int:
        """Write to the terminal; return how many characters were given."""
        self._line.write(text, self._terminal)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


def draw_on_terminal() -> None:
    """Draw progress on one line of this process's terminal, where both of its streams go there."""
    if isinstance(sys.stdout, OneLineStream) or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return
    line = OneLine()
    stand_ins = {each: line.stream(each) for each in (sys.stdout, sys.stderr)}
    sys.stdout, sys.stderr = stand_ins[sys.stdout], stand_ins[sys.stderr]
    # Ray Serve's logger, among others, took hold of the stream when it was set up.
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):  # a placeholder in the tree has none
            if isinstance(handler, logging.StreamHandler) and handler.stream in stand_ins:
                handler.setStream(stand_ins[handler.stream])
