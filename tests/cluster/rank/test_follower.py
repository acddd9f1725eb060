"""A follower runs its leader's steps and no others, and lets go of graphs before its group ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from local_ranks import config_of
from wire_structs import submit_of

from cluster.engine.divergence import StepDivergence
from cluster.group import membership
from cluster.group.context import RankContext, RankPlace
from cluster.group.rendezvous import LeaderEndpoints
from cluster.rank.follower import Follower
from cluster.rank.leader import Leader
from cluster.wire.group_messages import StepFrame


def group_of_two(oracle: Any, **compilation: Any) -> tuple[Leader, Follower]:
    """Load two ranks of one group, both in this process."""
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 24}
    context = RankContext(config_of(oracle.path, parallel=(2,), **sizes | compilation))
    endpoints = LeaderEndpoints(context)
    with ThreadPoolExecutor(1) as threads:
        following = replace(context, place=RankPlace(tp_rank=1))
        joining = threads.submit(Follower, following, endpoints.rendezvous)
        return Leader(context, endpoints), joining.result()


def end(leader: Leader) -> None:
    leader.stop()
    leader.run()  # ends at once, and its followers with it


class AlteringReceiver:
    """A follower's end of a channel that changes what comes through it."""

    def __init__(self, receiver: Any, alter: Callable[[StepFrame], StepFrame]) -> None:
        self._receiver = receiver
        self._alter = alter

    def receive(self) -> Any:
        frame = self._receiver.receive()
        return self._alter(frame) if isinstance(frame, StepFrame) else frame

    def close(self) -> None:
        self._receiver.close()


@pytest.mark.parametrize(
    ("field", "alter"),
    [
        ("token_ids", lambda plan: {"token_ids": [*plan.token_ids[:-1], plan.token_ids[-1] ^ 1]}),
        ("row_state", lambda plan: {"new_blocks": []}),
        ("step", lambda plan: {"step": plan.step + 1}),
    ],
)
def test_a_follower_whose_step_differs_does_not_run_it(
    oracle: Any, monkeypatch: pytest.MonkeyPatch, field: str, alter: Callable[[Any], dict[str, Any]]
) -> None:
    """It names rank, step and field; its leader is left waiting, for the owner to kill."""
    # Longer than a busy machine may hold a thread up: earlier collectives have this bound too.
    monkeypatch.setattr(membership, "COLLECTIVE_TIMEOUT_S", 2.0)
    leader, follower = group_of_two(oracle)

    def alter_fourth(frame: StepFrame) -> StepFrame:
        if frame.plan.step < 4:  # which admits the second sequence
            return frame
        return msgspec.structs.replace(
            frame, plan=msgspec.structs.replace(frame.plan, **alter(frame.plan))
        )

    follower.loop.receiver = AlteringReceiver(follower._receiver, alter_fourth)
    lost: list[BaseException] = []

    def serve() -> None:
        try:
            for step in range(8):
                if step in (0, 3):
                    leader.engine.submit(submit_of(str(step), [1, 2, 3, step]))
                leader.engine.step()
        except RuntimeError as error:  # nobody comes to its collective
            lost.append(error)

    leading = threading.Thread(target=serve, daemon=True)
    leading.start()
    step = 5 if field == "step" else 4
    wanted = rf"rank dp=0 tp=1 epoch=0 step {step}: {field}: wanted \d+, found \d+"
    with pytest.raises(StepDivergence, match=wanted):
        follower.run()
    assert follower.stats().step == 3
    leading.join(timeout=0.2)
    assert leading.is_alive()
    leading.join(timeout=60)
    assert "imed out" in str(lost)
    follower.stop()
    follower.run()  # closes
    end(leader)


def test_graphs_are_let_go_of_before_their_group_ends(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits in vain for the end of graphs that talk over the group."""
    ranks = group_of_two(oracle, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=(1, 2))
    leader, follower = ranks

    def num_graphs(rank: Leader | Follower) -> int:
        users: Any = rank.runner.forward._pools._users
        return sum(len(user._entries) for user in users)

    before = [num_graphs(rank) for rank in ranks]
    at_end: dict[int, int] = {}
    real = membership.GroupMembership.close

    def close(group: membership.GroupMembership) -> None:
        at_end[group.shard.rank] = num_graphs(ranks[group.shard.rank])
        real(group)

    monkeypatch.setattr(membership.GroupMembership, "close", close)
    following = threading.Thread(target=follower.run)
    following.start()
    end(leader)
    following.join(timeout=60)
    assert not following.is_alive()
    assert (before, at_end) == ([2, 2], {0: 0, 1: 0})
