"""The adapters that an application has loaded: ids, names, and when one that leaves is gone."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.actors import status_board as board_module
from cluster.actors.adapter_set import (
    AdapterSet,
    AdapterSets,
    LoadCall,
    StoredAdapters,
    UnloadCall,
)
from cluster.actors.reports import (
    GroupReport,
    IngressReport,
    PushAnswer,
    ReplicaReport,
    leaders_of,
)
from cluster.actors.status_board import LOST_AFTER_S, StatusBoard
from cluster.group.context import LoadedAdapters, RankPlace, RankStats
from cluster.observe.metrics import Described
from cluster.wire.credentials import Hashes
from cluster.wire.messages import FIRST_LOADED_ID
from compile.errors import FieldError

PRINT = b"p" * 32


class Kept:
    """What the control service keeps."""

    def __init__(self) -> None:
        self.data = msgspec.msgpack.encode(StoredAdapters())

    def load(self) -> StoredAdapters:
        return msgspec.msgpack.decode(self.data, type=StoredAdapters)

    def save(self, stored: StoredAdapters) -> None:
        self.data = msgspec.msgpack.encode(stored)


def report(
    ingress_id: str = "i",
    numerics_hash: str = "ours",
    revision: int | None = 0,
    used: frozenset[int] = frozenset(),
) -> IngressReport:
    return IngressReport(
        *(ingress_id, 7, "node", numerics_hash, (), 0, False, None),
        adapters_revision=revision,
        used_adapters=used,
    )


@dataclass
class Ingress:
    """One that asks the board, and gets its answers late, and in any order."""

    name: str
    seen: AdapterSet = field(default_factory=AdapterSet)
    answers: list[AdapterSet] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    reported: IngressReport | None = None
    """The last that the board got."""

    def ask(self, sets: AdapterSets) -> None:
        self.reported = report(self.name, "ours", self.seen.revision, frozenset(self.live))
        self.answers.append(sets.of("ours"))

    def hear(self, place: int) -> None:
        if self.answers:
            found = self.answers.pop(place % len(self.answers))
            self.seen = found if found.revision >= self.seen.revision else self.seen

    def begin(self, place: int) -> None:
        if self.seen.offered:
            self.live.append(self.seen.offered[place % len(self.seen.offered)].id)

    def end(self, place: int) -> None:
        if self.live:
            self.live.pop(place % len(self.live))


STEPS = st.tuples(
    st.sampled_from(["add", "mark", "ask", "hear", "poll", "poll", "begin", "end", "die", "anew"]),
    st.integers(0, 1),
    st.integers(0, 1),
)


@pytest.mark.feature("S10")
@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, min_size=20, max_size=60))
def test_an_adapter_stays_for_as_long_as_a_request_may_have_it(
    steps: list[tuple[str, int, int]],
) -> None:
    """Whatever comes in between, no id comes twice and no name is offered twice."""
    kept = Kept()
    sets = AdapterSets(kept.load(), kept.save)
    ingresses = [Ingress(str(i)) for i in range(2)]
    ids: list[int] = []

    def sweep() -> None:
        sets.sweep(each.reported for each in ingresses if each.reported is not None)

    for what, which, place in steps:
        at = ingresses[which]
        match what:
            case "add":
                before = sets.of("ours")
                try:
                    call = LoadCall("ours", f"name{place}", "/path", PRINT, 2)
                    after = sets.add(call)
                    found = after.named(f"name{place}")
                    assert found is not None and len(before.of_engines) < 2
                    # Its answer is lost, and it comes again.
                    sets = AdapterSets(kept.load(), kept.save) if which else sets
                    assert sets.add(call) == after
                    ids.append(found.id)
                except FieldError:
                    assert before.named(f"name{place}") or len(before.of_engines) >= 2
            case "mark":
                is_known = sets.of("ours").named(f"name{place}") is not None
                gone = UnloadCall("ours", f"name{place}")
                left = sets.mark(gone)
                assert (left is not None) == is_known and sets.mark(gone) == left
            case "ask":
                at.ask(sets)
            case "hear":
                at.hear(place)
            case "poll":
                at.ask(sets)
                at.hear(-1)
            case "begin":
                at.begin(place)
            case "end":
                at.end(place)
            case "die":
                ingresses[which] = Ingress(f"{at.name}'")
            case "anew":
                sets = AdapterSets(kept.load(), kept.save)
        if all(each.reported for each in ingresses):  # else the board may not have heard of all
            sweep()
        assert ids == sorted(set(ids)) and all(each >= FIRST_LOADED_ID for each in ids)
        held = {adapter_id for each in ingresses for adapter_id in each.live}
        now = sets.of("ours")
        assert held <= {each.id for each in now.of_engines}
        names = [each.name for each in now.offered]
        assert len({*names}) == len(names)
    for each in ingresses:  # once all have heard and nothing runs, what leaves is gone
        each.live.clear()
        each.answers.clear()
        each.ask(sets)
        each.hear(0)
        each.ask(sets)
    sweep()
    assert not sets.of("ours").leaving


@pytest.mark.feature("S10")
def test_what_was_refused_changes_nothing() -> None:
    kept = Kept()
    sets = AdapterSets(kept.load(), kept.save)
    sets.add(LoadCall("ours", "a", "/a", PRINT, 2))
    sets.add(LoadCall("ours", "b", "/b", PRINT, 2))
    before = kept.data
    with pytest.raises(FieldError, match=r"^lora_name: wanted a name that is free, found 'a'"):
        sets.add(LoadCall("ours", "a", "/c", PRINT, 3))
    with pytest.raises(FieldError, match=r"^lora_name: wanted fewer than 2 .*max_loras.* found 2$"):
        sets.add(LoadCall("ours", "c", "/c", PRINT, 2))
    assert sets.mark(UnloadCall("ours", "none")) is None and kept.data == before
    sets.mark(UnloadCall("ours", "a"))
    with pytest.raises(FieldError, match=r"found 2 \(1 of them until its last request ends\)"):
        sets.add(LoadCall("ours", "a", "/a", PRINT, 2))
    replaced = sets.add(
        LoadCall("ours", "a", "/a2", PRINT, 3)
    )  # while requests of the first one run
    assert [each.path for each in replaced.of_engines] == ["/b", "/a2", "/a"]
    assert sets.add(LoadCall("theirs", "a", "/a", PRINT, 1)).of_engines[0].id == FIRST_LOADED_ID + 3


def push(board: StatusBoard, numerics: str = "ours", *, is_old: bool = False) -> Any:
    group = GroupReport([], [])
    pushed = ReplicaReport("mixed", "r", "ready", group, hashes=Hashes(numerics))
    return board.push(replace(pushed, takes_answer=not is_old))


def names(found: AdapterSet | PushAnswer) -> list[str]:
    adapters = found.adapters if isinstance(found, PushAnswer) else found.offered
    assert adapters is not None
    return [each.name for each in adapters]


@pytest.mark.feature("S10")
def test_replicas_and_ingresses_of_the_same_numerics_hear_of_an_adapter() -> None:
    board = StatusBoard(["mixed"])
    assert push(board) == PushAnswer({}, ())
    found = board.load_adapter(LoadCall("ours", "a", "/a", PRINT, 1))
    assert isinstance(found, AdapterSet)
    for numerics, wanted in (("ours", ["a"]), ("theirs", [])):
        assert names(push(board, numerics)) == wanted
        assert names(board.poll(report("i", numerics))["adapters"]) == wanted
    assert isinstance(board.load_adapter(LoadCall("ours", "a", "/a", PRINT, 2)), FieldError)
    assert board.unload_adapter(UnloadCall("theirs", "a")) is None
    # Those of the release before know nothing of it.
    assert push(board, is_old=True) == {}
    assert "adapters" not in board.poll(report(revision=None))


@pytest.mark.feature("S10")
def test_one_that_leaves_is_kept_until_its_last_request_ends_or_its_ingress_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(board_module.time, "monotonic", lambda: now)
    kept: Any = Kept()
    board = StatusBoard(["mixed"], kept_adapters=kept)
    now += LOST_AFTER_S + 1
    found = board.load_adapter(LoadCall("ours", "a", "/a", PRINT, 1))
    assert isinstance(found, AdapterSet)
    used, seen = frozenset({found.offered[0].id}), found.revision
    board.poll(report("one", revision=seen, used=used))
    board.poll(report("two", revision=seen))
    left = board.unload_adapter(UnloadCall("ours", "a"))
    assert left is not None and not left.offered
    board.poll(report("two", revision=left.revision))
    board.poll(report("one", revision=seen))
    assert names(push(board)) == ["a"], "one may have taken one, and did"
    board.poll(report("one", revision=left.revision, used=used))
    board.poll(report("old", revision=None))
    assert names(push(board)) == ["a"], "one has a request"
    # A board made anew keeps it until it may have heard of all.
    board = StatusBoard(["mixed"], kept_adapters=kept)
    assert names(push(board)) == ["a"] and not names(board.poll(report())["adapters"])
    now += LOST_AFTER_S - 1
    for name, revision in (("one", left.revision), ("two", left.revision)):
        board.poll(report(name, revision=revision, used=used if name == "one" else frozenset()))
    now += 2
    board.poll(report("two", revision=left.revision))
    assert names(push(board)) == ["a"]
    now += LOST_AFTER_S - 1  # one is silent since
    board.poll(report("two", revision=left.revision))
    assert names(push(board)) == []
    again = board.load_adapter(LoadCall("ours", "a", "/a", PRINT, 1))
    assert isinstance(again, AdapterSet) and not used & {each.id for each in again.offered}


def test_what_a_leader_has_loaded_is_told_with_it() -> None:
    loaded = LoadedAdapters(frozenset({FIRST_LOADED_ID}), {FIRST_LOADED_ID + 1: "no file"})
    rank = RankStats(RankPlace(0, 0, 1), 7, "node", "ready", adapters=loaded)
    told = ReplicaReport("mixed", "r", "ready", GroupReport([rank], []), 1, ("tcp://1", "tcp://2"))
    assert [each.adapters for each in leaders_of(told)] == [loaded, LoadedAdapters()]
    older = replace(told, epoch=2)  # ranks of the group before this one
    assert all(each.adapters == LoadedAdapters() for each in leaders_of(older))


@pytest.mark.ray
@pytest.mark.feature("S10")
def test_a_board_that_is_killed_goes_on_with_its_adapters_and_ids(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from cluster.actors import gcs_store
    from cluster.actors.status_board import NAMESPACE, IngressBoard, ReplicaBoard, board_name

    dies = tmp_path / "dies"

    class DiesOnceItHasSaved(gcs_store.KeptAdapters):
        def save(self, stored: StoredAdapters) -> None:
            super().save(stored)
            if dies.exists():
                dies.unlink()
                os._exit(1)

    monkeypatch.setattr(board_module, "KeptAdapters", DiesOnceItHasSaved)

    async def scenario() -> None:
        at, replica = IngressBoard("kept", ["mixed"], Described("m", 8)), ReplicaBoard("kept")
        hashes = Hashes("ours")
        pushed = ReplicaReport("mixed", "r", "ready", GroupReport([], []), hashes=hashes)
        pushed = replace(pushed, takes_answer=True)
        assert names(await at.load_adapter(LoadCall("ours", "a", "/a", PRINT, 3))) == ["a"]
        with pytest.raises(FieldError, match=r"^lora_name: wanted a name that is free, found 'a'"):
            await at.load_adapter(LoadCall("ours", "a", "/a", PRINT, 3))
        assert names(await replica.push(pushed, [])) == ["a"]
        assert names((await at.poll(report()))["adapters"]) == ["a"]
        assert await at.unload_adapter(UnloadCall("ours", "a")) is not None
        assert await at.unload_adapter(UnloadCall("ours", "a")) is None
        await at.load_adapter(LoadCall("ours", "b", "/b", PRINT, 3))
        dies.touch()
        found = await at.load_adapter(LoadCall("ours", "a", "/a", PRINT, 3))
        assert not dies.exists()
        ids = {each.name: each.id - FIRST_LOADED_ID for each in found.offered}
        assert ids == {"b": 1, "a": 2}
        async with asyncio.timeout(300):
            while (answer := await replica.push(pushed, [])).adapters is None:
                await asyncio.sleep(0.01)  # it has lost its way to the board, and finds another
        assert names(answer) == ["b", "a", "a"]
        dies.touch()
        left = await at.unload_adapter(UnloadCall("ours", "b"))
        assert left is not None and names(left) == ["a"] and not dies.exists()
        ray.kill(ray.get_actor(board_name("kept"), namespace=NAMESPACE))

    asyncio.run(scenario())
