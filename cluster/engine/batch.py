"""A step in the making: the sequences that the scheduler chose, until they are a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.engine.sequence import Sequence
from cluster.messages import Admission, NewBlocks, PromptTargets, RowRules, StepPlan


@dataclass(slots=True)
class Batch:
    """The sequences of one step with how many tokens each computes.

    Invariant: `budget` is what is left of the step's tokens; sequences with a single new token
    come first in the plan, so that ranks find all decodes together.
    """

    budget: int
    new_blocks: list[NewBlocks] = field(default_factory=list)
    singles: list[Sequence] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)

    def add(self, seq: Sequence, num_new: int) -> None:
        """Let a sequence compute its next `num_new` tokens in this step."""
        self.budget -= num_new
        if num_new == 1:
            self.singles.append(seq)
        else:
            self.chunks.append(seq)
            self.chunk_sizes.append(num_new)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences in the plan's order."""
        return self.singles + self.chunks

    def plan(self, epoch: int, step: int) -> StepPlan:
        """Return the plan, with what ranks must be told of rows that are new to them."""
        sequences = self.sequences
        num_computed = [seq.num_computed_tokens for seq in sequences]
        num_new = [1] * len(self.singles) + self.chunk_sizes
        return StepPlan(
            epoch=epoch,
            step=step,
            admitted=self._admit(sequences),
            new_blocks=self.new_blocks,
            rows=[seq.row for seq in sequences],
            num_computed=num_computed,
            num_new=num_new,
            output_index=[
                total - seq.num_prompt_tokens
                if start + new == (total := len(seq.token_ids))
                else -1
                for seq, start, new in zip(sequences, num_computed, num_new, strict=True)
            ],
            token_ids=self._token_ids(),
            num_decodes=len(self.singles),
            prompt_targets=[
                _prompt_targets(i, seq, start, new)
                for i, (seq, start, new) in enumerate(
                    zip(sequences, num_computed, num_new, strict=True)
                )
                if seq.wants_prompt_logprobs and start + 1 < seq.num_prompt_tokens
            ],
        )

    def _admit(self, sequences: list[Sequence]) -> list[Admission]:
        # Told only now: an empty plan may never reach the ranks.
        admitted = [seq for seq in sequences if not seq.is_on_ranks]
        for seq in admitted:
            self.new_blocks.append(NewBlocks(seq.row, 0, seq.block_table.copy()))
            seq.is_on_ranks = True
        return [_admission(seq) for seq in admitted]

    def _token_ids(self) -> list[int]:
        token_ids = [seq.token_ids[seq.num_computed_tokens] for seq in self.singles]
        for seq, size in zip(self.chunks, self.chunk_sizes, strict=True):
            start = seq.num_computed_tokens
            token_ids += seq.token_ids[start : start + size]
        return token_ids


def _admission(seq: Sequence) -> Admission:
    sampling = seq.request.sampling
    return Admission(
        row=seq.row,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        num_logprobs=sampling.num_logprobs,
        rules=_row_rules(seq),
    )


def _row_rules(seq: Sequence) -> RowRules | None:
    sampling = seq.request.sampling
    if (rules := sampling.rules) is None:
        return None
    num_computed = seq.num_computed_tokens if rules.has_penalties else 0
    return RowRules(
        rules=rules,
        stop_token_ids=sampling.stop_token_ids if rules.min_tokens else (),
        num_prompt_tokens=seq.num_prompt_tokens,
        computed_token_ids=seq.token_ids[:num_computed],
    )


def _prompt_targets(index: int, seq: Sequence, start: int, num_new: int) -> PromptTargets:
    end = min(start + num_new + 1, seq.num_prompt_tokens)
    wanted = seq.request.sampling.num_prompt_logprobs
    return PromptTargets(index, seq.token_ids[start + 1 : end], wanted)
