"""The scheduler: which sequences run in a step, with how many tokens, in which blocks.

The life of a request:

1. `add` checks it (`RequestLimits`). A bad one ends with an error output, a good one queues in
   order of arrival; one with a grammar as soon as that is compiled (`_take_compiled`).
2. With a handoff it waits for its KV: as soon as blocks are free a read starts (`_start_read`).
   When that has ended well, an output without tokens says so, and the sequence is ready for a row
   (`_take_finished_reads`). What is held or read meanwhile is `kv_handover.py`'s.
3. Without a handoff it is admitted (`_admit`): the prefix cache gives it computed head blocks, and
   its prompt is computed in chunks, next to the decodes of others, under one token budget.
4. It gets a row and then runs in every step (`_schedule_running`), with a draft behind its last
   token where tokens are drafted (`drafter.py`) and blocks and budget allow it. When no block is
   free, the sequence that came last gives up its blocks and waits to be computed again
   (`_preempt`).
5. `update` books what the step sampled, of a draft as far as it was right. The sequence ends with
   a stop token or at its limit; on a prefill engine it leaves its row after the first token and
   holds its blocks under a handoff until a reader has them (`_hand_over`).
6. `abort` ends it anywhere on this way, and `leave` has another engine go on with it.

Steps may be scheduled one ahead (`schedule_ahead`): while a step is in flight the next one is
planned, with the tokens that it draws still unknown. Then 5 comes one step late. A sequence that
ended meanwhile keeps its row and its blocks until the last step that computes it has ended.

No request starves. Waiting ones are served strictly in order of arrival and never take blocks in a
step in which a running sequence lacked them; the first running sequence can take the blocks of all
others; and what else holds blocks (reads and handoffs) ends by itself.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from cluster.config import Role, SchedulerConfig
from cluster.engine.blocks import SCRATCH, BlockManager
from cluster.engine.kv_handover import KVHandover
from cluster.engine.request_limits import RequestLimits
from cluster.engine.sequence import Batch, SampledTokens, Sequence, SequenceStatus
from cluster.grammar.matcher import MaskedRow
from cluster.observe.metrics import SchedulerStats
from cluster.wire.messages import (
    EngineOutput,
    FinishReason,
    KVHandoff,
    NewBlocks,
    StepPlan,
    Submit,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from cluster.engine.drafter import Drafter
    from cluster.grammar.masks import GrammarMasks  # whose library an engine may do without

_ARRIVAL = attrgetter("arrival")
WAITING = SequenceStatus.WAITING
WAITING_FOR_KV = SequenceStatus.WAITING_FOR_KV
RUNNING = SequenceStatus.RUNNING
FINISHED = SequenceStatus.FINISHED

MAX_UNFINISHED_TIMES = 1024
"""Requests that may wait for each that may run: the bound on another sender than an ingress."""
MIN_PROMPT_TOKENS = 32
"""At least so many are computed in a step under `max_step_ms`: prompts go on, however slow steps
are. A CPU needs more time for a token of a small model's prompt if a step has fewer."""
MIN_TOKENS_PER_DECODE = 2
"""Or so many for each sequence that decodes, if that is more. With fewer, prompts so many times as
long as their answers would come faster than they are computed."""
MAX_EARLY_ABORTS = 4096
"""Ids that were aborted here before they came; most never come, having just ended."""


class Scheduler:
    """One engine's sequences. Call `schedule` and `update` in turn, the rest between them.

    With `schedule_ahead`, one more plan may be made before an `update`; a step is in flight from
    its plan to its update, and updates come in the order of plans.

    Invariant: an unfinished sequence is in exactly one of `_compiling`, `_waiting`, `_ready`,
    `running` and the reads of `handover`; every submitted request gets exactly one output with a
    finish reason. What a step in flight computes keeps its blocks and its row.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        limits: RequestLimits,
        *,
        epoch: int,
        handover: KVHandover | None = None,
        grammars: GrammarMasks | None = None,
        clock: Callable[[], float] | None = None,
        drafter: Drafter | None = None,
        tokens_within: Callable[[float], int] | None = None,
    ) -> None:
        """`grammars` None refuses requests with a grammar; `clock` tells how long they wait.
        Without a `drafter` each step draws one token of a sequence. `tokens_within`: see
        `StepStats`; None: nobody measures steps."""
        self._is_prefill = limits.role is Role.PREFILL
        self.blocks = limits.blocks
        self._config = config
        self._epoch = epoch
        self._handover = handover or KVHandover(limits.blocks, None)
        self._clock = clock or (lambda: 0.0)
        self._limits = limits
        self._grammars = grammars
        self._drafter = drafter
        self._tokens_within = tokens_within
        self._step = 0
        self._num_arrivals = 0
        self._unfinished: dict[str, Sequence] = {}
        self._compiling: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        """In order of arrival: to be admitted, or to start a read."""
        self._blocked: _HeadNeed | None = None
        """What the head of the queue needs, if it did not fit."""
        self._ready: list[Sequence] = []
        """In order of arrival: their KV was read and they need a row."""
        self.running: list[Sequence] = []
        """In order of admission; for others to read only."""
        self._in_flight: dict[int, list[Sequence]] = {}
        """By step the sequences of plans that were made and not booked, in the plan's order."""
        self._free_rows = list(range(config.max_num_seqs))
        self._early_aborts: OrderedDict[str, None] = OrderedDict()
        """The last aborts without a request: each may have overtaken its own."""
        self._outputs: list[EngineOutput] = []
        self._prompt_tokens_computed = 0
        self._num_preemptions = 0
        self._num_drafts = self._num_draft_tokens = self._num_accepted_tokens = 0

    # --- requests come and go ---------------------------------------------------------------

    def add(self, submit: Submit) -> None:
        """Queue a request; one that cannot be served ends with an error among the outputs."""
        request = submit.request
        seq = Sequence(
            request,
            max_model_len=self._limits.max_model_len,
            arrival=self._num_arrivals,
            handoff=submit.handoff,
        )
        if request.request_id in self._early_aborts:
            del self._early_aborts[request.request_id]
            self._refuse(seq, FinishReason.ABORT)
        elif error := self._find_error(seq):
            self._refuse(seq, FinishReason.ERROR, error)
        elif seq.num_tokens >= seq.max_total_len:
            # The router resumes none that is complete; another sender might.
            self._refuse(seq, FinishReason.LENGTH)
        else:
            self._num_arrivals += 1
            seq.adapter_place = self._limits.adapters.place(request.adapter_id) or 0
            self._unfinished[seq.request_id] = seq
            seq.arrived_at = self._clock()
            if self._is_compiled(seq):
                self._waiting.append(seq)
            else:
                self._compiling[seq.request_id] = seq
            self._handover.expect(seq)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests wherever they are; unknown ids are remembered for a while."""
        unknown: dict[str, None] = {}
        num_waiting = 0
        for request_id in request_ids:
            seq = self._unfinished.get(request_id)
            if seq is None:
                unknown[request_id] = None
            else:
                num_waiting += self._abort(seq)
        if num_waiting:  # all of them in one pass: the queue may be long
            self._waiting = deque(seq for seq in self._waiting if seq.status is not FINISHED)
        if unknown:
            self._handover.drop(unknown)
            for request_id in unknown:
                self._early_aborts[request_id] = None
                self._early_aborts.move_to_end(request_id)
            while len(self._early_aborts) > MAX_EARLY_ABORTS:
                self._early_aborts.popitem(last=False)

    def leave(self, request_ids: Iterable[str], *, with_kv: bool = True) -> None:
        """Let requests go on elsewhere. What has blocks, or is to get them from a handoff, leaves
        with its next token, and with its KV if that can be read there; the rest at once. Unknown
        ids have ended."""
        for request_id in request_ids:
            seq = self._unfinished.get(request_id)
            if seq is None or not self._handover.can_hold:
                continue
            if seq.block_table or seq.handoff is not None:
                seq.is_leaving, seq.leaves_kv = True, with_kv
            elif self._leave_queue(seq):
                self._waiting.remove(seq)

    def _leave_queue(self, seq: Sequence) -> bool:
        """End what has no KV; return whether it is left in the queue."""
        is_compiling = self._compiling.pop(seq.request_id, None) is not None
        if is_compiling:
            assert self._grammars is not None
            self._grammars.forget(seq.request_id)
        self._finish(seq, FinishReason.MOVED)
        self._emit(seq, FinishReason.MOVED)
        return not is_compiling

    def refuse(self, request_id: str, error: str) -> None:
        self._outputs.append(EngineOutput.ended(request_id, FinishReason.ERROR, error))

    def take_outputs(self) -> list[EngineOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # --- the step ---------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose the next step's batch and give it blocks; the plan may be empty."""
        self._step += 1
        self._take_what_ended()
        batch = Batch(self._budget())
        if self._schedule_running(batch) and self._waiting:
            self._schedule_waiting(batch)
        plan = batch.build_plan(self._epoch, self._step)
        if batch.sequences:
            self._in_flight[plan.step] = batch.sequences
            if batch.has_grammars:
                assert self._grammars is not None
                _fill_masks(self._grammars, plan, batch.sequences)
        return plan

    def schedule_ahead(self) -> StepPlan | None:
        """Choose the next step's batch although a step may be in flight. None, and nothing planned,
        where that step's result is needed first: a sequence would be pre-empted, one has a grammar,
        whose mask follows from the pending token, or all that run may end with it."""
        if not self._in_flight:
            return self.schedule()
        self._take_what_ended()
        if any(self._needs_token(seq) for seq in self.running) or not self._fits_ahead():
            return None
        plan = self.schedule()
        if plan.rows:
            return plan
        self._step -= 1  # no rank has heard of it
        return None

    def update(self, plan: StepPlan, sampled: SampledTokens) -> list[EngineOutput]:
        """Book what the first step in flight sampled; return all outputs since."""
        outputs, self._outputs = self._outputs, []
        batch = self._in_flight.pop(plan.step, [])
        num_running = len(self.running)
        blocks, block_size = self.blocks, self.blocks.block_size
        for targets, found in zip(plan.prompt_targets, sampled.prompt_logprobs, strict=True):
            batch[targets.index].prompt_logprobs += found
        drafts = iter(sampled.drafts)
        drawn = first = 0
        for seq, start, num_new, num_drawn in zip(
            batch, plan.num_computed, plan.num_new, plan.num_drawn, strict=True
        ):
            has_drawn = num_drawn > 0
            if has_drawn:
                seq.next_draft = next(drafts, [])
            # As `Batch.build_plan` noted it.
            seq.num_in_flight_tokens -= num_new
            seq.num_pending_tokens -= has_drawn
            if start < seq.num_prompt_tokens:
                end = min(start + num_new, seq.num_prompt_tokens)
                self._prompt_tokens_computed += end - start
            if seq.status is RUNNING:
                has_failed = has_drawn and seq.matcher is not None and bool(seq.matcher.error)
                new = sampled.token_ids[drawn : drawn + num_drawn * (not has_failed)]
                if num_drawn > 1:
                    new = self._accept(seq, plan.token_ids[first + 1 : first + num_new], new)
                position = len(seq.token_ids) - seq.num_prompt_tokens
                seq.token_ids += new
                if seq.num_confirmed_tokens // block_size > seq.num_committed_blocks:
                    blocks.commit(seq)
                if blocks.sliding_window is not None:
                    blocks.drop_outside_window(seq)
                if has_failed:
                    assert seq.matcher is not None
                    outputs.append(seq.ended(FinishReason.ERROR, f"grammar: {seq.matcher.error}"))
                    self._end(seq, FinishReason.ERROR)
                    num_running -= 1
                elif has_drawn:
                    logprobs = sampled.logprobs[drawn : drawn + len(new)]
                    outputs.append(self._output(seq, position, new, logprobs))
                    num_running -= seq.status is not RUNNING
            else:  # it has ended, and may have waited for this step
                self._release(seq)
            drawn += num_drawn
            first += num_new
        assert drawn == len(sampled.token_ids), f"{drawn} sampled, found {len(sampled.token_ids)}"
        if num_running < len(self.running):
            self.running = [seq for seq in self.running if seq.status is RUNNING]
        return outputs

    # --- what others may know ---------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended, or an output was not taken."""
        is_busy = self._unfinished or self._in_flight or self._outputs
        return bool(is_busy) or self._handover.has_any

    def uses_adapter(self, adapter_id: int) -> bool:
        """Return whether a sequence has an adapter: one that has not ended, one whose KV is held
        for another engine, or one that a step in flight computes although it has ended."""
        places = (self._unfinished.values(), self._handover.held, *self._in_flight.values())
        return any(seq.request.adapter_id == adapter_id for seq in chain(*places))

    def stats(self) -> SchedulerStats:
        # Other threads ask too, and may come between two changes.
        num_waiting = max(0, len(self._unfinished) - len(self.running))
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=num_waiting,
            num_waiting_for_kv=min(self._handover.num_reading, num_waiting),
            num_queued_tokens=sum(map(_num_queued, [*self._unfinished.values()])),
            num_handoffs=self._handover.num_held,
            num_blocks=self.blocks.num_blocks,
            num_free_blocks=self.blocks.num_free_blocks,
            prompt_tokens_computed=self._prompt_tokens_computed,
            num_preemptions=self._num_preemptions,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            prefix_queries=self.blocks.prefix_queries,
            prefix_hits=self.blocks.prefix_hits,
        )

    # --- adding -----------------------------------------------------------------------------

    def _find_error(self, seq: Sequence) -> str:
        if seq.request_id in self._unfinished:
            return f"request_id: wanted a new one, found {seq.request_id!r} unfinished"
        most = MAX_UNFINISHED_TIMES * self._config.max_num_seqs
        if len(self._unfinished) >= most:
            return f"requests: wanted at most {most} unfinished ones, found one more"
        if seq.request.sampling.grammar is not None and self._grammars is None:
            return "grammar: wanted none on an engine that compiles none, found one"
        error = self._limits.find_error(seq)
        if error or seq.handoff is None:
            return error
        return self._handover.find_error(seq, seq.handoff)

    def _refuse(self, seq: Sequence, reason: FinishReason, error: str = "") -> None:
        """End a request that was never queued. A handoff of a bad one runs out by itself."""
        if not error:
            self._handover.refuse(seq)
        self._emit(seq, reason, error)

    def _is_compiled(self, seq: Sequence) -> bool:
        """Return whether a sequence may queue: it needs no grammar, or has it now."""
        grammar = seq.request.sampling.grammar
        if grammar is None or self._grammars is None:
            return True
        seq.grammar = self._grammars.compile(seq.request_id, grammar)
        return seq.grammar is not None

    def _take_compiled(self) -> None:
        assert self._grammars is not None
        for result in self._grammars.take_compiled():
            seq = self._compiling.pop(result.request_id, None)
            if seq is None:
                continue
            if result.compiled is not None:
                seq.grammar = result.compiled
                insort(self._waiting, seq, key=_ARRIVAL)
                continue
            self._handover.cancel(seq)
            self._finish(seq, FinishReason.ERROR)
            self._emit(seq, FinishReason.ERROR, result.error)

    # --- aborting ---------------------------------------------------------------------------

    def _abort(self, seq: Sequence) -> bool:
        """End a request; return whether it is left in the queue, for the caller to take out."""
        is_waiting, is_reading = False, self._handover.is_reading(seq)
        if seq.status is WAITING_FOR_KV:
            self._handover.cancel(seq)
        if self._compiling.pop(seq.request_id, None) is not None:
            assert self._grammars is not None
            self._grammars.forget(seq.request_id)
        elif seq.status is RUNNING:
            self.running.remove(seq)
        elif seq.block_table and not is_reading:
            self._ready.remove(seq)
        else:
            is_waiting = not is_reading
        if not is_reading:
            # The reader may still write to a read's blocks: they stay until it says that it ended.
            self._release(seq)
        self._finish(seq, FinishReason.ABORT)
        self._emit(seq, FinishReason.ABORT)
        return is_waiting

    # --- what happened since the last step --------------------------------------------------

    def _take_what_ended(self) -> None:
        if self._compiling:
            self._take_compiled()
        self._handover.free_ended()
        self._take_finished_reads()
        # Sequences whose KV was read join the running ones, while rows last.
        while self._ready and self._free_rows:
            self._seat(self._ready.pop(0))

    def _take_finished_reads(self) -> None:
        for seq, result in self._handover.take_finished():
            if seq.status is FINISHED:
                self._release(seq)
            elif result.ok:
                # The last token has no KV yet: it is what the first step here computes.
                seq.num_computed_tokens = seq.num_tokens - 1
                self.blocks.commit(seq)
                seq.handoff = None
                seq.status = WAITING
                insort(self._ready, seq, key=_ARRIVAL)
                # It may wait long for its next token; the engine that it left may end now.
                self._emit(seq, FinishReason.NONE)
            else:
                self._release(seq)
                self._finish(seq, FinishReason.KV_LOST)
                self._emit(seq, FinishReason.KV_LOST, result.error)

    # --- choosing the batch -----------------------------------------------------------------

    def _budget(self) -> int:
        """Return how many tokens the step may have: where prompts would hold up sequences that
        decode, as many as take the time that it should."""
        most, seconds = self._config.max_num_batched_tokens, self._config.max_step_s
        if seconds is None or self._tokens_within is None:
            return most
        num_decoding = sum(_num_uncomputed(seq) == 1 for seq in self.running)
        has_prompts = bool(self._waiting) or num_decoding < len(self.running)
        if not num_decoding or not has_prompts:
            return most
        least = max(MIN_PROMPT_TOKENS, MIN_TOKENS_PER_DECODE * num_decoding)
        return min(most, max(self._tokens_within(seconds), num_decoding + least))

    def _schedule_running(self, batch: Batch) -> bool:
        """Give each running sequence its next tokens; return whether none lacked a block."""
        blocks, running = self.blocks, self.running
        num_preemptions = self._num_preemptions
        i = 0
        while i < len(running) and batch.budget:
            seq = running[i]
            if seq.num_pending_tokens and self._may_end(seq):
                i += 1
                continue
            num_new = min(_num_uncomputed(seq), batch.budget)
            draft: list[int] | None = None
            if self._drafter is not None and num_new == 1:
                draft = self._draft(self._drafter, seq, batch.budget - (len(running) - i))
                num_new += len(draft)
            room = len(seq.block_table) * blocks.block_size - seq.num_computed_tokens
            if num_new > room:
                num_new = self._grow(seq, num_new, batch)
                if not num_new:
                    # None came later, so reads or handoffs hold the rest. They end by
                    # themselves; giving up what is computed would gain nothing.
                    return False
            batch.add(seq, num_new, draft)
            i += 1
        return self._num_preemptions == num_preemptions

    def _draft(self, drafter: Drafter, seq: Sequence, budget: int) -> list[int]:
        """Draft up to `budget` tokens of a running sequence, fewer rather than taking blocks that
        others may grow by, and none of one that leaves with its next token."""
        if self._leaves(seq) or seq.num_tokens == seq.num_prompt_tokens:
            return []
        blocks = self.blocks
        # The last token of a sequence is never computed.
        most = min(drafter.most, budget, seq.max_total_len - seq.num_tokens - 1)
        room = len(seq.block_table) * blocks.block_size - seq.num_computed_tokens - 1
        if most > room and blocks.num_free_blocks < len(self.running) + blocks.num_blocks_for(most):
            most = room
        draft = drafter.propose(seq, most) if most > 0 else []
        # Behind a stop token comes nothing, and to draw one takes no draft of it.
        ends = (i for i, token in enumerate(draft) if token in seq.stop_token_ids)
        return draft[: next(ends, len(draft))]

    def _may_end(self, seq: Sequence) -> bool:
        """Return whether a sequence leaves its row with its pending token, whatever that is."""
        is_full = len(seq.token_ids) + seq.num_pending_tokens >= seq.max_total_len
        return is_full or self._leaves(seq)

    def _leaves(self, seq: Sequence) -> bool:
        """Return whether a sequence goes on elsewhere after its next token."""
        return self._is_prefill or seq.is_leaving

    def _needs_token(self, seq: Sequence) -> bool:
        """Return whether a sequence's next step needs its pending token on the host."""
        return seq.grammar is not None and seq.num_pending_tokens > 0 and not self._may_end(seq)

    def _fits_ahead(self) -> bool:
        """Return whether running sequences fit into free blocks: none may be pre-empted now."""
        blocks, budget = self.blocks, self._config.max_num_batched_tokens
        num_free = blocks.num_free_blocks
        # The last block of each may be full, and the rest of the budget fills new ones.
        if len(self.running) + blocks.num_blocks_for(budget) <= num_free:
            return True
        needed = 0
        for seq in self.running:
            if seq.num_pending_tokens and self._may_end(seq):
                continue
            num_new = min(_num_uncomputed(seq), budget)
            budget -= num_new
            num_held = len(seq.block_table)
            needed += max(blocks.num_blocks_for(seq.num_computed_tokens + num_new) - num_held, 0)
        return needed <= num_free

    def _grow(self, seq: Sequence, wanted: int, batch: Batch) -> int:
        """Find blocks for up to `wanted` more tokens of a running sequence, fewer rather than
        pre-empting anyone; return for how many: 0 if all later sequences were pre-empted in vain.
        """
        while not (num_new := min(wanted, self._capacity(seq))):
            if not self._preempt_last(seq):
                return 0
        start = len(seq.block_table)
        new = self.blocks.allocate(seq, seq.num_computed_tokens + num_new)
        if new and seq.is_on_ranks:
            batch.new_blocks.append(NewBlocks(seq.row, start, new))
        return num_new

    def _capacity(self, seq: Sequence) -> int:
        num_blocks = len(seq.block_table) + self.blocks.num_free_blocks
        return num_blocks * self.blocks.block_size - seq.num_computed_tokens

    def _preempt_last(self, seq: Sequence) -> bool:
        """Pre-empt the last to come, before `seq` loses anything; return whether there was one."""
        if self._ready:
            self._preempt(self._ready.pop())
        elif self.running[-1] is not seq:
            self._preempt(self.running.pop())
        else:
            return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        assert not self._is_in_flight(seq), "a step in flight computes what is to be pre-empted"
        self._release(seq)
        self._num_preemptions += 1
        if seq.is_leaving:
            self._finish(seq, FinishReason.MOVED)
            self._emit(seq, FinishReason.MOVED)
            return
        seq.forget_computed()
        insort(self._waiting, seq, key=_ARRIVAL)

    def _schedule_waiting(self, batch: Batch) -> None:
        while self._waiting:
            seq = self._waiting[0]
            if not self._is_worth_a_try(seq, batch):
                return
            if seq.handoff is not None:
                fits = self._start_read(seq, seq.handoff, batch)
            else:
                fits = self._admit(seq, batch)
            if not fits:
                return
            self._waiting.popleft()

    def _is_worth_a_try(self, seq: Sequence, batch: Batch) -> bool:
        blocked, spare = self._blocked, self._spare_for(seq)
        return blocked is None or blocked.may_fit(seq, self.blocks, batch.budget, spare)

    def _spare_for(self, seq: Sequence) -> int:
        """Return how many blocks a sequence must leave free: a read one for each sequence that has
        some, since the next running sequence to grow would pre-empt what was just read."""
        if seq.handoff is None:
            return 0
        return len(self.running) + len(self._ready) + self._handover.num_reading

    def _fits_now(
        self,
        seq: Sequence,
        batch: Batch,
        cached: list[int],
        num_known: int,
        max_new: int,
        first: int = 0,
    ) -> bool:
        """Return whether the head of the queue fits; if not, remember what it needs."""
        missing = self.blocks.first_missing(seq, len(cached))
        saved = self.blocks.num_saved(cached, first)
        need = _HeadNeed(seq, num_known, max_new, num_saved=saved, missing=missing)
        fits = need.fits(self.blocks, batch.budget, self._spare_for(seq))
        self._blocked = None if fits else need
        return fits

    def _admit(self, seq: Sequence, batch: Batch) -> bool:
        if not (batch.budget and self._free_rows and self.blocks.num_free_blocks):
            return False
        cached = self.blocks.match(seq)
        num_cached = len(cached) * self.blocks.block_size
        # With a sliding window a prompt may be longer than the pool; without, it never is.
        max_new = min(seq.num_tokens - num_cached, self.blocks.room_beside(cached))
        if not self._fits_now(seq, batch, cached, num_cached, max_new):
            return False
        num_new = min(max_new, batch.budget)
        self._open_table(seq, cached, num_cached + num_new)
        seq.num_computed_tokens = num_cached
        self._seat(seq)
        batch.add(seq, num_new)
        return True

    def _start_read(self, seq: Sequence, handoff: KVHandoff, batch: Batch) -> bool:
        num_tokens = handoff.num_tokens
        first = self.blocks.first_needed(num_tokens)
        cached = self.blocks.match(seq)
        # Blocks that a sliding window has passed are neither kept nor read.
        cached[:first] = [SCRATCH] * min(first, len(cached))
        if not self._fits_now(seq, batch, cached, num_tokens, 0, first):
            return False
        self._open_table(seq, cached, num_tokens, first)
        self._handover.start_read(seq, handoff, max(len(cached), first))
        return True

    def _open_table(
        self, seq: Sequence, cached: list[int], num_tokens: int, first: int = 0
    ) -> None:
        self.blocks.acquire(seq, cached)
        self.blocks.allocate(seq, num_tokens, first)
        if seq.num_cached_tokens < 0:
            num_cached = len(cached) * self.blocks.block_size
            seq.num_cached_tokens = min(num_cached, seq.num_prompt_tokens)

    def _seat(self, seq: Sequence) -> None:
        """Put a sequence with blocks into a row; the ranks hear of it when it first runs."""
        seq.status = RUNNING
        seq.row = heapq.heappop(self._free_rows)
        seq.is_on_ranks = False
        if seq.queued_us < 0:
            seq.queued_us = int((self._clock() - seq.arrived_at) * 1e6)
        self.running.append(seq)

    # --- booking the result -----------------------------------------------------------------

    def _accept(self, seq: Sequence, draft: list[int], drawn: list[int]) -> list[int]:
        """Return which of the tokens drawn behind a sequence's last one and behind its draft hold:
        up to the first one that is not what was drafted. What was computed for others counts as not
        computed."""
        pairs = zip(draft, drawn, strict=False)
        wrong = (i for i, (drafted, token) in enumerate(pairs) if drafted != token)
        num_kept = 1 + next(wrong, len(draft))
        self._num_drafts += 1
        self._num_draft_tokens += len(draft)
        self._num_accepted_tokens += num_kept - 1
        seq.num_computed_tokens -= 1 + len(draft) - num_kept
        self.blocks.give_back(seq)
        return drawn[:num_kept]

    def _output(
        self, seq: Sequence, position: int, new: list[int], logprobs: list[TokenLogprobs | None]
    ) -> EngineOutput:
        """Return the output of a sequence's new tokens, the last of which may end it."""
        token, num_tokens = new[-1], len(seq.token_ids)
        handoff: KVHandoff | None = None
        stop_token_id = -1
        prompt_logprobs = seq.prompt_logprobs
        if prompt_logprobs:
            seq.prompt_logprobs = []
        queued_us, seq.queued_us = seq.queued_us, 0
        if token in seq.stop_token_ids:
            stop_token_id = token
            self._end(seq, FinishReason.STOP)
        elif num_tokens >= seq.max_total_len:
            self._end(seq, FinishReason.LENGTH)
        elif self._leaves(seq) and not self._is_in_flight(seq):
            # If a step planned before it was to leave computes it still, it leaves after that.
            if self._is_prefill or seq.leaves_kv:  # a prompt's KV is for another pool
                handoff = self._hand_over(seq)
            else:
                self._end(seq, FinishReason.MOVED)
        return EngineOutput(
            request_id=seq.request.request_id,
            position=position,
            token_ids=new,
            logprobs=[each for each in logprobs if each is not None],
            finish_reason=seq.finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=seq.num_cached_tokens,
            handoff=handoff,
            error="",
            prompt_logprobs=prompt_logprobs,
            queued_us=queued_us,
        )

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        self._release(seq)
        self._finish(seq, reason)

    def _hand_over(self, seq: Sequence) -> KVHandoff:
        """Take a sequence out of its row; its blocks stay under a handoff."""
        self._free_row(seq)
        self._finish(seq, FinishReason.HANDOFF)
        return self._handover.hold(seq)

    # --- ending -----------------------------------------------------------------------------

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.status = FINISHED
        seq.finish_reason = reason
        seq.matcher = None
        del self._unfinished[seq.request_id]

    def _emit(self, seq: Sequence, reason: FinishReason, error: str = "") -> None:
        self._outputs.append(seq.ended(reason, error))

    def _release(self, seq: Sequence) -> None:
        """Free blocks and row, or leave that to the update of the last step that computes it."""
        if self._is_in_flight(seq):
            return
        self.blocks.free(seq)
        if seq.row >= 0:
            self._free_row(seq)

    def _is_in_flight(self, seq: Sequence) -> bool:
        return seq.last_step in self._in_flight

    def _free_row(self, seq: Sequence) -> None:
        heapq.heappush(self._free_rows, seq.row)
        seq.row = -1


@dataclass(frozen=True)
class _HeadNeed:
    """What the head of the queue needs, by what was cached of it when it was looked up. To look up
    a long prompt's blocks takes a millisecond: that is done only when as many blocks are free as it
    needs, or when the first block that was missing is cached."""

    seq: Sequence
    num_known: int
    """Tokens whose KV is cached, or will be read."""
    max_new: int
    """Tokens behind them that it could compute in its first step without a budget."""
    num_saved: int
    """How many blocks fewer it takes than its tokens fill, see `BlockManager.num_saved`."""
    missing: bytes | None
    """Digest of its first block that was not cached; None if none is looked for."""

    def fits(self, blocks: BlockManager, budget: int, spare: int) -> bool:
        """Return whether its first `budget` new tokens fit, leaving `spare` blocks free."""
        num_tokens = self.num_known + min(self.max_new, budget)
        needed = blocks.num_blocks_for(num_tokens) - self.num_saved
        return needed + spare <= blocks.num_free_blocks

    def may_fit(self, seq: Sequence, blocks: BlockManager, budget: int, spare: int) -> bool:
        """Return whether `seq` may fit; another one than this was not looked up."""
        if seq is not self.seq or self.fits(blocks, budget, spare):
            return True
        return self.missing is not None and blocks.is_cached(self.missing)


def _fill_masks(grammars: GrammarMasks, plan: StepPlan, sequences: list[Sequence]) -> None:
    num_rows = 0
    rows: list[MaskedRow] = []
    drafts = {i: draft for i, _, draft in plan.drafts()}
    for i, (seq, num_drawn) in enumerate(zip(sequences, plan.num_drawn, strict=True)):
        if num_drawn and seq.grammar is not None:
            rows.append(seq.masked_row(num_rows, drafts.get(i, [])))
        num_rows += num_drawn
    if rows:
        grammars.fill(plan.step, num_rows, rows)


def _num_queued(seq: Sequence) -> int:
    """Return how many tokens wait: the next one of a running sequence does not."""
    num_uncomputed = _num_uncomputed(seq)
    return num_uncomputed if num_uncomputed > 1 and seq.handoff is None else 0


def _num_uncomputed(seq: Sequence) -> int:
    """Return how many tokens have no KV, and no step in flight that computes it."""
    return len(seq.token_ids) + seq.num_pending_tokens - seq.num_computed_tokens
