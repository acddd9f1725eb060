"""`serve run` ends with the reason why a pool cannot start, and with exit code 1.

Ray's command prints a trace of its own and ends with code 0. So the process that started the
application looks for what its pools have noted (`cluster/actors/kept.py`): at its end,
and each second while it lives, since an application that serves while it compiles may turn out
later to be one that no start can compile. It is interrupted then, as by Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import ray

from cluster.actors.kept import FailedStart, FailedStarts

LOOK_PERIOD_S = 1.0
"""How often pools' failures are looked for."""
CONNECT_PERIOD_S = 0.1
"""How often it is looked for Ray: before any pool can have failed, failures of an earlier
application with the same arguments are forgotten."""


class StartWatch:
    """Looks for failed starts of one deployment, for as long as this process lives."""

    def __init__(self, config_hash: str, pools: Sequence[str]) -> None:
        """Watch these pools."""
        self._failed = FailedStarts(config_hash)
        self._pools = pools

    def forget(self) -> None:
        """Forget what was noted, since the deployment is made anew."""
        for pool in self._pools:
            self._failed.forget(pool)

    def start(self) -> None:
        """Begin, on a thread of its own; it waits for Ray."""
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """At this process's end: if a pool has failed, end with the reason and exit code 1."""
        if not ray.is_initialized() or not (found := self._found()):
            return
        logging.shutdown()
        ray.shutdown()  # so that nothing is written behind the reason
        sys.stdout.flush()
        print(found[0].reason, file=sys.stderr, flush=True)
        os._exit(1)  # nothing else changes the exit code that Ray's command has chosen

    def _watch(self) -> None:
        while not ray.is_initialized():
            time.sleep(CONNECT_PERIOD_S)
        with suppress(Exception):  # Ray may end at any time, in ways of its own
            self.forget()
            while not any(failed.is_final for failed in self._found()):
                time.sleep(LOOK_PERIOD_S)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _found(self) -> list[FailedStart]:
        """Return the failures that are noted, final ones first."""
        found = [failed for pool in self._pools if (failed := self._failed.of(pool)) is not None]
        return sorted(found, key=lambda failed: not failed.is_final)
