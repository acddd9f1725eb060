"""A start that fails for good interrupts `serve run`, also where SIGINT is ignored."""

from __future__ import annotations

import signal
import time

import pytest
import ray

from cluster.actors.gcs_store import FailedStart
from serve import app
from serve.app import StartWatch


class Failed:
    """The notes of pools of which each has failed for good."""

    def __init__(self, config_hash: str) -> None:
        self._failed = FailedStart("CannotCompile: no", is_final=True)

    def forget(self, pool: str) -> None:
        pass

    def of(self, pool: str) -> FailedStart:
        return self._failed


@pytest.mark.feature("R01")
@pytest.mark.parametrize("is_ignored", [False, True], ids=["terminal", "background of a script"])
def test_a_start_that_fails_for_good_ends_the_process(
    is_ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FailedStarts", Failed)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    wanted = signal.SIG_IGN if is_ignored else signal.default_int_handler
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, wanted),
        signal.SIGUSR1: signal.getsignal(signal.SIGUSR1),
    }
    try:
        with pytest.raises(KeyboardInterrupt):
            StartWatch("hash", ["mixed"]).start()
            time.sleep(10)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
