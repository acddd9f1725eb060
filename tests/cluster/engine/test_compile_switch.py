"""Going over to compiled steps: all ranks enter a stage at the same step, or one is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_structs import vote_of

from cluster.engine.compile_switch import CompileSwitch
from cluster.engine.divergence import StepDivergence
from cluster.engine.lockstep import LockstepMachine, agree
from cluster.wire.messages import StepKind, Vote
from compile.config import CUDAGraphMode
from compile.dispatch import CapturedGraphs

pytestmark = pytest.mark.feature("X06")

GRAPHS = CapturedGraphs(CUDAGraphMode.FULL_DECODE_ONLY, (1, 2, 4))


def vote(step: int, switch: CompileSwitch, **fields: Any) -> Vote:
    nothing = {"max_query_len": 0, "kind": StepKind.NOTHING, "has_work": False}
    stage = {"stage": switch.stage, "can_advance": switch.can_advance}
    return vote_of(0, step=step, **{**nothing, **stage, **fields})


@given(
    loaded_at=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    followers_at=st.lists(st.integers(1, 12), max_size=3),
    last_stage=st.integers(1, 5),
)
def test_ranks_whose_pieces_come_at_any_time_enter_each_stage_at_one_step(
    loaded_at: list[int], followers_at: list[int], last_stage: int
) -> None:
    """Rank 0 has followers; what they load is awaited too."""
    ranks = [
        CompileSwitch(last_stage=last_stage, num_followers=0 if rank else len(followers_at))
        for rank in range(len(loaded_at))
    ]
    first = max([*loaded_at, *followers_at])
    for step in range(1, first + last_stage + 3):
        for rank, at in zip(ranks, loaded_at, strict=True):
            if at == step:
                rank.is_loaded = True
        for _ in range(followers_at.count(step)):
            assert ranks[0].on_follower_loaded()
        before = ranks[0].stage
        agreed = agree([vote(step, rank) for rank in ranks], CapturedGraphs())
        # Entering a stage is work, so that ranks without any do it together; nothing else is.
        assert agreed.has_work == (agreed.stage == before + 1)
        assert agreed.stage == min(max(step - first + 1, 0), last_stage)
        for rank in ranks:
            assert rank.accepts(agreed.stage)
            if agreed.stage != rank.stage:
                rank.enter(agreed.stage, GRAPHS if agreed.stage == last_stage else None)
    assert all(rank.is_over and rank.captured == GRAPHS for rank in ranks)
    assert not ranks[0].on_follower_loaded(), "one more than there are"


def test_a_group_that_ends_enters_no_stage() -> None:
    switch = CompileSwitch(last_stage=2)
    switch.is_loaded = True
    agreed = agree([vote(1, switch, draining=True)], CapturedGraphs())
    assert (agreed.draining, agreed.has_work, agreed.stage) == (True, False, 0)


def test_a_rank_accepts_the_stage_that_comes_next_once_it_has_loaded() -> None:
    switch = CompileSwitch(last_stage=2)
    assert [stage for stage in range(4) if switch.accepts(stage)] == [0]
    switch.is_loaded = True
    assert [stage for stage in range(4) if switch.accepts(stage)] == [0, 1]
    switch.enter(1)
    assert [stage for stage in range(4) if switch.accepts(stage)] == [1, 2]
    switch.enter(2, GRAPHS)
    assert [stage for stage in range(4) if switch.accepts(stage)] == [2]


def test_a_leader_that_went_over_on_its_own_is_named_with_its_stage() -> None:
    mine, theirs = CompileSwitch(last_stage=3), CompileSwitch(last_stage=3)
    theirs.is_loaded = True
    theirs.enter(1)
    machine = LockstepMachine(dp_rank=0, dp_size=2, epoch=0, switch=mine)
    machine.vote(vote(1, mine))
    machine.on_frame(1, vote(1, theirs))
    with pytest.raises(StepDivergence) as caught:
        machine.conclude()
    assert caught.value.parts == ("rank dp=1 tp=0 epoch=0", 1, "stage", 0, 1)


def test_steps_dispatch_over_graphs_from_the_step_behind_the_last_stage_on() -> None:
    switch, modes = CompileSwitch(last_stage=1), []
    machine = LockstepMachine(dp_rank=0, dp_size=1, epoch=0, switch=switch)
    switch.is_loaded = True
    for step in (1, 2):
        decode: dict[str, Any] = {"kind": StepKind.DECODE, "num_tokens": 3, "num_seqs": 3}
        machine.vote(vote(step, switch, **decode, max_query_len=1, has_work=True))
        agreed = machine.conclude().agreed
        modes.append((agreed.stage, agreed.mode, agreed.batch.num_seqs))
        if not switch.is_over:
            switch.enter(agreed.stage, GRAPHS)
    assert modes == [(1, 0, 3), (1, 2, 4)]
