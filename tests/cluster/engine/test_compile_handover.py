"""Going over to compiled steps: all ranks enter a stage at the same step, or one is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.compile_handover import CompileHandover
from cluster.engine.divergence import StepDivergence
from cluster.engine.lockstep import LockstepMachine, agree
from cluster.wire.messages import StepKind, Vote
from compile.config import CUDAGraphMode
from compile.dispatch import CapturedGraphs

GRAPHS = CapturedGraphs(CUDAGraphMode.FULL_DECODE_ONLY, (1, 2, 4))


def vote(step: int, handover: CompileHandover, **fields: Any) -> Vote:
    nothing: dict[str, Any] = {"num_tokens": 0, "num_seqs": 0, "max_query_len": 0}
    nothing |= {"kind": StepKind.NOTHING, "has_work": False, "draining": False}
    return Vote(
        epoch=0,
        step=step,
        stage=handover.stage,
        can_advance=handover.can_advance,
        **{**nothing, **fields},
    )


@pytest.mark.feature("X06")
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
        CompileHandover(last_stage=last_stage, num_followers=0 if rank else len(followers_at))
        for rank in range(len(loaded_at))
    ]
    first = max([*loaded_at, *followers_at])
    for step in range(1, first + last_stage + 3):
        for rank, at in zip(ranks, loaded_at, strict=True):
            if at == step:
                rank.on_loaded()
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


@pytest.mark.feature("X06")
def test_a_group_that_ends_enters_no_stage() -> None:
    handover = CompileHandover(last_stage=2)
    handover.on_loaded()
    agreed = agree([vote(1, handover, draining=True)], CapturedGraphs())
    assert (agreed.draining, agreed.has_work, agreed.stage) == (True, False, 0)


@pytest.mark.feature("X06")
def test_a_rank_accepts_the_stage_that_comes_next_once_it_has_loaded() -> None:
    handover = CompileHandover(last_stage=2)
    assert [stage for stage in range(4) if handover.accepts(stage)] == [0]
    handover.on_loaded()
    assert [stage for stage in range(4) if handover.accepts(stage)] == [0, 1]
    handover.enter(1)
    assert [stage for stage in range(4) if handover.accepts(stage)] == [1, 2]
    handover.enter(2, GRAPHS)
    assert [stage for stage in range(4) if handover.accepts(stage)] == [2]


@pytest.mark.feature("X06")
def test_a_leader_that_went_over_on_its_own_is_named_with_its_stage() -> None:
    mine, theirs = CompileHandover(last_stage=3), CompileHandover(last_stage=3)
    theirs.on_loaded()
    theirs.enter(1)
    machine = LockstepMachine(dp_rank=0, dp_size=2, epoch=0, handover=mine)
    machine.vote(vote(1, mine))
    machine.on_frame(1, vote(1, theirs))
    with pytest.raises(StepDivergence) as caught:
        machine.conclude()
    assert caught.value.parts == ("rank dp=1 tp=0 epoch=0", 1, "stage", 0, 1)


@pytest.mark.feature("X06")
def test_steps_dispatch_over_graphs_from_the_step_behind_the_last_stage_on() -> None:
    handover, modes = CompileHandover(last_stage=1), []
    machine = LockstepMachine(dp_rank=0, dp_size=1, epoch=0, handover=handover)
    handover.on_loaded()
    for step in (1, 2):
        decode: dict[str, Any] = {"kind": StepKind.DECODE, "num_tokens": 3, "num_seqs": 3}
        machine.vote(vote(step, handover, **decode, max_query_len=1, has_work=True))
        agreed = machine.conclude().agreed
        modes.append((agreed.stage, agreed.mode, agreed.batch.num_seqs))
        if not handover.is_over:
            handover.enter(agreed.stage, GRAPHS)
    assert modes == [(1, 0, 3), (1, 2, 4)]
