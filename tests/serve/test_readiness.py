"""What `/ready` and `/health` answer to what the status board says."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import PLACEMENT_TIMEOUT_S
from serve.config import deploy_config
from serve.readiness import LINE_PERIOD_S, STALE_S, Readiness, StartLog, scaled


def replica(state: str, **more: Any) -> dict[str, Any]:
    return {"id": "r", "state": state, "ranks": [], **more}


def board(*replicas: dict[str, Any], ingresses: str = "ready", **more: Any) -> dict[str, Any]:
    """Return what the board says of a mixed pool and of ingresses a, b, ..."""
    states = [replica["state"] for replica in replicas]
    status = "loading" if "ready" not in states else "ready"
    return {
        "status": status,
        "compiling": False,
        "pools": {"mixed": {"replicas": list(replicas)}},
        "ingresses": [
            {"id": name, "state": state, "num_live": i + 1}
            for i, (name, state) in enumerate(zip("ab", ingresses.split(","), strict=False))
        ],
        "loading": [],
        **more,
    }


class Seen:
    """A readiness with a clock."""

    def __init__(self, **arguments: Any) -> None:
        config = deploy_config({"pools": "mixed", "O": 0, **arguments})
        self.now = 100.0
        self.readiness = Readiness(config, "a", self.now)
        self.readiness.has_tokenizer = True

    def see(self, body: dict[str, Any], *, is_board_new: bool = False) -> tuple[str, list[str]]:
        """Return the status, and what is loading."""
        self.readiness.see(body, {"CPU": 0.5}, self.now, is_board_new=is_board_new)
        found = self.readiness.body
        return found["status"], [entry["what"] for entry in found["loading"]]


@pytest.mark.feature("R15")
@pytest.mark.parametrize(
    ("replicas", "why"),
    [
        ([], ""),
        ([replica("loading")], ""),
        ([replica("ready")], ""),
        ([replica("restarting", error="rank dp=0 tp=0 epoch=0 ended: killed")], ""),
        ([replica("stuck")], ""),
        ([replica("restarting", stuck=True)], "mixed pool: no rank serves"),
        ([replica("failed", error="rank dp=0 tp=1: gone")], "mixed pool: rank dp=0 tp=1: gone"),
        ([replica("ready"), replica("failed")], ""),
        ([replica("outdated"), replica("restarting", stuck=True, error="a")], "mixed pool: a"),
    ],
)
def test_a_pool_is_down_if_its_watchdog_says_so_or_it_gave_up(
    replicas: list[dict[str, Any]], why: str
) -> None:
    seen = Seen()
    seen.see(board(*replicas))
    assert seen.readiness.failure() == why


def test_an_application_is_ready_with_all_its_replicas_and_its_tokenizer() -> None:
    seen = Seen(**{"mixed.replicas": 2})
    assert seen.see(board(replica("loading"))) == ("loading", ["mixed: replicas"])
    assert seen.see(board(replica("ready"))) == ("degraded", ["mixed: replicas"])
    assert seen.see(board(replica("ready"), replica("ready"))) == ("ready", [])
    assert seen.readiness.takes_requests
    seen.readiness.drain()
    assert seen.see(board(replica("ready"), replica("ready")))[0] == "draining"
    assert not seen.readiness.takes_requests


def test_an_ingress_that_loads_or_is_missing_degrades_what_others_serve() -> None:
    seen = Seen(**{"ingress.replicas": 2})
    assert seen.see(board(replica("ready"), ingresses="loading"))[0] == "loading"
    assert seen.see(board(replica("ready"))) == ("degraded", ["ingress: replicas"])
    assert seen.see(board(replica("ready"), ingresses="ready,loading")) == ("degraded", [])
    assert seen.see(board(replica("ready"), ingresses="ready,ready")) == ("ready", [])
    assert seen.readiness.num_live_elsewhere == 2


def test_a_board_that_is_made_anew_is_believed_once_it_has_heard_of_all() -> None:
    seen = Seen()
    assert seen.see(board(replica("ready"))) == ("ready", [])
    assert seen.see(board(), is_board_new=True) == ("ready", [])
    assert seen.see(board(), is_board_new=False) == ("loading", ["mixed: replicas"])


def test_what_is_not_placed_in_time_tells_what_it_wants_and_what_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = Seen()
    seen.now += PLACEMENT_TIMEOUT_S
    assert not seen.readiness.are_pools_late(board(), seen.now)
    seen.now += 1
    assert seen.readiness.are_pools_late(board(), seen.now)
    _, [what] = seen.see(board())
    assert what == (
        "mixed: replicas not placed: each wanted [{'CPU': 0.01}] by STRICT_PACK, "
        "found free {'CPU': 0.5}"
    )
    assert [record.getMessage() for record in caplog.records] == [what]
    seen.see(board())
    assert len(caplog.records) == 1, "once in a while"
    assert not seen.readiness.are_pools_late(board(replica("loading")), seen.now)
    seen.see(board(replica("loading")))
    seen.see(board())
    assert not seen.readiness.are_pools_late(board(), seen.now), "its time begins anew"


def test_a_board_that_is_silent_degrades_what_was_ready() -> None:
    seen = Seen()
    seen.see(board(replica("ready")))
    seen.readiness.see_silence(seen.now + STALE_S)
    assert seen.readiness.body["status"] == "ready"
    seen.readiness.see_silence(seen.now + STALE_S + 0.1)
    assert seen.readiness.body["status"] == "degraded"
    [entry] = seen.readiness.body["loading"]
    assert entry["what"] == "status board: wanted an answer, found none for 5 s"


# Progress of a start: lines of the log, with counts and times.


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


SCALING = {"wanted": 2, "least": 1, "most": 3, "was": 1, "why": "load"}
SCALING |= {"load": {"steady": 1.5}, "signals": {"num_ready": 1}}


@pytest.mark.feature("R16")
@pytest.mark.parametrize("state", ["loading", "draining", "restarting"])
def test_what_a_scaled_pool_has_beyond_its_fewest_does_not_matter_to_ready(state: str) -> None:
    seen = Seen(**{"mixed.max_replicas": 3})
    assert seen.see(board(replica("ready"), replica(state))) == ("ready", [])
    assert seen.see(board(replica(state)))[0] == "loading"
    assert seen.see(board(replica("ready"))) == ("ready", [])


@pytest.mark.feature("R16")
def test_bounds_that_serve_was_told_of_count_instead_of_the_arguments() -> None:
    seen, body = Seen(), board(replica("ready"))
    body["pools"]["mixed"]["scaling"] = {**SCALING, "least": 2}
    assert seen.see(body) == ("degraded", ["mixed: replicas"])


@pytest.mark.feature("R13")
def test_places_are_those_of_replicas_that_serve_or_do_so_again_soon() -> None:
    seen = Seen(**{"mixed.max_replicas": 3})
    states = ["ready", "restarting", "stuck", "loading", "draining", "outdated", "failed"]
    seen.see(board(*map(replica, states)))
    assert seen.readiness.num_live == 3
    seen.see(board(replica("loading")))
    assert seen.readiness.num_live == 1, "requests that come wait for it"


@pytest.mark.feature("R16")
def test_each_step_is_told_once_with_its_signals() -> None:
    fixed, at_first, later = board(), board(), board()
    at_first["pools"]["mixed"]["scaling"] = {**SCALING, "wanted": 1}
    later["pools"]["mixed"]["scaling"] = SCALING
    assert scaled(at_first, later) == [
        "mixed pool: 1 to 2 replicas (load): steady 1.5, num_ready 1"
    ]
    assert scaled(fixed, later) == scaled(later, later) == scaled(later, fixed) == []
