"""Progress of a start: lines of the ingress's log, with counts and times."""

from __future__ import annotations

from typing import Any

from serve.readiness import LINE_PERIOD_S, StartLog


def loading(done: int, total: int, elapsed_s: float, remaining_s: float | None) -> dict[str, Any]:
    times = {"elapsed_s": elapsed_s, "remaining_s": remaining_s}
    return {"what": "mixed: compiling", "done": done, "total": total, **times}


def test_a_start_says_what_it_does_every_few_seconds_and_each_change_at_once() -> None:
    now, said = 10.0, list[str]()
    log = StartLog(said.append, clock=lambda: now)

    def see(status: str, *entries: dict[str, Any], compiling: bool = False) -> list[str]:
        said.clear()
        log.see({"status": status, "compiling": compiling, "loading": list(entries)})
        return said

    two_ranks = loading(3, 7, 2.0, 8.4), loading(2, 7, 4.0, None)
    assert see("loading", *two_ranks) == ["loading, 0 s: mixed: compiling 2/7 (2 ranks) for 4 s"]
    now += LINE_PERIOD_S - 1
    assert see("loading", *two_ranks) == []
    now += 1
    assert see("loading", loading(3, 7, 9.0, 8.4)) == [
        "loading, 5 s: mixed: compiling 3/7 for 9 s, about 8 s to go"
    ]
    assert see("ready", loading(4, 7, 9.0, None), compiling=True) == [
        "serves after 5.0 s, and compiles meanwhile"
    ]
    now += LINE_PERIOD_S
    assert see("ready", loading(5, 7, 9.0, None), compiling=True) == [
        "compiling while it serves, 10 s: mixed: compiling 5/7 for 9 s"
    ]
    assert see("ready") == ["ready after 10.0 s"]
    now += 100
    assert see("degraded", loading(0, 1, 0.0, None)) == ["degraded, 0 s: mixed: compiling for 0 s"]
