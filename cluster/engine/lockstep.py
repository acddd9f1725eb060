"""The lockstep of data-parallel leaders: they agree on each step, and know that they did.

1. Each leader votes what it would do in the step, and sends the vote to all others.
2. Who has all votes computes the agreement, a pure function of them (`agree`), and what dispatch
   makes of it. It sends both to all others, as its confirm.
3. Nobody enters a collective of the step before all confirms are there and equal to its own. They
   arrive while inputs are built, so that hardly anyone waits for them.
4. An agreement without work lets the group sleep. The first vote for the next step wakes it.

The one thing to know: there is no I/O here. `LockstepMachine` is told what arrived, in the order
of each connection, and says what to send and whom it waits for. A rank never hears a vote of two
steps ahead, because nobody can vote again before it has heard of everybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import msgspec

from cluster.engine.step_digest import StepDivergence
from cluster.lockstep_messages import PeerHello, StepConfirm, StepShape
from cluster.messages import StepAgreement, Vote

ShapeOf = Callable[[StepAgreement], StepShape]
"""Dispatch: pure, and the same function on every rank."""
AgreementOf = Callable[[Sequence[Vote]], StepAgreement]
"""What votes in rank order amount to: pure as well."""

PURE_DECODE = 1
"""`kind` of a step in which every sequence decodes as many tokens."""


NO_SHAPE = StepShape(graph_mode=0, num_tokens=0, num_seqs=0, is_padded=False)
"""Of an agreement that dispatch refuses."""


class PeersSilent(RuntimeError):
    """Leaders that a step waits for have not spoken in time; the message names them."""


def agree(votes: Sequence[Vote]) -> StepAgreement:
    """Return what the votes of all data-parallel ranks, in rank order, amount to.

    Invariant: epoch and step of all votes are equal.
    """
    columns = zip(*map(msgspec.structs.astuple, votes), strict=True)
    # In the order of Vote's fields.
    epochs, steps, kinds, num_tokens, num_seqs, query_lens, graphs, work, draining = columns
    is_end = all(draining)
    return StepAgreement(
        epoch=epochs[0],
        step=steps[0],
        kind=max(kinds),
        max_tokens=max(num_tokens),
        max_seqs=max(num_seqs),
        max_query_len=max(query_lens),
        graph_allowed=all(graphs),
        has_work=any(work) and not is_end,
        draining=is_end,
        num_tokens_across_dp=num_tokens,
    )


def get_dp_padding(agreed: StepAgreement, dp_rank: int) -> tuple[int, tuple[int, ...] | None]:
    """Return by how many tokens a rank is short of the longest, and all ranks' tokens.

    (0, None) for one rank (after ATOM's function of this name, without its all-reduce).
    """
    tokens = agreed.num_tokens_across_dp
    if len(tokens) == 1:
        return 0, None
    return agreed.max_tokens - tokens[dp_rank], tokens


def num_tokens_to_run(agreed: StepAgreement, shape: StepShape) -> tuple[int, ...]:
    """Return how many tokens each data-parallel rank runs, padding included.

    Where each runs its own, a rank without work runs one: it has as many collectives as the others.
    """
    if shape.is_padded:
        return (shape.num_tokens,) * len(agreed.num_tokens_across_dp)
    return tuple(max(num_tokens, 1) for num_tokens in agreed.num_tokens_across_dp)


class _Peer:
    """What has arrived from one leader and was not used yet.

    Invariant: frames so far were Vote(1), Confirm(1), Vote(2), ...; `step` is the last vote's.
    """

    def __init__(self, dp_rank: int, epoch: int, first_step: int) -> None:
        self.name = f"rank dp={dp_rank} tp=0 epoch={epoch}"
        self.epoch = epoch
        self.step = first_step - 1
        self.votes: deque[Vote] = deque()
        self.confirms: deque[StepConfirm] = deque()
        self.has_to_confirm = False

    def on_vote(self, vote: Vote) -> None:
        if self.has_to_confirm or vote.step != self.step + 1 or vote.epoch != self.epoch:
            self._refuse_vote(vote)
        if vote.kind == PURE_DECODE:
            # What dispatch relies on: an agreement on anything else has no shape.
            wanted = vote.num_seqs * vote.max_query_len
            self._check("num_tokens", wanted, vote.num_tokens, vote.step)
        self.step += 1
        self.has_to_confirm = True
        self.votes.append(vote)

    def _refuse_vote(self, vote: Vote) -> NoReturn:
        self._check("epoch", self.epoch, vote.epoch, vote.step)
        if self.has_to_confirm and vote.step == self.step:
            raise StepDivergence(self.name, vote.step, "votes", 1, 2)
        self._check("step", self.step + 1, vote.step, vote.step)
        raise StepDivergence(self.name, self.step, "confirms", 1, 0)

    def on_confirm(self, confirm: StepConfirm) -> None:
        agreed = confirm.agreed
        if agreed.epoch != self.epoch or agreed.step != self.step:
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
    """One leader's side of the lockstep.

    Call `vote`, then `on_frame` until `agreement` is there, `conclude`, and `on_frame` until
    `is_confirmed`; then the next step. Frames may come at any time.
    """

    def __init__(
        self,
        *,
        dp_rank: int,
        dp_size: int,
        epoch: int,
        shape_of: ShapeOf,
        agreement_of: AgreementOf = agree,
        first_step: int = 1,
    ) -> None:
        self._dp_rank = dp_rank
        self._epoch = epoch
        self._shape_of = shape_of
        self._agreement_of = agreement_of
        self._step = first_step - 1
        others = (rank for rank in range(dp_size) if rank != dp_rank)
        self._peers = {rank: _Peer(rank, epoch, first_step) for rank in others}
        self._mine: Vote | None = None
        self._confirm: StepConfirm | None = None

    def vote(self, vote: Vote) -> Vote:
        """Take this rank's vote for the next step; return it to be sent to all others.

        Raises:
            StepDivergence: it is of another epoch or step than comes next.
        """
        if vote.epoch != self._epoch or vote.step != self._step + 1:
            self._refuse_vote(vote)
        assert self._confirm is not None or self._mine is None, "the step before has not concluded"
        assert not any(map(self.lacks_confirm, self._peers)), "the step before is not confirmed"
        self._step += 1
        self._mine, self._confirm = vote, None
        return vote

    def _refuse_vote(self, vote: Vote) -> None:
        me, step = f"rank dp={self._dp_rank} tp=0 epoch={self._epoch}", self._step + 1
        for field, wanted in (("epoch", self._epoch), ("step", step)):
            if wanted != getattr(vote, field):
                raise StepDivergence(me, step, field, wanted, getattr(vote, field))

    def on_frame(self, dp_rank: int, frame: PeerHello | Vote | StepConfirm) -> None:
        """Take what arrived from a peer.

        Raises:
            StepDivergence: it is not what comes next, or not what this rank holds the step for;
                names rank, step and field.
        """
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
    def peers(self) -> Iterable[int]:
        """The other ranks, in order."""
        return self._peers

    def lacks_vote(self, dp_rank: int) -> bool:
        """Tell whether a rank's vote for this step has not arrived."""
        return self._peers[dp_rank].step < self._step

    def lacks_confirm(self, dp_rank: int) -> bool:
        """Tell whether a rank has not confirmed this step."""
        peer = self._peers[dp_rank]
        return peer.step < self._step or (peer.has_to_confirm and peer.step == self._step)

    @property
    def missing_votes(self) -> list[int]:
        """Ranks whose vote for this step has not arrived."""
        return [rank for rank in self._peers if self.lacks_vote(rank)]

    @property
    def missing_confirms(self) -> list[int]:
        """Ranks that have not confirmed this step."""
        return [rank for rank in self._peers if self.lacks_confirm(rank)]

    def conclude(self) -> StepConfirm:
        """Compute the agreement and what dispatch makes of it, to be sent to all others.

        Call it once, when no vote is missing.
        """
        assert self._mine is not None and not self.missing_votes
        votes = {rank: peer.votes.popleft() for rank, peer in self._peers.items()}
        votes[self._dp_rank] = self._mine
        agreed = self._agreement_of([votes[rank] for rank in sorted(votes)])
        self._confirm = StepConfirm(agreed, self._shape(agreed))
        for peer in self._peers.values():
            self._check_confirm(peer)
        return self._confirm

    def on_silence(self, missing: Iterable[int]) -> None:
        """Tell that those whom this rank waits for have not spoken for too long.

        Raises:
            PeersSilent: always; names them.
        """
        names = ", ".join(self._peers[rank].name for rank in missing)
        raise PeersSilent(f"{names} step {self._step}: wanted a frame in time, found none")

    def _shape(self, agreed: StepAgreement) -> StepShape:
        try:
            return self._shape_of(agreed)
        except ValueError:
            # It fails again when the step is run. Peers are told first what this rank agreed on:
            # they find the field that differs, if it is not a step that nobody can run.
            return NO_SHAPE

    def _check_confirm(self, peer: _Peer) -> None:
        mine = self._confirm
        if mine is None or not peer.confirms:
            return
        theirs = peer.confirms.popleft()
        if theirs == mine:
            return
        for part in ("agreed", "shape"):
            wanted, found = getattr(mine, part), getattr(theirs, part)
            for field in wanted.__struct_fields__:
                ours, other = getattr(wanted, field), getattr(found, field)
                if ours != other:
                    raise StepDivergence(peer.name, self._step, field, ours, other)
