"""The lockstep of data-parallel leaders: they agree on each step, and know that they did.

1. Each leader votes what it would do in the step, and sends the vote to all others.
2. Once it has all votes it computes the agreement, a pure function of them and of what all ranks
   captured (`agree`), and sends it to all others, as its confirm.
3. No leader enters a collective of the step before all confirms are there and equal to its own.
   They arrive while inputs are built, so it hardly ever waits. Its followers wait for it in
   their first collective.
4. An agreement without work lets the group sleep. The first vote for the next step wakes it.

`LockstepMachine` has no I/O. A rank never receives a vote from two steps ahead, because no rank
votes again before it has heard from all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol

from cluster.engine.compile_switch import CompileSwitch
from cluster.engine.divergence import StepDivergence
from cluster.engine.step_stats import StepStats
from cluster.wire.group_messages import PeerHello, StepConfirm, ToPeer
from cluster.wire.messages import StepAgreement, StepKind, Vote, decode_from, encode
from compile.config import CUDAGraphMode
from compile.dispatch import CapturedGraphs, decide


class PeersSilent(RuntimeError):
    """Leaders that a step waits for sent nothing in time; the message names them."""


def agree(votes: Sequence[Vote], captured: CapturedGraphs) -> StepAgreement:
    """Return how all data-parallel ranks run a step, from their votes in rank order. A rank with
    nothing scheduled runs dummy tokens, so that it joins the same collectives as the others.
    Invariant: epoch, step and stage of all votes are equal, and so is `captured` on all ranks."""
    is_end = all(vote.draining for vote in votes)
    advances = not is_end and all(vote.can_advance for vote in votes)
    has_work = advances or (not is_end and any(vote.has_work for vote in votes))
    kind = max(vote.kind for vote in votes)
    scheduled = tuple([vote.num_tokens for vote in votes])
    mode, batch = decide(
        is_uniform_decode=kind is StepKind.DECODE,
        num_tokens=max(scheduled),
        num_seqs=max(vote.num_seqs for vote in votes),
        query_len=max(vote.max_query_len for vote in votes),
        captured=captured,
    )
    if kind is StepKind.DECODE and not batch.uniform_decode:
        kind = StepKind.MIXED  # no graph holds the draft tokens of all ranks
    # Graphs need equal sizes, and so do steps in which all ranks decode; else each runs its own.
    if kind is StepKind.DECODE or mode is not CUDAGraphMode.NONE:
        across: tuple[int, ...] = (batch.num_tokens,) * len(votes)
    else:
        across = tuple([max(num_tokens, int(has_work)) for num_tokens in scheduled])
    return StepAgreement(
        epoch=votes[0].epoch,
        step=votes[0].step,
        kind=kind,
        mode=mode.value,
        batch=batch,
        num_tokens_across_dp=across,
        num_scheduled_tokens=scheduled,
        num_seqs_across_dp=tuple([vote.num_seqs for vote in votes]),
        has_work=has_work,
        draining=is_end,
        stage=votes[0].stage + advances,
    )


class AloneLockstep:
    """The agreement of a group of one: its own vote."""

    def __init__(self, switch: CompileSwitch | None = None) -> None:
        self._switch = switch or CompileSwitch()

    def agree(self, vote: Vote) -> StepAgreement:
        return agree((vote,), self._switch.captured)

    def wait_for_peers(self) -> None: ...


class VoteChannel(Protocol):
    """Ordered frames between this leader and each other one."""

    def send(self, body: bytes) -> None: ...

    def receive(self, dp_rank: int, *, is_patient: bool = True) -> bytes | None:
        """Wait for the next frame of a peer; None if there is none in time, or none yet if not
        `is_patient`."""


class JoinedLockstep:
    """The agreement of several leaders. Belongs to the step thread. Both methods raise
    `StepDivergence` if a peer is in another step or agreed on something else, and `PeersSilent` if
    one sends nothing in time."""

    def __init__(self, machine: LockstepMachine, channel: VoteChannel, stats: StepStats) -> None:
        self._machine = machine
        self._channel = channel
        self._stats = stats

    def agree(self, vote: Vote) -> StepAgreement:
        machine = self._machine
        self._channel.send(encode(machine.vote(vote)))
        self._stats.vote()
        while missing := machine.missing_votes:
            self._receive(missing)
        confirm = machine.conclude()
        self._stats.agree()
        self._channel.send(encode(confirm))
        return confirm.agreed

    def wait_for_peers(self) -> None:
        """Wait until every rank is known to have agreed on the same; call it once per agreement."""
        while missing := self._machine.missing_confirms:
            self._receive(missing)

    def _receive(self, missing: list[int]) -> None:
        machine, dp_rank = self._machine, missing[0]
        body = self._channel.receive(dp_rank)
        if body is None:
            others = [rank for rank in missing[1:] if not self._has_sent(rank)]
            machine.on_silence([dp_rank, *others])
        else:
            machine.on_frame(dp_rank, decode_from(f"rank dp={dp_rank} tp=0", body, ToPeer))

    def _has_sent(self, dp_rank: int) -> bool:
        return self._channel.receive(dp_rank, is_patient=False) is not None


class _Peer:
    """What has arrived from one leader and was not used yet. Invariant: frames so far were Vote(1),
    Confirm(1), Vote(2), ...; `step` is the last vote's."""

    def __init__(self, dp_rank: int, epoch: int) -> None:
        self.name = f"rank dp={dp_rank} tp=0 epoch={epoch}"
        self.epoch = epoch
        self.step = 0
        self.votes: deque[Vote] = deque()
        self.confirms: deque[StepConfirm] = deque()
        self.has_to_confirm = False

    def on_vote(self, vote: Vote) -> None:
        self._check("epoch", self.epoch, vote.epoch, vote.step)
        if self.has_to_confirm and vote.step == self.step:
            raise StepDivergence(self.name, vote.step, "votes", 1, 2)
        self._check("step", self.step + 1, vote.step, vote.step)
        if self.has_to_confirm:
            raise StepDivergence(self.name, self.step, "confirms", 1, 0)
        if vote.kind is StepKind.DECODE:
            # What `decide` relies on.
            least = vote.num_seqs - 1 + vote.max_query_len
            most = vote.num_seqs * vote.max_query_len
            if not least <= vote.num_tokens <= most:
                wanted = least if least == most else f"{least} to {most}"
                raise StepDivergence(self.name, vote.step, "num_tokens", wanted, vote.num_tokens)
        self.step += 1
        self.has_to_confirm = True
        self.votes.append(vote)

    def on_confirm(self, confirm: StepConfirm) -> None:
        agreed = confirm.agreed
        self._check("epoch", self.epoch, agreed.epoch, agreed.step)
        self._check("step", self.step, agreed.step, agreed.step)
        if not self.has_to_confirm:
            raise StepDivergence(self.name, self.step, "confirms", 1, 2)
        self.has_to_confirm = False
        self.confirms.append(confirm)

    def _check(self, field: str, wanted: int, found: int, step: int) -> None:
        if wanted != found:
            raise StepDivergence(self.name, step, field, wanted, found)


class LockstepMachine:
    """One leader's side of the lockstep. Call `vote`, then `on_frame` until `missing_votes` is
    empty, `conclude`, and `on_frame` until `missing_confirms` is empty; then the next step. What
    does not come next, or disagrees with this rank's view of the step, is a `StepDivergence`."""

    def __init__(self, *, dp_rank: int, dp_size: int, epoch: int, switch: CompileSwitch) -> None:
        self._dp_rank = dp_rank
        self._epoch = epoch
        self._switch = switch
        self._step = 0
        self._peers = {rank: _Peer(rank, epoch) for rank in range(dp_size) if rank != dp_rank}
        self._mine: Vote | None = None
        self._confirm: StepConfirm | None = None

    def vote(self, vote: Vote) -> Vote:
        """Take this rank's vote for the next step; return it to be sent to all others."""
        step = self._step + 1
        for field, wanted in (("epoch", self._epoch), ("step", step)):
            if wanted != (found := getattr(vote, field)):
                me = f"rank dp={self._dp_rank} tp=0 epoch={self._epoch}"
                raise StepDivergence(me, step, field, wanted, found)
        assert self._confirm is not None or self._mine is None, "the step before has not concluded"
        assert not self.missing_confirms, "the step before is not confirmed"
        self._step += 1
        self._mine, self._confirm = vote, None
        return vote

    def on_frame(self, dp_rank: int, frame: PeerHello | Vote | StepConfirm) -> None:
        peer = self._peers[dp_rank]
        if isinstance(frame, Vote):
            peer.on_vote(frame)
            if peer.step > self._step + 1:
                # It cannot have heard this rank's vote for the step before.
                raise StepDivergence(peer.name, peer.step, "step", self._step + 1, peer.step)
        elif isinstance(frame, StepConfirm):
            peer.on_confirm(frame)
            self._check_confirm(peer)
        else:
            raise StepDivergence(peer.name, peer.step, "frame", "a vote or confirm", "a hello")

    @property
    def missing_votes(self) -> list[int]:
        return [rank for rank, peer in self._peers.items() if peer.step < self._step]

    @property
    def missing_confirms(self) -> list[int]:
        return [
            rank
            for rank, peer in self._peers.items()
            if peer.step < self._step or (peer.has_to_confirm and peer.step == self._step)
        ]

    def conclude(self) -> StepConfirm:
        """Compute the agreement, to be sent to all others. Call it when no vote is missing."""
        assert self._mine is not None and not self.missing_votes
        votes = {rank: peer.votes.popleft() for rank, peer in self._peers.items()}
        for rank, vote in votes.items():
            if vote.stage != self._mine.stage:
                name = self._peers[rank].name
                raise StepDivergence(name, self._step, "stage", self._mine.stage, vote.stage)
        votes[self._dp_rank] = self._mine
        self._confirm = StepConfirm(self._agree([votes[rank] for rank in sorted(votes)]))
        for peer in self._peers.values():
            self._check_confirm(peer)
        return self._confirm

    def on_silence(self, missing: Iterable[int]) -> NoReturn:
        """Give up a step that lacks frames for too long; name who did not send them."""
        names = ", ".join(self._peers[rank].name for rank in missing)
        raise PeersSilent(f"{names} step {self._step}: wanted a frame in time, found none")

    def _agree(self, votes: Sequence[Vote]) -> StepAgreement:
        return agree(votes, self._switch.captured)

    def _check_confirm(self, peer: _Peer) -> None:
        mine = self._confirm
        if mine is None or not peer.confirms:
            return
        theirs = peer.confirms.popleft()
        if theirs == mine:
            return
        for field in StepAgreement.__struct_fields__:
            ours, other = getattr(mine.agreed, field), getattr(theirs.agreed, field)
            if ours != other:
                raise StepDivergence(peer.name, self._step, field, ours, other)
