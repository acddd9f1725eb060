"""The directory: which leaders may be chosen, what is lost with one, and what reaches a mailbox."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from scripted import OURS, THEIRS, Connections, output_of, report_of, request_of, stage_of

from cluster.actors.reports import LeaderReport
from cluster.group.context import LoadedAdapters
from cluster.observe.metrics import SchedulerStats
from cluster.wire.credentials import Hashes
from cluster.wire.messages import (
    FIRST_LOADED_ID,
    MAX_ABORTS,
    PROTOCOL_VERSION,
    Hello,
    KVHandoff,
    Leave,
    Submit,
)
from serve.event_loop import StreamBatcher
from serve.pools.chooser import Routing
from serve.pools.directory import NoLeader
from serve.pools.leader_load import STALE_REPORTS, Stage
from serve.pools.mailbox import Mailbox


def mailbox_of(request_id: str = "r") -> Mailbox:
    return Mailbox(request_id, StreamBatcher())


async def submit(connections: Connections, request_id: str, pool: str = "mixed") -> Mailbox:
    """Submit a request to the leader that is chosen; return where its outputs go."""
    stage, mailbox = stage_of(request_id), mailbox_of(request_id)
    leader = (await connections.directory.choose(pool, stage)).leader
    leader.submit(stage, mailbox)
    return mailbox


async def chosen(connections: Connections, number: int) -> list[str]:
    found = [await connections.directory.choose("mixed", stage_of()) for _ in range(number)]
    return [each.leader.report.engine_id for each in found]


# --- who is chosen ---


@pytest.mark.feature("P08")
async def test_one_choice_is_made_among_all_leaders_of_all_replicas() -> None:
    connections = Connections()
    connections.see(
        *(report_of("mixed", replica, dp_rank) for replica in "ab" for dp_rank in range(2)),
        report_of("decode", "c"),  # of a pool that this application has not
    )
    for i in range(8):
        await submit(connections, str(i))
    taken = {engine_id: each.submitted() for engine_id, each in connections.newest.items()}
    assert sorted(taken) == ["mixed/a/0", "mixed/a/1", "mixed/b/0", "mixed/b/1"]
    assert all(len(each) == 2 for each in taken.values()), taken


@pytest.mark.feature("P08")
async def test_what_other_ingresses_have_submitted_counts_as_the_board_said_last() -> None:
    connections = Connections()
    connections.see(report_of(replica="a"), report_of(replica="b"))
    connections.see(report_of(replica="a", load=(2, 1)), report_of(replica="b", load=(1, 0)))
    for i in range(4):
        await submit(connections, str(i))
    # 3 and 1 of others: two that even it out, and one each.
    assert [len(connections[f"mixed/{each}/0"].submitted()) for each in "ab"] == [1, 3]
    # The board counts this ingress's own as well, which are not counted twice.
    connections.see(report_of(replica="a", load=(4, 0)), report_of(replica="b", load=(3, 1)))
    leaders = [each.leader.load.num_requests for each in connections.newest.values()]
    assert leaders == [4, 4]


async def test_a_configuration_is_replaced_until_its_engines_drain_or_the_new_ones_serve() -> None:
    """So long its ingress answers in this one's place."""
    connections = Connections(max_wait_s=0.01)

    def is_replacing(*reports: LeaderReport) -> bool:
        connections.see(*reports)
        return connections.directory.is_replacing

    old = partial(report_of, replica="old", hashes=THEIRS)
    assert not is_replacing() and not connections.directory.has_served
    assert is_replacing(old())
    assert is_replacing(old(), report_of(state="loading"))
    with pytest.raises(NoLeader):
        await connections.directory.choose("mixed", stage_of())
    assert not is_replacing(old(state="draining"), report_of(state="loading"))
    assert not is_replacing(old(), report_of())
    assert not is_replacing() and connections.directory.has_served


async def test_a_leader_that_drains_takes_what_nobody_else_will() -> None:
    """What reaches an ingress whose configuration is replaced, at the last moment."""
    connections = Connections(max_wait_s=0.01)
    others = partial(report_of, replica="other", hashes=THEIRS)
    connections.see(report_of(), others(state="loading"))
    connections.see(report_of(state="draining"), others(state="loading"))
    with pytest.raises(NoLeader):  # its own successor may come yet
        await connections.directory.choose("mixed", stage_of())
    connections.see(report_of(state="draining"), others())
    assert await chosen(connections, 2) == ["mixed/r/0"] * 2
    assert not [each for each in connections["mixed/r/0"].sent if isinstance(each, Leave)]


@pytest.mark.feature("S10")
async def test_a_request_goes_to_leaders_that_have_its_adapter() -> None:
    """It waits while none has; those of `lora_modules` are everywhere."""
    connections = Connections(max_wait_s=0.01)
    adapter_id = FIRST_LOADED_ID + 3
    bare, loaded = report_of(replica="bare"), report_of(replica="loaded", load=(5, 0))
    for _ in range(2):
        connections.see(bare, loaded)
    directory = connections.directory

    def stage(lora: int) -> Stage:
        request = msgspec.structs.replace(request_of(), adapter_id=lora)
        return Stage(request, None, 16)

    async def taken(lora: int) -> str:
        found = await directory.choose("mixed", stage(lora))
        return found.leader.report.replica_id

    assert await taken(0) == await taken(FIRST_LOADED_ID - 1) == "bare"
    with pytest.raises(NoLeader) as raised:
        await directory.choose("mixed", stage(adapter_id))
    assert str(raised.value) == (
        "mixed pool: wanted an engine that takes requests and has the adapter of this one within "
        "0.01 s, found mixed/bare/0 epoch=0 ready without it, mixed/loaded/0 epoch=0 ready without "
        "it"
    )
    with pytest.raises(NoLeader):
        await directory.wait(adapter_id)
    assert directory.has_leaders() and not directory.has_leaders(adapter_id)
    assert len(directory.lacking(adapter_id)) == 2
    errors = {adapter_id: "no file"}
    connections.see(replace(bare, adapters=LoadedAdapters(frozenset(), errors)), loaded)
    assert directory.adapter_error(adapter_id) == "mixed/bare/0 epoch=0: no file"
    has_it = LoadedAdapters(frozenset({adapter_id}))
    connections.see(bare, replace(loaded, adapters=has_it))
    assert await taken(adapter_id) == "loaded" and directory.has_leaders(adapter_id)
    await directory.wait(adapter_id)
    assert directory.lacking(adapter_id) == ["mixed/bare/0 epoch=0"]
    assert not directory.adapter_error(adapter_id)
    connections.see(replace(bare, state="draining"), replace(loaded, adapters=has_it))
    assert directory.lacking(adapter_id) == []
    connections.see(*(replace(each, state="draining") for each in (bare, loaded)))
    assert directory.lacking(adapter_id) == ["mixed pool"]


@pytest.mark.feature("P08")
async def test_a_leader_that_was_slow_is_tried_again_once_it_has_long_been_idle() -> None:
    connections = Connections({"mixed": Routing.COST})
    slow = replace(report_of(replica="slow"), token_s={1: 0.5})
    fast = replace(report_of(replica="fast", load=(1, 0)), token_s={1: 0.01, 2: 0.01})

    async def taken() -> set[str]:
        """Return who gets some of many requests that may go to either."""
        stages = [stage_of(f"r{i}") for i in range(40)]
        found = [await connections.directory.choose("mixed", stage) for stage in stages]
        return {each.leader.report.replica_id for each in found}

    for _ in range(STALE_REPORTS + 1):
        connections.see(slow, fast)
        assert await taken() == {"fast"}
    connections.see(slow, fast)
    assert await taken() == {"fast", "slow"}
    stage, mailbox = stage_of("first"), mailbox_of("first")
    leaders = {each.report.replica_id: each for each in connections.directory._able("mixed")}
    leaders["slow"].submit(stage, mailbox)
    assert await taken() == {"fast"}, "it is being measured"
    leaders["slow"].abort("first")
    connections.see(replace(slow, token_s=fast.token_s), fast)
    assert await taken() == {"slow"}, "it has nothing to do"


@pytest.mark.feature("P08")
async def test_kv_goes_where_blocks_are_free_and_not_just_taken() -> None:
    connections = Connections({"decode": Routing.COST})
    connections.see(
        *(
            replace(
                report_of("decode", replica),
                load=SchedulerStats(num_blocks=100, num_free_blocks=num_free),
                token_s={1: 0.01, 6: 0.0003},  # as long with many rows as with one
            )
            for replica, num_free in (("a", 5), ("b", 50))
        )
    )
    handoff = KVHandoff(7, "r", [], [], [], 2, 1, "kv", 30.0)
    taken = []
    for i in range(5):
        stage = Stage(request_of(str(i), [1] * 200), handoff, 16)  # 13 blocks
        leader = (await connections.directory.choose("decode", stage)).leader
        leader.submit(stage, mailbox_of(str(i)))
        taken.append(leader.report.replica_id)
    assert taken == ["b"] * 4 + ["a"]


async def test_a_leader_is_chosen_once_it_is_reported_ready_and_has_answered() -> None:
    connections = Connections(max_wait_s=0.01)
    connections.silent = {"mixed/silent/0"}
    connections.see(
        report_of(replica="loading", state="loading"),
        report_of(replica="silent"),
        report_of(replica="draining", state="draining"),
        report_of(replica="other", hashes=THEIRS),  # while deployments are replaced
    )
    assert list(connections.newest) == ["mixed/silent/0"]
    with pytest.raises(NoLeader, match=r"^mixed pool: wanted an engine that takes requests within"):
        await connections.directory.choose("mixed", stage_of())
    connections["mixed/silent/0"].leader.on_welcome()
    assert await chosen(connections, 2) == ["mixed/silent/0"] * 2


@pytest.mark.parametrize("state", ["draining", "stuck"])
async def test_a_leader_whose_state_changes_keeps_what_it_runs_and_gets_no_more(state: str) -> None:
    connections = Connections()
    connections.see(report_of(replica="a"))
    mailbox = await submit(connections, "r")
    connections.see(report_of(replica="a", state=state), report_of(replica="b"))
    assert await chosen(connections, 2) == ["mixed/b/0"] * 2
    connections["mixed/a/0"].leader.deliver(output_of(0, [7], "length"))
    assert (await mailbox.get()).finish_reason == "length"
    connections.see(report_of(replica="a"))
    again = {"mixed/a/0"} if state == "stuck" else set()  # who drains never serves again
    assert set(await chosen(connections, 2)) == {"mixed/b/0"} | again
    assert len(connections.all) == 2


async def test_what_comes_back_to_one_that_drains_is_told_to_leave_again() -> None:
    connections = Connections()
    connections.see(report_of(replica="a"))
    await submit(connections, "r")
    connections.see(report_of(replica="a"), report_of(replica="b"))
    leader = connections["mixed/a/0"].leader
    for told in (1, 2):
        connections.see(report_of(replica="a", state="draining"), report_of(replica="b"))
        leaves = [each for each in connections["mixed/a/0"].sent if isinstance(each, Leave)]
        assert leaves == [Leave(["r"], True)] * told
        leader.deliver(output_of(0, [], "moved"))
        leader.submit(stage_of(), mailbox_of())


@pytest.mark.feature("X08")
@pytest.mark.parametrize(
    ("hashes", "wanted"),
    [
        (OURS, [Leave(["r"], True)]),
        (Hashes("ours", "kv", PROTOCOL_VERSION - 1), [Leave(["r"], True)]),
        (Hashes("ours", "of other blocks"), [Leave(["r"], False)]),
        (THEIRS, []),
        (Hashes("ours", "kv", PROTOCOL_VERSION - 2), []),
    ],
    ids=["equal", "the release before", "other kv", "another model", "an old release"],
)
async def test_what_runs_leaves_for_who_gives_equal_tokens_with_kv_that_can_be_read(
    hashes: Hashes, wanted: list[Leave]
) -> None:
    """A model that is replaced by another runs to its end where it is."""
    connections = Connections(max_wait_s=0.01)
    connections.see(report_of())
    await submit(connections, "r")
    successor = report_of(replica="new", hashes=hashes)
    connections.see(report_of(state="draining"), successor)
    connections.see(report_of(state="draining"), successor)  # it has answered
    assert [each for each in connections["mixed/r/0"].sent if isinstance(each, Leave)] == wanted
    assert await chosen(connections, 1) == ["mixed/new/0" if wanted else "mixed/r/0"]


@pytest.mark.feature("X08")
async def test_kv_goes_where_it_can_be_read_and_is_let_go_where_nobody_can() -> None:
    connections = Connections({"decode": Routing.LEAST_REQUESTS})
    others = report_of("decode", "new", hashes=Hashes("ours", "of other blocks"))
    connections.see(report_of("decode"), others)
    stage = Stage(request_of(), KVHandoff(7, "r", [], [], [], 2, 1, OURS.kv, 30.0), 16)
    for _ in range(3):  # however much that one has to do
        leader = (await connections.directory.choose("decode", stage)).leader
        assert leader.report.replica_id == "r"
        leader.submit(stage_of(str(leader.load.num_requests)), mailbox_of())
    connections.see(report_of("decode", state="draining"), others)
    leader = (await connections.directory.choose("decode", stage)).leader
    assert leader.report.replica_id == "new"
    assert leader.offer(stage) == leader.offer(stage_of())
    leader.submit(stage, mailbox_of())
    [submitted] = [each for each in connections["decode/new/0"].sent if isinstance(each, Submit)]
    assert submitted == Submit(stage.request, None)


async def test_requests_that_wait_go_in_the_order_in_which_they_came() -> None:
    connections, went = Connections(), list[int]()

    async def ask(number: int) -> None:
        await submit(connections, str(number))
        went.append(number)

    asked = []
    for number in range(20):
        asked.append(asyncio.create_task(ask(number)))
        await asyncio.sleep(0)
    asked[3].cancel()  # its client has left
    connections.see()  # a board that knows nobody
    await asyncio.sleep(0)
    assert not went
    connections.see(report_of())
    await asyncio.wait(asked)
    wanted = [number for number in range(20) if number != 3]
    assert went == wanted
    assert connections["mixed/r/0"].submitted() == [str(number) for number in wanted]


async def test_who_has_waited_for_a_leader_long_enough_is_told_how_they_are() -> None:
    connections = Connections(
        {"mixed": Routing.ROUND_ROBIN, "decode": Routing.ROUND_ROBIN}, max_wait_s=0.05
    )
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(
        NoLeader, match=r"mixed pool: .* within 0\.05 s, found none, /ready tells why"
    ):
        await connections.directory.choose("mixed", stage_of())
    assert loop.time() - began >= 0.05
    connections.see(report_of(epoch=3), report_of(replica="b"), report_of("decode"))
    connections.see(report_of(epoch=3, state="stuck"), report_of(replica="b"))
    connections["mixed/b/0"].leader.on_end("its connection ended")
    wanted = r"found mixed/r/0 epoch=3 stuck, mixed/b/0 epoch=0 lost$"
    with pytest.raises(NoLeader, match=wanted):
        await connections.directory.choose("mixed", stage_of())
    found = await connections.directory.choose("decode", stage_of())
    assert found.leader.report.engine_id == "decode/r/0"


# --- epochs, and leaders that are lost ---


@pytest.mark.feature("P14")
async def test_a_leader_that_was_rebuilt_is_connected_to_anew_and_its_requests_are_lost() -> None:
    connections = Connections()
    connections.see(report_of(epoch=1))
    mailbox = await submit(connections, "r")
    old = connections["mixed/r/0"]
    connections.see(report_of(epoch=2, inbox="tcp://127.0.0.1:10", last_end="rank dp=0 ended"))
    new = connections["mixed/r/0"]
    assert old.is_closed and new is not old and new.sent == [Hello("mixed/r/0", 2)]
    lost = await mailbox.get()
    assert (lost.finish_reason, lost.error) == ("died", "mixed/r/0 epoch=1: it was rebuilt")
    assert connections.directory.last_end("mixed/r/0") == "rank dp=0 ended"
    assert connections.directory.last_end("mixed/other/0") == ""
    # What was reported before comes late, and says nothing.
    connections.see(report_of(epoch=1, state="stuck", last_end=""))
    assert connections["mixed/r/0"] is new
    assert (await connections.directory.choose("mixed", stage_of())).leader.report.epoch == 2


async def test_what_runs_where_a_replica_stops_goes_on_elsewhere_at_once() -> None:
    """Its ranks may be in a step that does not end, and are killed after seconds."""
    connections = Connections()
    connections.see(report_of(replica="a"))
    mailbox = await submit(connections, "r")
    connections.see(report_of(replica="a", state="stopping"), report_of(replica="b"))
    lost = await asyncio.wait_for(mailbox.get(), 10)
    assert (lost.finish_reason, lost.error) == ("died", "mixed/a/0 epoch=0: its replica stops")
    assert connections["mixed/a/0"].is_closed
    connections.see(report_of(replica="a", state="draining"), report_of(replica="b"))  # late
    assert await chosen(connections, 1) == ["mixed/b/0"]
    assert len(connections.all) == 2


async def test_nothing_leaves_for_a_leader_that_the_board_does_not_know() -> None:
    """It may have stopped where the end of its connection is not heard of."""
    connections = Connections()
    connections.see(report_of(replica="a"))
    await submit(connections, "r")
    connections.see(report_of(replica="a"), report_of(replica="b"))
    connections.see(report_of(replica="a", state="draining"))
    assert not [each for each in connections["mixed/a/0"].sent if isinstance(each, Leave)]
    connections.see(report_of(replica="a", state="draining"), report_of(replica="b"))
    assert connections["mixed/a/0"].sent[-1] == Leave(["r"], True)


async def test_all_that_a_leader_ran_is_lost_with_its_connection_and_once() -> None:
    connections = Connections()
    connections.see(report_of())
    mailboxes = {name: await submit(connections, name) for name in ("done", "left", "a", "b")}
    leader = connections["mixed/r/0"].leader
    leader.deliver(output_of(0, [7], "stop", "done"))
    leader.abort("left")
    for _ in range(2):
        leader.on_end("its connection ended")
    leader.abort("a")
    await asyncio.sleep(0)
    assert (await mailboxes["done"].get()).finish_reason == "stop"
    for name in "ab":
        lost = await mailboxes[name].get()
        assert (lost.request_id, lost.finish_reason) == (name, "died")
        assert lost.error == "mixed/r/0 epoch=0: its connection ended"
    for mailbox in mailboxes.values():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mailbox.get(), 0.01)
    assert connections["mixed/r/0"].is_closed and not connections["mixed/r/0"].aborted()


@pytest.mark.feature("P14")
async def test_a_lost_leader_is_chosen_once_it_is_reported_and_has_answered_again() -> None:
    connections = Connections(max_wait_s=0.01)
    connections.see(report_of())
    connections["mixed/r/0"].leader.on_end("its connection ended")
    with pytest.raises(NoLeader):
        await connections.directory.choose("mixed", stage_of())
    connections.silent = {"mixed/r/0"}
    connections.see(report_of())  # the board may not have heard of it yet
    assert len(connections.all) == 2
    with pytest.raises(NoLeader):
        await connections.directory.choose("mixed", stage_of())
    connections.see(report_of())
    assert len(connections.all) == 2, "it is being connected to"
    connections["mixed/r/0"].leader.on_welcome()
    assert await chosen(connections, 1) == ["mixed/r/0"]


async def test_a_board_that_was_made_anew_and_knows_nobody_costs_nothing() -> None:
    connections = Connections({"mixed": Routing.ROUND_ROBIN})
    connections.see(report_of(replica="a"), report_of(replica="b"))
    mailbox = await submit(connections, "r")
    connections.see()
    assert set(await chosen(connections, 2)) == {"mixed/a/0", "mixed/b/0"}
    connections["mixed/a/0"].leader.deliver(output_of(0, [7]))
    assert (await mailbox.get()).token_ids == [7]
    connections.see(report_of(replica="a"), report_of(replica="b"))
    assert len(connections.all) == 2
    # A replica that was replaced has another name, and is forgotten once it is lost.
    connections["mixed/b/0"].leader.on_end("its connection ended")
    connections.see(report_of(replica="a"))
    assert set(connections.directory._leaders) == {"mixed/a/0"}


# --- what goes to a leader, and what comes back ---


async def test_aborts_that_come_together_leave_in_frames_that_an_engine_takes() -> None:
    connections = Connections()
    connections.see(report_of())
    leader = connections["mixed/r/0"].leader
    names = [f"r{i}" for i in range(2 * MAX_ABORTS + 452)]
    for name in names:
        leader.abort(name)
    assert not connections["mixed/r/0"].aborted()
    await asyncio.sleep(0)
    frames = connections["mixed/r/0"].aborted()
    assert [len(frame) for frame in frames] == [MAX_ABORTS, MAX_ABORTS, 452]
    assert [name for frame in frames for name in frame] == names
    leader.abort("late")
    leader.on_end("its connection ended")  # before it could be told
    await asyncio.sleep(0)
    assert connections["mixed/r/0"].aborted() == frames


async def test_outputs_for_a_mailbox_that_was_let_go_are_dropped() -> None:
    connections = Connections()
    connections.see(report_of())
    mailbox, other = await submit(connections, "r"), await submit(connections, "other")
    leader = connections["mixed/r/0"].leader
    leader.abort("r")
    leader.deliver(output_of(0, [5]))
    leader.deliver(output_of(1, [], "abort"))
    leader.deliver(output_of(0, [6], "", "nobody's"))
    leader.deliver(output_of(0, [7], "", "other"))
    assert (await other.get()).token_ids == [7]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mailbox.get(), 0.01)
    assert leader.load.num_requests == 1


async def test_tokens_of_what_runs_are_counted_as_they_came() -> None:
    connections = Connections({"mixed": Routing.LEAST_TOKENS})
    connections.see(report_of(replica="a"), report_of(replica="b"))
    leader = (await connections.directory.choose("mixed", stage_of())).leader
    leader.submit(stage_of("long", [1] * 100), mailbox_of())
    assert await chosen(connections, 3) == ["mixed/b/0"] * 3
    leader.deliver(output_of(0, [5], "stop", "long"))
    assert set(await chosen(connections, 2)) == {"mixed/a/0", "mixed/b/0"}


async def test_a_directory_that_is_closed_ends_its_connections() -> None:
    connections = Connections()
    connections.see(report_of(replica="a"), report_of(replica="b"))
    mailbox = await submit(connections, "r")
    connections.directory.close()
    assert all(each.is_closed for each in connections.all)
    assert (await mailbox.get()).error == "mixed/a/0 epoch=0: it is not needed any more"
