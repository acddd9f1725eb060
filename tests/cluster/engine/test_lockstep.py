"""The lockstep without I/O: any order of frames gives one agreement, any wrong frame a name."""

from __future__ import annotations

import dataclasses
import pickle
import random
import time
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_structs import plan_of, vote_of

from cluster.engine.compile_switch import CompileSwitch
from cluster.engine.divergence import StepDivergence
from cluster.engine.lockstep import LockstepMachine, PeersSilent, agree
from cluster.engine.step_stats import StepStats
from cluster.rank.runner import get_dp_padding
from cluster.wire.group_messages import StepConfirm
from cluster.wire.messages import StepAgreement, StepKind, Vote
from compile.config import CUDAGraphMode
from compile.dispatch import CapturedGraphs

EPOCH = 3


NO_GRAPHS = CapturedGraphs()
GRAPHS = CapturedGraphs(CUDAGraphMode.FULL_AND_PIECEWISE, (1, 2, 4, 8), (4, 16, 64))


def vote(step: int = 1, **fields: Any) -> Vote:
    return vote_of(2, step=step, **{"epoch": EPOCH, **fields})


@st.composite
def votes_of(draw: st.DrawFn, step: int) -> Vote:
    kind = draw(st.sampled_from(StepKind))
    num_seqs = draw(st.integers(1, 8)) if kind else 0
    longest = {0: 0, 1: 1, 2: draw(st.integers(2, 40))}[kind]
    return vote(
        step,
        kind=kind,
        num_seqs=num_seqs,
        num_tokens=num_seqs - 1 + longest if num_seqs else 0,
        max_query_len=longest,
        has_work=kind > 0,
        draining=draw(st.booleans()),
    )


class Leader:
    """One machine in a simulated network, doing what the driver over sockets does."""

    def __init__(self, rank: int, size: int, votes: list[Vote]) -> None:
        self.machine = LockstepMachine(
            dp_rank=rank, dp_size=size, epoch=EPOCH, switch=CompileSwitch(GRAPHS)
        )
        self.votes = deque(votes)
        self.agreements: list[StepAgreement] = []
        self.state = "voting"

    def advance(self) -> list[Any]:
        """Do what can be done; return what is sent to all peers, in order."""
        sent: list[Any] = []
        while True:
            if self.state == "voting" and self.votes:
                sent.append(self.machine.vote(self.votes.popleft()))
                self.state = "agreeing"
            elif self.state == "agreeing" and not self.machine.missing_votes:
                sent.append(self.machine.conclude())
                self.agreements.append(sent[-1].agreed)
                self.state = "confirming"
            elif self.state == "confirming" and not self.machine.missing_confirms:
                self.state = "voting"
            else:
                return sent


def run_network(rounds: list[list[Vote]], seed: int) -> list[Leader]:
    """Deliver frames in a random order, which keeps that of each connection."""
    size, rng = len(rounds[0]), random.Random(seed)
    leaders = [Leader(r, size, [votes[r] for votes in rounds]) for r in range(size)]
    links: dict[tuple[int, int], deque[Any]] = {
        (a, b): deque() for a in range(size) for b in range(size) if a != b
    }
    idle = set(range(size))
    while idle or any(links.values()):
        starts = sorted(idle)
        ready = [link for link, queue in links.items() if queue]
        choice = rng.randrange(len(starts) + len(ready))
        if choice < len(starts):
            rank = starts[choice]
            idle.discard(rank)
        else:
            sender, rank = ready[choice - len(starts)]
            leaders[rank].machine.on_frame(sender, links[sender, rank].popleft())
            if rank in idle:  # it has not voted yet: frames wait for it
                continue
        for frame in leaders[rank].advance():
            for peer in range(size):
                if peer != rank:
                    links[rank, peer].append(frame)
    return leaders


@pytest.mark.feature("P02")
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32))
def test_whatever_the_order_of_frames_all_ranks_agree_on_the_same(
    data: st.DataObject, size: int, num_steps: int, seed: int
) -> None:
    rounds = [[data.draw(votes_of(step)) for _ in range(size)] for step in range(1, num_steps + 1)]
    leaders = run_network(rounds, seed)
    for leader in leaders:
        assert leader.agreements == leaders[0].agreements
        assert leader.state == "voting"
    assert [agreed.step for agreed in leaders[0].agreements] == [*range(1, num_steps + 1)]
    for votes, agreed in zip(rounds, leaders[0].agreements, strict=True):
        assert agreed.num_scheduled_tokens == tuple(v.num_tokens for v in votes)
        assert agreed.draining == all(v.draining for v in votes)
        assert agreed.has_work == (any(v.has_work for v in votes) and not agreed.draining)
        check_sizes(votes, agreed)


def check_sizes(votes: list[Vote], agreed: StepAgreement) -> None:
    """All or none replay a graph, of a size that holds every rank's batch."""
    tokens, seqs = max(v.num_tokens for v in votes), max(v.num_seqs for v in votes)
    across = agreed.num_tokens_across_dp
    is_decode = all(v.kind <= StepKind.DECODE for v in votes)
    assert (agreed.kind <= StepKind.DECODE) == is_decode
    assert all(ran >= asked for ran, asked in zip(across, agreed.num_scheduled_tokens, strict=True))
    assert not agreed.has_work or min(across) > 0
    if not tokens:
        assert agreed.mode == CUDAGraphMode.NONE.value
    elif is_decode:
        assert agreed.mode == CUDAGraphMode.FULL.value
        assert agreed.batch.num_seqs == min(size for size in GRAPHS.batch_sizes if size >= seqs)
    elif tokens <= GRAPHS.token_counts[-1]:
        assert agreed.mode == CUDAGraphMode.PIECEWISE.value
        assert agreed.batch.num_tokens == min(
            size for size in GRAPHS.token_counts if size >= tokens
        )
    if agreed.mode or agreed.kind is StepKind.DECODE:
        assert set(across) == {agreed.batch.num_tokens}
    else:
        assert agreed.batch.num_seqs is None


@pytest.mark.feature("C07")
def test_ranks_decode_together_whoever_drafts_where_a_graph_holds_all_drafts() -> None:
    """Of three tokens a sequence, one of them drawn; without such a graph prompts' graphs do."""
    graphs = dataclasses.replace(GRAPHS, draft_batch_sizes=(1, 4), query_len=3)
    drafted = vote(num_tokens=5, num_seqs=2, max_query_len=3)
    idle = vote(num_tokens=0, num_seqs=0, max_query_len=0, kind=StepKind.NOTHING, has_work=False)
    full, piecewise = CUDAGraphMode.FULL.value, CUDAGraphMode.PIECEWISE.value
    for other in (drafted, vote(), idle):
        agreed = agree([drafted, other], graphs)
        assert (agreed.kind, agreed.mode) == (StepKind.DECODE, full)
        assert (agreed.batch, agreed.num_tokens_across_dp) == ((12, 4, True), (12, 12))
        agreed = agree([drafted, other], GRAPHS)
        assert (agreed.kind, agreed.mode) == (StepKind.MIXED, piecewise)
        assert agreed.num_tokens_across_dp == (16, 16)
    # Nobody drafts: one token each.
    assert agree([vote(), idle], graphs).batch == (2, 2, True)


def machine(size: int = 2) -> LockstepMachine:
    made = LockstepMachine(dp_rank=0, dp_size=size, epoch=EPOCH, switch=CompileSwitch(NO_GRAPHS))
    made.vote(vote())
    return made


CONFIRM = StepConfirm(agree((vote(), vote()), NO_GRAPHS))


@pytest.mark.feature("P13")
@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([vote(epoch=4)], "step 1: epoch: wanted 3, found 4"),
        ([vote(step=2)], "step 2: step: wanted 1, found 2"),
        ([vote(step=0)], "step 0: step: wanted 1, found 0"),
        ([vote(), vote()], "step 1: votes: wanted 1, found 2"),
        ([vote(), vote(step=2)], "step 1: confirms: wanted 1, found 0"),
        ([CONFIRM], "step 1: step: wanted 0, found 1"),
        ([vote(), CONFIRM, CONFIRM], "step 1: confirms: wanted 1, found 2"),
        ([vote(), CONFIRM, vote(2), CONFIRM], "step 1: step: wanted 2, found 1"),
    ],
)
def test_a_frame_that_does_not_come_next_is_named(frames: list[Any], message: str) -> None:
    mine = machine()
    with pytest.raises(StepDivergence, match=rf"^rank dp=1 tp=0 epoch=3 {message}$"):
        for frame in frames:
            mine.on_frame(1, frame)


@pytest.mark.feature("P13")
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "field", [name for name in StepAgreement.__struct_fields__ if name not in ("epoch", "step")]
)
def test_a_peer_that_made_something_else_of_the_votes_is_named_by_the_field(
    field: str, is_late: bool
) -> None:
    agreed = agree((vote(), vote()), NO_GRAPHS)
    value = getattr(agreed, field)
    other: Any = (2, 3) if isinstance(value, tuple) else 1 - value
    wrong = StepConfirm(msgspec.structs.replace(agreed, **{field: other}))
    mine = machine()
    mine.on_frame(1, vote())
    message = rf"^rank dp=1 tp=0 epoch=3 step 1: {field}: wanted .*, found .*$"
    if is_late:
        mine.conclude()
        with pytest.raises(StepDivergence, match=message):
            mine.on_frame(1, wrong)
    else:
        mine.on_frame(1, wrong)
        with pytest.raises(StepDivergence, match=message):
            mine.conclude()


def test_a_leader_that_skips_a_step_of_its_own_is_named() -> None:
    mine = LockstepMachine(dp_rank=1, dp_size=2, epoch=EPOCH, switch=CompileSwitch(NO_GRAPHS))
    with pytest.raises(StepDivergence, match=r"^rank dp=1 tp=0 epoch=3 step 1: step: wanted 1, fo"):
        mine.vote(vote(step=2))
    with pytest.raises(StepDivergence, match=r"epoch: wanted 3, found 2"):
        mine.vote(vote(epoch=2))


def test_who_is_waited_for_in_vain_is_named() -> None:
    mine = machine(4)
    mine.on_frame(2, vote())
    assert mine.missing_votes == [1, 3]
    with pytest.raises(PeersSilent, match=r"^rank dp=1 .*, rank dp=3 tp=0 epoch=3 step 1: wanted"):
        mine.on_silence(mine.missing_votes)


def test_a_divergence_prints_the_steps_before_it_and_ends_with_its_name() -> None:
    log, plan = StepStats(time.monotonic), plan_of([])
    for step in range(1, 1201):
        log.begin(plan, agree((vote(step), vote(step, num_tokens=3, num_seqs=3)), GRAPHS), 0)
    assert [record["step"] for record in log.as_dicts()] == [*range(201, 1201)]
    error = StepDivergence("rank dp=1 tp=0 epoch=3", 1201, "kind", 1, 2).after(log.tail())
    *told, last = str(error).splitlines()
    assert last == "rank dp=1 tp=0 epoch=3 step 1201: kind: wanted 1, found 2"
    assert told[-1].startswith("ran epoch 3 step 1200: kind=1 mode=2 graph_bs=4 num_tokens=4 ")
    assert "num_scheduled_tokens=(2, 3)" in told[-1]
    assert len(told) == 8
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # from a process


@pytest.mark.feature("P03")
@given(st.lists(st.integers(0, 500), min_size=1, max_size=5), st.booleans())
def test_padding_fills_up_to_what_the_rank_runs(tokens: list[int], is_decode: bool) -> None:
    kind = StepKind.DECODE if is_decode else StepKind.MIXED
    votes = [
        vote_of(
            *((n, 1) if is_decode else (min(n, 1), n)),
            kind=kind if n else StepKind.NOTHING,
            has_work=n > 0,
        )
        for n in tokens
    ]
    agreed = agree(votes, NO_GRAPHS)
    longest = max(tokens)
    # A rank without work runs something: it would miss a collective.
    run = tuple(longest if is_decode else max(1, n) if longest else 0 for n in tokens)
    for rank, own in enumerate(tokens):
        assert own + get_dp_padding(agreed, rank) == run[rank]
    assert agreed.num_tokens_across_dp == run
