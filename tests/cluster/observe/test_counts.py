"""Totals never fall and count nothing twice, whatever becomes of those who count."""

from __future__ import annotations

import random

import msgspec
import pytest

from cluster.actors.reports import GroupReport, ReplicaReport
from cluster.actors.status_board import StatusBoard
from cluster.group.context import RankPlace, RankStats
from cluster.observe import counts as counts_module
from cluster.observe.counts import BUCKET, SUM, Counts, Histogram, Ledger
from cluster.observe.metrics import Described, MetricsSnapshot, SchedulerStats, samples


def counted(n: float) -> Counts:
    return {("steps_total", "full", "decode"): n}


def test_a_process_that_starts_anew_adds_to_what_the_one_before_counted() -> None:
    ledger = Ledger()
    for source, n in [("a", 3), ("a", 5), ("a", 5), ("b", 1), ("b", 4), ("a", 5)]:
        ledger.add(source, "engine", counted(n))
    assert ledger.totals == {"engine": counted(9)}


def test_what_a_process_said_earlier_and_comes_later_is_not_counted_twice() -> None:
    ledger = Ledger()
    for n in [3, 5, 4, 6]:
        ledger.add("a", "engine", counted(n))
    assert ledger.totals == {"engine": counted(6)}


def test_a_restored_ledger_goes_on_whoever_tells_first() -> None:
    """A rank that lives on says all that it ever counted, and only what is new is added."""
    rng = random.Random(1)
    told = {name: 0 for name in "abc"}
    ledger, before = Ledger(), 0.0
    for _ in range(300):
        name = rng.choice("abc")
        told[name] += rng.randrange(3)
        ledger.add(name, "engine", counted(told[name]))
        if rng.random() < 0.1:
            ledger = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger), type=Ledger)
        [total] = ledger.totals["engine"].values() if any(told.values()) else [0.0]
        assert total >= before
        before = total
    assert before == sum(told.values())


def test_processes_that_were_silent_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_module, "MAX_SOURCES", 10)
    ledger = Ledger()
    for i in range(100):
        ledger.add(str(i), "engine", counted(1))
    assert list(ledger.last) == [str(i) for i in range(90, 100)]
    assert ledger.totals == {"engine": counted(100)}


def test_a_histogram_counts_a_bound_below_it() -> None:
    histogram, found = Histogram("h", (1.0, 2.0)), Counts()
    histogram.put_into(found)
    assert not found
    for value, times in [(1.0, 1), (1.5, 2), (7.0, 1)]:
        histogram.observe(value, times)
    histogram.put_into(found)
    wanted = {("h", BUCKET, "1.0"): 1, ("h", BUCKET, "2.0"): 2, ("h", BUCKET, "+Inf"): 1}
    assert found == {("h", SUM): 11.0, **wanted}


def test_what_other_bounds_counted_is_still_counted() -> None:
    """A deployment with a longer model follows one with a shorter."""
    name = "request_prompt_tokens"
    found: Counts = {(name, SUM): 90.0, (name, BUCKET, "10.0"): 1, (name, BUCKET, "+Inf"): 2}
    snapshot = MetricsSnapshot({"ingress": found}, {})
    [sample] = next(s for m, s in samples(snapshot, Described("m", 20)) if m.name == name)
    assert sample.value == 90.0
    assert sample.buckets == (
        *(("1.0", 0), ("2.0", 0), ("5.0", 0)),
        *(("10.0", 1), ("20.0", 1), ("+Inf", 3)),
    )


def report(replica: str, epoch: int, n: float, *, dp_rank: int = 0) -> ReplicaReport:
    place, scheduler = RankPlace(dp_rank, 0, epoch), SchedulerStats(num_blocks=4)
    rank = RankStats(place, pid=1, node="", state="ready", step=1, scheduler=scheduler)
    return ReplicaReport("mixed", replica, "ready", GroupReport([rank], [], [counted(n)]))


def test_replicas_get_the_lowest_free_number_as_their_engines_name() -> None:
    """Ids of replicas are random: as labels they would grow without bound."""
    board = StatusBoard(["mixed"])
    board.push(report("x", 0, 1))
    board.push(report("y", 0, 1, dp_rank=1))
    assert set(board.metrics("i", {}).engines) == {"mixed-0-0", "mixed-1-1"}
    board.remove("mixed", "x")
    board.push(report("z", 0, 1))
    found = board.metrics("i", {})
    assert set(found.engines) == {"mixed-0-0", "mixed-1-1"}
    assert found.totals["mixed-0-0"] == counted(2)


def test_ready_shows_a_rank_without_nesting_and_without_what_metrics_alone_show() -> None:
    place, scheduler = RankPlace(1, 0, 2), SchedulerStats(3, num_preemptions=4)
    shown = RankStats(place, pid=5, node="n", state="ready", scheduler=scheduler).to_dict()
    wanted = {"dp_rank": 1, "tp_rank": 0, "epoch": 2, "num_running": 3, "pid": 5}
    assert wanted.items() <= shown.items() and len(shown) == 19
    assert not {"place", "scheduler", "num_preemptions", "prefix_queries"} & set(shown)
