"""A sequence: one request's tokens and how far an engine has got with them; and a step's `Batch` of
them. `token_ids` only ever grows, so whatever was derived from its head stays right."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.grammar.matcher import CompiledGrammar, MaskedRow, Matcher
from cluster.wire.messages import (
    PENDING,
    EngineOutput,
    FinishReason,
    GenerateRequest,
    KVHandoff,
    NewBlocks,
    PromptTargets,
    RowAdmission,
    RowRules,
    StepPlan,
    TokenLogprobs,
)


class SequenceStatus(Enum):
    WAITING = "waiting"
    """Wants a row, and before that its grammar compiled if it has one. Holds no blocks, unless its
    KV was read from a prefill rank."""
    WAITING_FOR_KV = "waiting_for_kv"
    """Its KV will be, or is being, read from a prefill rank."""
    RUNNING = "running"
    """Has a row, and blocks for what is computed."""
    HOLDING_KV = "holding_kv"
    """Prefill is done; its blocks stay under a handoff until a reader has them."""
    FINISHED = "finished"
    """Ended here. An aborted read, or a step in flight, may still write to its blocks."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on one engine.

    Invariant: `block_table` covers exactly `num_computed_tokens` tokens, plus those of the step
    that is being scheduled or of a read; its entries are scratch where a sliding window has passed.
    `row` is -1 unless the sequence runs, or a step in flight still computes it.
    """

    request: GenerateRequest
    max_model_len: InitVar[int]
    arrival: int = 0
    handoff: KVHandoff | None = None
    """The handoff to read from; None once it was read, or if there is none."""
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_total_len: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    status: SequenceStatus = field(init=False)
    finish_reason: FinishReason = FinishReason.NONE
    num_computed_tokens: int = 0
    """Tokens with KV, those whose KV steps in flight compute included."""
    num_in_flight_tokens: int = 0
    """Of these, those that steps in flight compute."""
    num_pending_tokens: int = 0
    """Output tokens that steps in flight draw behind `token_ids`: nobody here knows them."""
    last_step: int = 0
    arrived_at: float = 0.0
    queued_us: int = -1
    """Microseconds until it first got a row; -1 before, and 0 once an output has reported it."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at the first admission; -1 before it."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks, as far as they were asked for."""
    num_committed_blocks: int = 0
    """Head blocks that were offered to the prefix cache."""
    num_dropped_blocks: int = 0
    """Head blocks known to be scratch in the table: a sliding window has passed them."""
    is_leaving: bool = False
    """Whether another engine is to go on with it after its next token."""
    leaves_kv: bool = True
    """If so, whether its KV is held for that one."""
    adapter_place: int = 0
    """Of its adapter, as `AdapterSlots.place` says; filled in by `Scheduler.add`, for good."""
    row: int = -1
    is_on_ranks: bool = False
    """Whether a plan has described its row to the ranks."""
    next_draft: list[int] = field(default_factory=list)
    """Draft tokens behind its last token, as the step that drew that one returned them."""
    history: tuple[npt.NDArray[np.int32], int] | None = None
    """A copy of its tokens as an array, and how many it has: the n-gram drafter searches it."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """As far as they are computed and not delivered."""
    grammar: CompiledGrammar | None = None
    """What its text must be, once it is compiled; None if there is no such thing."""
    matcher: Matcher | None = None
    """Its place in the grammar, while it runs."""

    def __post_init__(self, max_model_len: int) -> None:
        request = self.request
        self.token_ids = request.prompt_token_ids + request.output_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        most = self.num_prompt_tokens + request.sampling.max_tokens
        self.max_total_len = min(max_model_len, most)
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        is_here = self.handoff is None
        self.status = SequenceStatus.WAITING if is_here else SequenceStatus.WAITING_FOR_KV

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_confirmed_tokens(self) -> int:
        """Tokens whose KV is there: the steps that computed them have ended."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt's log-probabilities are due: not once it has output anywhere."""
        wanted = self.request.sampling.num_prompt_logprobs >= 0
        return wanted and len(self.token_ids) == self.num_prompt_tokens

    def forget_computed(self) -> None:
        self.num_computed_tokens = 0
        self.num_committed_blocks = 0
        self.prompt_logprobs = []
        self.matcher = None
        self.handoff = None
        self.status = SequenceStatus.WAITING

    def masked_row(self, index: int, draft: list[int]) -> MaskedRow:
        """Return what fills the masks of its next token and of those behind a draft; the matcher
        counts its tokens as given."""
        grammar = self.request.sampling.grammar
        assert grammar is not None and self.grammar is not None
        if self.matcher is None:
            self.matcher = self.grammar.start(grammar.end_token_ids)
        new = self.token_ids[self.num_prompt_tokens + self.matcher.num_tokens :]
        self.matcher.num_tokens += len(new)
        return MaskedRow(index, self.matcher, new, draft)

    def ended(self, reason: FinishReason, error: str) -> EngineOutput:
        return EngineOutput.ended(
            self.request_id,
            reason,
            error,
            position=self.num_tokens - self.num_prompt_tokens,
            num_cached_tokens=max(self.num_cached_tokens, 0),
        )


@dataclass(slots=True)
class Batch:
    """The sequences of one step with how many tokens each computes. Invariant: `budget` is what is
    left of the step's tokens; sequences with a single new token come first in the plan, so that
    ranks find all decodes together, and behind them those that check drafts."""

    budget: int
    new_blocks: list[NewBlocks] = field(default_factory=list)
    singles: list[Sequence] = field(default_factory=list)
    drafting: list[Sequence] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    """Of each that drafts, what may come behind its last token; never empty."""
    chunks: list[Sequence] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    """In the plan's order; filled in by `launch`."""
    has_grammars: bool = False

    def add(self, seq: Sequence, num_new: int, draft: list[int] | None = None) -> None:
        """Take a sequence with so many tokens in; with a draft, the last ones are that."""
        self.budget -= num_new
        if seq.grammar is not None:
            self.has_grammars = True
        if num_new == 1:
            self.singles.append(seq)
        elif draft:
            self.drafting.append(seq)
            self.drafts.append(draft)
        else:
            self.chunks.append(seq)
            self.chunk_sizes.append(num_new)

    def build_plan(self, epoch: int, step: int) -> StepPlan:
        """Return the plan, and note in each sequence what the step computes of it."""
        sequences = self.sequences = self.singles + self.drafting + self.chunks
        num_computed = [seq.num_computed_tokens for seq in sequences]
        num_new = [1] * len(self.singles) + [1 + len(draft) for draft in self.drafts]
        num_new += self.chunk_sizes
        token_ids = [
            PENDING if seq.num_pending_tokens else seq.token_ids[seq.num_computed_tokens]
            for seq in self.singles
        ]
        for seq, draft in zip(self.drafting, self.drafts, strict=True):
            token_ids += [seq.token_ids[-1], *draft]
        for seq, size in zip(self.chunks, self.chunk_sizes, strict=True):
            start = seq.num_computed_tokens
            token_ids += seq.token_ids[start : start + size]
        rows: list[int] = []
        output_index: list[int] = []
        admitted: list[RowAdmission] = []
        prompt_targets: list[PromptTargets] = []
        known_token_ids: list[int] = []
        for seq, start, new in zip(sequences, num_computed, num_new, strict=True):
            # Told only now: an empty plan may never reach the ranks.
            if not seq.is_on_ranks:
                self.new_blocks.append(NewBlocks(seq.row, 0, seq.block_table.copy()))
                seq.is_on_ranks = True
                admitted.append(_admission(seq))
            if start + 1 < seq.num_prompt_tokens and seq.wants_prompt_logprobs:
                prompt_targets.append(_prompt_targets(len(rows), seq, start, new))
            total = len(seq.token_ids) + seq.num_pending_tokens
            draws = start + new >= total  # more: with a draft
            if not draws:
                known_token_ids.append(seq.token_ids[start + new])
            rows.append(seq.row)
            output_index.append(total - seq.num_prompt_tokens if draws else -1)
            seq.num_computed_tokens += new
            seq.num_in_flight_tokens += new
            seq.num_pending_tokens += draws
            seq.last_step = step
        return StepPlan(
            epoch=epoch,
            step=step,
            num_seqs=len(sequences),
            num_tokens=len(token_ids),
            admitted=admitted,
            new_blocks=self.new_blocks,
            rows=rows,
            num_computed=num_computed,
            num_new=num_new,
            output_index=output_index,
            token_ids=token_ids,
            num_decodes=len(self.singles),
            num_drafting=len(self.drafting),
            prompt_targets=prompt_targets,
            known_token_ids=known_token_ids,
        )


def _admission(seq: Sequence) -> RowAdmission:
    sampling = seq.request.sampling
    return RowAdmission(
        row=seq.row,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        num_logprobs=sampling.num_logprobs,
        rules=_row_rules(seq),
        adapter_place=seq.adapter_place,
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


class SampledTokens(NamedTuple):
    """The tokens that a step drew, in batch order: one per sequence with an output index, and if it
    drafts one behind each of its tokens, drawn as if the draft before it were right.
    `logprobs` is empty, or aligned with `token_ids` (None if not asked for); `prompt_logprobs` is
    aligned with the plan's `prompt_targets`. `drafts` is empty, or has for each sequence with an
    output index what may come behind the last of its tokens that holds."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs]]
    drafts: list[list[int]]
