"""Ranks join through a store, agree on numbers, and wait for nobody without a bound."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from local_ranks import CREDENTIALS, HOST, open_endpoints, run_ranks
from torch._C._distributed_c10d import ProcessGroupGloo

from cluster.config import EngineConfig, ParallelConfig
from cluster.group import membership
from cluster.group.context import RankContext, RankPlace
from cluster.group.links import ConnectLink, LinkAddress
from cluster.group.membership import GroupMembership
from cluster.group.rendezvous import LeaderEndpoints, Rendezvous
from cluster.rank.rank import join_group
from cluster.wire.group_messages import LeaderHello
from cluster.wire.messages import PROTOCOL_VERSION, FrameError
from cluster.wire.sockets import end_context


def test_ranks_agree_with_all_and_sum_among_their_own_or_across() -> None:
    def work(group: GroupMembership) -> tuple[int, ...]:
        one = torch.full((1,), 10.0**group.rank)
        sums = [int(each.all_reduce(one.clone())) for each in (group.shard, group.shard.data)]
        return group.all_reduce_min("n", 10 - group.rank), *sums

    found = run_ranks(work, tp=2, dp=2)
    assert found == [(7, 11, 101), (7, 11, 1010), (7, 1100, 101), (7, 1100, 1010)]


def test_ranks_of_one_node_meet_where_no_other_node_reaches() -> None:
    """Their own address is of no use to them: nobody has this one."""

    def work(group: GroupMembership) -> list[float]:
        return group.shard.all_reduce(torch.ones(2)).tolist()

    assert run_ranks(work, tp=2, host="192.0.2.1", is_on_one_node=True) == [[2.0, 2.0]] * 2
    config = EngineConfig("model", 64, parallel=ParallelConfig(2, 2))
    context = RankContext(config, host="192.0.2.1", is_on_one_node=True)
    endpoints = LeaderEndpoints(context)
    offer, listener = endpoints.rendezvous, endpoints.listener
    assert listener.getsockname()[0] == offer.store_host == "127.0.0.1"
    assert [address.tcp for address in (*offer.channels, *offer.later)] == ["", ""]
    listener.close()
    end_context(endpoints.sockets, "test", linger=0)


def test_ranks_of_two_nodes_meet_by_ipv6() -> None:
    """The store, the tensors and the channels of followers and leaders."""

    def work(group: GroupMembership) -> list[float]:
        return group.shard.all_reduce(torch.ones(2)).tolist()

    assert run_ranks(work, tp=2, dp=2, host="::1") == [[2.0, 2.0]] * 4
    config = EngineConfig("model", 64, parallel=ParallelConfig(2, 2))
    endpoints = LeaderEndpoints(RankContext(config, host="::1"))
    offer = endpoints.rendezvous
    assert offer.store_host == "::1"
    for address in (*offer.channels, *offer.later):
        assert address.tcp.startswith("tcp://[::1]:")
        link = ConnectLink(endpoints.sockets, CREDENTIALS, "rank", replace(address, node="another"))
        link.close()
    endpoints.listener.close()
    end_context(endpoints.sockets, "test", linger=0)


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (LeaderHello(PROTOCOL_VERSION, "test", 1, "n"), "epoch: wanted 1, found 0"),
        (LeaderHello(PROTOCOL_VERSION, "other", 0, "n"), "config_hash: wanted other, found test"),
        (LeaderHello(99, "test", 0, "n"), f"protocol: wanted 99, found {PROTOCOL_VERSION}"),
        (
            LeaderHello(PROTOCOL_VERSION, "test", 0, "m"),
            "nonce: wanted the store of this group, found another group's",
        ),
    ],
)
def test_a_rank_at_the_store_of_another_group_is_told_so_by_name(
    hello: LeaderHello, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LOAD_TIMEOUT_S", 1.0)  # the leader joins in vain
    listener = socket.create_server((HOST, 0))
    where = Rendezvous(HOST, listener.getsockname()[1], "n", (LinkAddress("", "", ""),))
    ours = where.hello(CREDENTIALS, 0)
    with ThreadPoolExecutor(1) as threads:
        join = GroupMembership.join
        leader = threads.submit(join, where, 0, "cpu", HOST, hello=ours, listener=listener)
        with pytest.raises(FrameError, match=f"^{message}$"):
            join(where, 1, "cpu", HOST, hello=hello)
        with pytest.raises(TimeoutError, match=r"joining: wanted all 2 ranks .*\[1\]"):
            leader.result(timeout=20)


def test_a_rank_may_start_later_than_a_collective_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "COLLECTIVE_TIMEOUT_S", 2.0)
    join = GroupMembership.join

    def late(where: Rendezvous, rank: int, *arguments: Any, **named: Any) -> GroupMembership:
        if rank:
            time.sleep(4)
        return join(where, rank, *arguments, **named)

    monkeypatch.setattr(GroupMembership, "join", late)
    assert run_ranks(sum_of_ones, tp=2) == [[2.0, 2.0]] * 2


def test_a_rank_that_never_comes_to_an_agreement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(group: GroupMembership) -> None:
        if group.rank == 0:
            monkeypatch.setattr(membership, "LOAD_TIMEOUT_S", 0.3)  # both have joined
            group.all_reduce_min("num_blocks", 1)

    wanted = r"num_blocks: wanted all 2 ranks in 0\.3 s, found none of \[1\]"
    with pytest.raises(TimeoutError, match=wanted):
        run_ranks(work, tp=2)


def sum_of_ones(group: GroupMembership) -> list[float]:
    return group.shard.all_reduce(torch.ones(2)).tolist()


def test_ranks_of_one_node_sum_through_memory_that_they_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", None)
    assert run_ranks(sum_of_ones, tp=2) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("lacks", ["kernels", "the first rank's memory", "a node in common"])
def test_ranks_of_which_one_cannot_share_memory_all_sum_through_sockets(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter([True, False])
    if lacks == "kernels":
        monkeypatch.setattr(membership, "can_share", lambda: next(calls))
    elif lacks == "a node in common":
        monkeypatch.setattr(membership, "node_id", lambda: "this" if next(calls) else "that")
    else:

        def refused(*_: int) -> memoryview:
            raise PermissionError

        monkeypatch.setattr(membership, "open_shared", refused)
    monkeypatch.setattr(membership, "ShmCommunicator", None)
    assert run_ranks(sum_of_ones, tp=2) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_collective_without_a_peer_ends_in_seconds(
    has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "COLLECTIVE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(membership, "can_share", lambda: has_memory)
    has_ended = threading.Event()

    def work(group: GroupMembership) -> float:
        began = time.monotonic()
        if group.shard.rank == 0:
            with pytest.raises(RuntimeError, match="imed out"):
                group.shard.all_reduce(torch.ones(1))
            has_ended.set()
        else:
            assert has_ended.wait(60), "its peer waits on"
        return time.monotonic() - began

    waited, _ = run_ranks(work, tp=2)
    assert waited > 1.8


class StandInNCCL:
    """Takes the place of `ProcessGroupNCCL`: a gloo group that waits as long as it was told."""

    class Options:
        _timeout = timedelta(minutes=30)

    timeouts: ClassVar[list[timedelta]] = []

    def __new__(cls, store: Any, rank: int, size: int, options: Options) -> Any:
        cls.timeouts.append(options._timeout)
        return ProcessGroupGloo(store, rank, size, options._timeout)


def test_nccl_waits_no_longer_than_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", StandInNCCL, raising=False)
    monkeypatch.setattr(StandInNCCL, "timeouts", [])

    def work(group: GroupMembership) -> list[float]:
        assert group.shard.group is not None
        x, backend = torch.ones(1), group.shard.group._get_backend(torch.device("cuda"))
        backend.allreduce([x]).wait()  # which the group does for a tensor on a GPU
        return x.tolist()

    assert run_ranks(work, tp=2, device="cuda") == [[2.0], [2.0]]
    assert StandInNCCL.timeouts == [timedelta(seconds=membership.COLLECTIVE_TIMEOUT_S)] * 2
    assert membership.COLLECTIVE_TIMEOUT_S <= 60


def test_a_rank_that_never_comes_is_not_waited_for_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "END_TIMEOUT_S", 0.2)

    def work(group: GroupMembership) -> None:
        if group.shard.rank == 1:
            time.sleep(1.0)

    began = time.monotonic()
    run_ranks(work, tp=2)
    assert time.monotonic() - began < 60


@pytest.mark.feature("O02")
@pytest.mark.parametrize("wanted", [True, False])
def test_gpus_map_no_memory_where_all_is_left_to_nccl(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, wanted: bool
) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", StandInNCCL, raising=False)
    asked: list[int] = []
    monkeypatch.setattr(membership, "share_gpu_memory", lambda _, shard: asked.append(shard.rank))
    config = EngineConfig(str(tiny_checkpoint), 64, device="cuda", has_custom_all_reduce=wanted)
    config = replace(config, parallel=ParallelConfig(2))

    def join(tp_rank: int) -> GroupMembership:
        context = RankContext(config, RankPlace(tp_rank=tp_rank), HOST, credentials=CREDENTIALS)
        return join_group(context, where, None if tp_rank else opened.listener)

    with open_endpoints(2, 1) as ((opened,), (where,)), ThreadPoolExecutor(2) as threads:
        # None is closed while the other's last connection is still being made.
        joined = list(threads.map(join, range(2)))
        list(threads.map(GroupMembership.close, joined))
    assert sorted(asked) == ([0, 1] if wanted else [])
