"""What ingresses tell the status board, and what it tells all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.actors import status_board as board_module
from cluster.actors.gcs_store import KeptTotals
from cluster.actors.reports import BoardSilent, GroupReport, IngressReport, ReplicaReport
from cluster.actors.status_board import NAMESPACE, IngressBoard, StatusBoard, board_name
from cluster.engine.prefix_index import PREFIX_BYTES, PrefixFeed, PrefixUpdate
from cluster.group.context import RankPlace, RankStats
from cluster.observe.counts import Counts, Ledger
from cluster.observe.load_progress import LoadProgress
from cluster.observe.metrics import Described, SchedulerStats, samples
from cluster.wire.credentials import Hashes
from cluster.wire.messages import PROTOCOL_VERSION

TOKENS = ("generation_tokens_total",)


def report(
    ingress_id: str,
    *,
    numerics_hash: str = "ours",
    is_loading: bool = False,
    num_live: int = 0,
    is_watched: bool = False,
    counts: Counts | None = None,
) -> IngressReport:
    loading = (LoadProgress("tokenizer", 0, 1),) if is_loading else ()
    return IngressReport(
        ingress_id, 7, "node", numerics_hash, loading, num_live, is_watched, counts
    )


def states(body: dict[str, Any]) -> dict[str, str]:
    return {ingress["id"]: ingress["state"] for ingress in body["ingresses"]}


def test_all_ingresses_see_the_same_and_the_first_that_came_stays_first() -> None:
    board = StatusBoard(["mixed"])
    board.poll(report("b", num_live=3))
    body = board.poll(report("a", is_loading=True))
    assert list(states(body).items()) == [("b", "ready"), ("a", "loading")]
    assert [entry["what"] for entry in body["loading"]] == ["tokenizer"]
    assert body["loading"][0]["replica"] == "a"
    again = board.poll(report("b", num_live=4))
    assert list(states(again)) == ["b", "a"]
    assert [ingress["num_live"] for ingress in again["ingresses"]] == [4, 0]
    assert states(board.poll(report("a"))) == {"b": "ready", "a": "ready"}


def test_ingresses_of_another_deployment_are_not_counted() -> None:
    board = StatusBoard(["mixed"])
    board.poll(report("old", numerics_hash="other", is_loading=True))
    body = board.poll(report("new"))
    assert states(body) == {"new": "ready"} and body["loading"] == []


def test_an_ingress_that_is_silent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    board, now = StatusBoard(["mixed"]), time.monotonic()
    board.poll(report("dead"))
    monkeypatch.setattr(board_module.time, "monotonic", lambda: now + 6)
    assert states(board.poll(report("other"))) == {"other": "ready"}


def test_counts_of_all_ingresses_are_added_up_and_told_by_each() -> None:
    board = StatusBoard(["mixed"])
    board.poll(report("a", counts={TOKENS: 5}))
    board.poll(report("b", counts={TOKENS: 2}))
    board.poll(report("a"))  # nothing new
    assert board.metrics("b", {TOKENS: 3}).totals["ingress"] == {TOKENS: 8}
    assert board.metrics("a", {TOKENS: 5}).totals["ingress"] == {TOKENS: 8}


def test_whoever_is_looked_at_all_ingresses_get_figures() -> None:
    """The page's next look may reach another one."""
    board = StatusBoard(["mixed"])
    assert board.poll(report("a"))["figures"] is None
    board.poll(report("b", is_watched=True, counts={TOKENS: 2}))
    figures = board.poll(report("a"))["figures"]
    assert figures["ingress"]["generation_tokens_total"] == 2
    board.poll(report("b"))
    assert board.poll(report("a"))["figures"] is None


def test_replicas_of_another_deployment_are_outdated() -> None:
    """While one replaces another both push to the board of their common name."""
    board = StatusBoard(["mixed"])

    def push(replica: str, hashes: Hashes) -> None:
        board.push(ReplicaReport("mixed", replica, "ready", GroupReport([], []), hashes=hashes))

    def seen(numerics_hash: str | None) -> tuple[str, list[str]]:
        body = board.snapshot(numerics_hash)
        return body["status"], [r["state"] for r in body["pools"]["mixed"]["replicas"]]

    push("1", Hashes("old", "kv"))
    assert seen("old") == ("ready", ["ready"]) and seen("new") == ("loading", ["outdated"])
    push("2", Hashes("new", "kv"))
    assert seen("old") == ("ready", ["ready", "outdated"])
    assert seen("new") == ("ready", ["outdated", "ready"])
    push("3", Hashes("new", "other"))  # which computes what it cannot read
    push("4", Hashes("new", "kv", PROTOCOL_VERSION + 2))
    assert seen("new") == ("ready", ["outdated", "ready", "ready", "outdated"])
    assert seen(None) == ("ready", ["ready"] * 4)


def test_a_pool_is_ready_while_one_of_its_replicas_is() -> None:
    """Whatever another does: a pool that grows or rebuilds a group goes on serving."""
    board = StatusBoard(["mixed"])
    for replica, state in enumerate(["loading", "ready", "restarting", "draining"]):
        board.push(ReplicaReport("mixed", str(replica), state, GroupReport([], [])))
    assert board.snapshot()["status"] == "ready"
    board.remove("mixed", "1")
    assert board.snapshot()["status"] == "loading"


def test_ingresses_hear_of_the_leaders_of_all_deployments_with_what_each_has_to_do() -> None:
    """Which of them are theirs they see by the hash; a replica that is removed is gone at once."""
    board = StatusBoard(["mixed"])
    loads = [SchedulerStats(num_running=1), SchedulerStats(num_waiting=2)]
    ranks = [
        RankStats(RankPlace(dp_rank, 0, 3), 7, "node", "ready", 1, load, {dp_rank: 0.1})
        for dp_rank, load in enumerate(loads)
    ]
    follower = RankStats(RankPlace(1, 1, 3), 8, "node", "ready")
    group = GroupReport([*ranks, follower], [])
    where: dict[str, Any] = {
        "epoch": 3,
        "inboxes": ("tcp://1", "tcp://2"),
        "hashes": Hashes("ours"),
    }
    board.push(ReplicaReport("mixed", "a", "ready", group, **where, last_end="killed"))
    other = {**where, "inboxes": ("tcp://3",), "hashes": Hashes("theirs")}
    board.push(ReplicaReport("mixed", "b", "draining", GroupReport([], []), **other))
    board.push(ReplicaReport("mixed", "c", "restarting", GroupReport([], []), epoch=1))
    found = board.poll(report("i"))["leaders"]
    assert [(leader.engine_id, leader.epoch, leader.state, leader.inbox) for leader in found] == [
        ("mixed/a/0", 3, "ready", "tcp://1"),
        ("mixed/a/1", 3, "ready", "tcp://2"),
        ("mixed/b/0", 3, "draining", "tcp://3"),
    ]
    assert [leader.load for leader in found[:2]] == loads
    assert [leader.token_s for leader in found] == [{0: 0.1}, {1: 0.1}, {}]
    assert [(leader.hashes.numerics, leader.last_end) for leader in found[1:]] == [
        ("ours", "killed"),
        ("theirs", ""),
    ]
    board.remove("mixed", "a")
    assert [leader.replica_id for leader in board.poll(report("i"))["leaders"]] == ["b"]


@pytest.mark.feature("P08")
def test_what_leaders_have_cached_goes_through_once_and_whole_to_who_is_new() -> None:
    """A replica hears what the board knows, and an ingress gets what it lacks."""
    board, feed = StatusBoard(["mixed"]), PrefixFeed()

    def push(epoch: int, since: int | None) -> dict[int, int]:
        update = None if since is None else feed.since(since)
        rank = RankStats(RankPlace(0, 0, epoch), 7, "node", "ready", prefixes=update)
        where: dict[str, Any] = {"epoch": epoch, "inboxes": ("tcp://1",), "hashes": Hashes("ours")}
        return board.push(ReplicaReport("mixed", "a", "ready", GroupReport([rank], []), **where))

    def polled(known: tuple[int, int] | None) -> PrefixUpdate | None:
        wanted = {} if known is None else {"mixed/a/0": known}
        [leader] = board.poll(replace(report("i"), known_prefixes=wanted))["leaders"]
        found: PrefixUpdate | None = leader.prefixes
        return found

    def sizes(update: PrefixUpdate | None) -> tuple[int, int]:
        assert update is not None
        return len(update.added) // PREFIX_BYTES, len(update.removed) // PREFIX_BYTES

    feed.changes += [(bytes([i]) * 16, True) for i in range(50)]
    assert push(3, None) == {0: 0}
    assert push(3, 0) == {0: 50}
    assert polled(None) is None, "it does not ask"
    assert polled((2, 50)) is None, "it does not know of this epoch yet"
    assert sizes(polled((3, 0))) == (50, 0) and polled((3, 50)) is None
    feed.changes += [(bytes([60]) * 16, True), (bytes([3]) * 16, False)]
    assert push(3, 50) == {0: 52}
    assert sizes(polled((3, 50))) == (1, 1) and sizes(polled((3, 0))) == (50, 0)
    # The board that took its place knows nothing, and says so.
    board = StatusBoard(["mixed"])
    assert push(3, 52) == {0: 0} and push(3, 0) == {0: 52}
    assert sizes(polled((3, 50))) == (50, 0)
    feed = PrefixFeed()
    assert push(4, 0) == {0: 0}, "the ranks of another epoch have cached nothing"
    assert polled((3, 52)) is None
    board.remove("mixed", "a")
    assert push(4, None) == {0: 0}


def test_replicas_by_state_and_each_change_of_what_is_wanted_are_counted() -> None:
    board = StatusBoard(["mixed"])
    for replica_id, state in (("a", "ready"), ("b", "draining"), ("c", "ready"), ("d", "stuck")):
        board.push(ReplicaReport("mixed", replica_id, state, GroupReport([], [])))
    for wanted, why in ((2, ""), (3, "load"), (3, "load"), (2, "calm"), (3, "load")):
        board.scale("mixed", {"wanted": wanted, "why": why})
    snapshot = board.metrics("i", {})
    assert snapshot.replicas == {"mixed": {"loading": 0, "ready": 2, "draining": 1, "stuck": 1}}
    decisions = {("scale_decisions_total", "load"): 2, ("scale_decisions_total", "calm"): 1}
    assert snapshot.totals["mixed"] == decisions
    found = {
        (metric.name, sample.labels[1:]): sample.value
        for metric, samples_of in samples(snapshot, Described("m", 8))
        for sample in samples_of
    }
    assert found["replicas", ("mixed", "ready")] == 2
    assert found["scale_decisions_total", ("mixed", "load")] == 2


def test_figures_have_why_engines_were_chosen() -> None:
    board = StatusBoard(["mixed"])
    counts: Counts = {("choices_total", "mixed", "load"): 2, ("choices_total", "mixed", "only"): 1}
    body = board.poll(report("a", is_watched=True, counts=counts))
    assert body["figures"]["choices"] == {"mixed": {"load": 2, "only": 1}}


async def answered(call: Callable[[], Awaitable[Any]]) -> Any:
    """Ask again while the board is silent, as it is on a busy machine while it is made."""
    async with asyncio.timeout(300):
        while True:
            with suppress(BoardSilent):
                return await call()


@pytest.mark.ray
@pytest.mark.feature("R15")
def test_calls_that_find_the_board_dead_at_once_make_one_and_keep_it(ray_cluster: Any) -> None:
    import ray

    def board_id() -> Any:
        return ray.get_actor(board_name("at once"), namespace=NAMESPACE)._actor_id

    async def scenario() -> None:
        board = IngressBoard("at once", ["mixed"], Described("m", 8))
        await answered(lambda: board.poll(report("first")))
        before = board_id()
        ray.kill(ray.get_actor(board_name("at once"), namespace=NAMESPACE))
        await asyncio.gather(
            answered(lambda: board.metrics("first", {})),
            answered(lambda: board.poll(report("first"))),
        )
        made = board_id()
        assert made != before
        for _ in range(20):
            await answered(lambda: board.poll(report("first")))
            assert board_id() == made
            await asyncio.sleep(0.1)

    asyncio.run(scenario())


@pytest.mark.ray
@pytest.mark.feature("R15", "R16")
def test_an_ingress_asks_on_after_a_request_was_cancelled_while_the_board_was_made(
    ray_cluster: Any, tmp_path: Path
) -> None:
    """Ray cancels, with a request, the calls that it made and that were not sent yet."""
    import ray

    may_be_made = tmp_path / "may_be_made"

    class IsMadeLate(KeptTotals):
        def load(self) -> Ledger:
            while not may_be_made.exists():
                time.sleep(0.01)
            return super().load()

    class Asking:
        def __init__(self) -> None:
            board_module.KeptTotals = IsMadeLate  # type: ignore[misc]
            self.board = IngressBoard("cancelled", ["mixed"], Described("m", 8))
            self.num_asked = 0

        async def scrape(self) -> None:
            self.num_asked += 1
            await answered(lambda: self.board.metrics("first", {}))

        async def has_asked(self, times: int) -> None:
            while self.num_asked < times:
                await asyncio.sleep(0.01)

        async def poll(self) -> Any:
            self.num_asked += 1
            return await answered(lambda: self.board.poll(report("first")))

    asking = ray.remote(num_cpus=0)(Asking).remote()
    polled = asking.poll.remote()
    ray.get(asking.has_asked.remote(1))
    scraped = asking.scrape.remote()
    ray.get(asking.has_asked.remote(2))
    ray.cancel(scraped)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(scraped)
    time.sleep(1)  # Ray tells nobody when it has cancelled the calls, too
    may_be_made.touch()
    assert ray.get(polled)["ingresses"]
    assert ray.get(asking.poll.remote())["ingresses"]
