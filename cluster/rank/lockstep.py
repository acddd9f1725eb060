"""Agreement on a step among data-parallel leaders.

What follows an agreement is a pure function of it; no rank branches on a local value around a
collective. A rank without peers agrees with itself.
"""

from __future__ import annotations

from cluster.messages import StepAgreement, Vote


class AloneLockstep:
    """The agreement of a group of one: its own vote."""

    def agree(self, vote: Vote) -> StepAgreement:
        """Return the agreement that a single vote amounts to."""
        return StepAgreement(
            epoch=vote.epoch,
            step=vote.step,
            kind=vote.kind,
            max_tokens=vote.num_tokens,
            max_seqs=vote.num_seqs,
            max_query_len=vote.max_query_len,
            graph_allowed=vote.graph_allowed,
            has_work=vote.has_work,
            draining=vote.draining,
        )


class Lockstep:
    """Where a rank gets the lockstep that its group's size asks for."""

    @staticmethod
    def alone() -> AloneLockstep:
        """Return the lockstep of a group with one data-parallel rank."""
        return AloneLockstep()
