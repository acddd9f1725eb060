"""Step inputs: plans become tensors in buffers whose addresses never change.

A row of the batch keeps state between steps (its block table and its sampling parameters), so that
a plan carries only what is new. A graph that was captured on the buffers can be replayed on any
plan.

Shapes: T tokens, S sequences, R rows (max_num_seqs), M columns of a block table, N sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cluster.config import EngineConfig
from cluster.rank.buffers import Staging, StaticBuffer, upload_array
from cluster.rank.row_rules import Counted, RowRulesTables
from cluster.wire.messages import PENDING, RowAdmission, StepPlan
from compile.context import SpecDecodeMetadata
from model.layers.attention import AttentionMetadata
from model.sampler import SamplingTensors, draw_uniform


@dataclass(frozen=True)
class StepBatch:
    """One step's tensors, views of the static buffers.

    input_ids, positions: [T], padded; logits_index, sampled_rows: [N], of the tokens that are
    sampled.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    logits_index: torch.Tensor
    sampled_rows: torch.Tensor
    adapters: torch.Tensor | None
    """int32 [T]: one more than the slot of each token's adapter, 0 for none; None if the engine has
    no slots."""
    sampling: SamplingTensors
    wants_logprobs: list[int]
    """Per sampled sequence how many likeliest tokens it wants; -1 none."""
    spec_decode_metadata: SpecDecodeMetadata | None = None
    """None without an MTP layer, and of padding."""
    draft_table: torch.Tensor | None = None
    """int32 [D, columns]: a block table of each sequence that draws, longer by what its drafts
    need; None where drafts are of one token."""


_Staged = tuple[
    torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor, torch.Tensor, torch.Tensor | None
]


@dataclass(frozen=True)
class _SampledRows:
    """What stays the same from step to step while the same sequences are sampled."""

    rows: bytes
    sampling: SamplingTensors
    """Without the drawn numbers and the adjustments of a step."""
    wants_logprobs: list[int]


class StaticTable:
    """A table on the device of which each step fills the first rows and columns.

    It keeps its width, which graphs rely on. On a GPU what is filled is packed on the host and
    spread on the device, because torch copies what is not contiguous by way of memory that is not
    pinned. What no step has filled is 0; what the last one left out is undefined.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, staging: Staging) -> None:
        self._rows, self._width = rows, columns
        self._num_columns = columns
        self._flat = StaticBuffer((rows * columns,), dtype, staging)
        self._is_packed = staging.is_copied
        self._view: torch.Tensor | None = None

    @cached_property
    def device(self) -> torch.Tensor:
        table = self._flat.device.view(self._rows, self._width)
        with torch.inference_mode(False):
            return torch.zeros_like(table) if self._is_packed else table

    def first_columns(self, columns: int) -> npt.NDArray[Any]:
        """Return the array to fill in this step, [rows, columns], for `stage` to take."""
        self._num_columns = columns
        if self._is_packed:
            return self._flat.host[: self._rows * columns].reshape(self._rows, columns)
        return self._flat.host.reshape(self._rows, -1)[:, :columns]

    def stage(self, n: int) -> torch.Tensor:
        """Return the first `n` rows on the device, in their full width; see `spread`."""
        if self._is_packed:
            self._flat.stage(n * self._num_columns)
        if self._view is None or self._view.shape[0] != n:
            self._view = self.device[:n]
        return self._view

    def spread(self, n: int) -> None:
        """Put the first `n` rows in their places, once the staging was uploaded."""
        if self._is_packed:
            columns = self._num_columns
            self.device[:n, :columns].copy_(self._flat.device[: n * columns].view(n, columns))


class StepInputs:
    def __init__(self, config: EngineConfig, vocab_size: int, device: torch.device) -> None:
        rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        max_blocks_per_seq = config.max_blocks_per_seq
        self.query_len = config.query_len
        num_sampled = self.max_num_sampled = min(rows * self.query_len, tokens)
        self._is_overlapped = config.overlap
        self._has_mtp = config.cache.has_mtp
        self._draft_blocks = config.draft_blocks
        self.num_draft_columns = max_blocks_per_seq + config.draft_blocks
        self.first_draft_block = 0
        """Of row 0; the runner fills it in once it knows the pool's size."""
        # A step may be built while the one before is in flight.
        num_steps = 2 if config.overlap else 1
        # Tokens and positions are what compiled code is traced on: a tensor that begins somewhere
        # in its storage would have an offset there, which is another symbol of its graph.
        self._of_ids, self._of_positions = Staging(device, num_steps), Staging(device, num_steps)
        self._of_step = Staging(device, num_steps)
        self._of_sampled = Staging(device, num_steps)
        stagings = (self._of_ids, self._of_positions, self._of_step, self._of_sampled)
        self._copied = stagings if self._of_step.is_copied else ()
        """Those that a step turns and uploads: on a CPU it reads what it fills."""
        self.device = device
        self.max_num_seqs = rows
        self.max_num_batched_tokens = tokens
        self.block_size = config.cache.block_size
        self._row_blocks = np.zeros((rows, max_blocks_per_seq), dtype=np.int32)
        self._row_temperature = np.zeros(rows, dtype=np.float32)
        self._row_top_k = np.zeros(rows, dtype=np.int64)
        self._row_top_p = np.ones(rows, dtype=np.float32)
        self._row_min_p = np.zeros(rows, dtype=np.float32)
        self._row_seed = np.zeros(rows, dtype=np.uint64)
        self._row_adapter = np.zeros(rows, dtype=np.int32)
        self._row_num_logprobs = np.full(rows, -1, dtype=np.int64)

        self._input_ids = StaticBuffer((tokens,), torch.int64, self._of_ids)
        self._positions = StaticBuffer((tokens,), torch.int64, self._of_positions)
        # In the order of their lengths, so that few bytes lie between what a decode step fills.
        step = self._of_step
        self._rules = RowRulesTables(rows, tokens, num_sampled, vocab_size, step)
        self._cu_seqlens_q = StaticBuffer((rows + 1,), torch.int32, step)
        self._seq_lens = StaticBuffer((rows,), torch.int32, step)
        self._adapters: StaticBuffer | None = None
        if config.num_lora_slots:
            self._adapters = StaticBuffer((tokens,), torch.int32, step)
        self._logits_index = StaticBuffer((num_sampled,), torch.int64, step)
        self._uniform = StaticBuffer((num_sampled,), torch.float64, step)
        self._sampled_index = StaticBuffer((num_sampled,), torch.int64, step)
        self._pending = StaticBuffer((rows, 2), torch.int64, step)
        self._slot_mapping = StaticBuffer((tokens,), torch.int64, step)
        self._block_table = StaticTable(rows, max_blocks_per_seq, torch.int32, step)
        self._temperature = StaticBuffer((num_sampled,), torch.float32, self._of_sampled)
        self._top_k = StaticBuffer((num_sampled,), torch.int64, self._of_sampled)
        self._top_p = StaticBuffer((num_sampled,), torch.float32, self._of_sampled)
        self._min_p = StaticBuffer((num_sampled,), torch.float32, self._of_sampled)
        for staging in stagings:
            staging.allocate()
        self._blocks = self._block_table.first_columns(1)
        """Of the step that is built, as many columns as its longest sequence has blocks."""
        self._last_tokens = torch.full((rows,), PENDING, dtype=torch.int64, device=device)
        self._sampled: _SampledRows | None = None
        self._staged: _Staged
        self._sizes = (-1, -1, -1, -1)
        """Of the last step: decodes, tokens, sequences, those that were sampled."""

    def build(
        self,
        plan: StepPlan,
        num_tokens: int | None = None,
        num_seqs: int | None = None,
        *,
        is_mixed: bool = False,
    ) -> StepBatch:
        """Apply the plan to the rows and return its batch, padded to the given sizes: padding
        tokens are token 0 at position 0 and write into the scratch block, padding sequences have
        length 0 and no tokens, or one where all decode. With `is_mixed` attention treats every
        sequence as a chunk: a full graph of a mixed step fixes the number of decodes."""
        for staging in self._copied:
            staging.next_step()
        num_tokens = plan.num_tokens if num_tokens is None else num_tokens
        num_seqs = plan.num_seqs if num_seqs is None else num_seqs
        for admission in plan.admitted:
            self._admit(admission)
        for new in plan.new_blocks:
            end = new.start + len(new.block_ids)
            self._row_blocks[new.row, new.start : end] = new.block_ids
        rows = np.array(plan.rows, dtype=np.int64)
        self._lay_out(plan, rows)
        if num_tokens != plan.num_tokens or num_seqs != plan.num_seqs:
            self._pad(plan.num_tokens, num_tokens, plan.num_seqs, num_seqs)
        num_decodes = num_seqs if plan.num_decodes == plan.num_seqs else plan.num_decodes
        num_decodes = 0 if is_mixed else num_decodes
        pending = self._stage_pending(plan, rows) if self._is_overlapped else None
        counted: Counted | None = None
        if self._rules.num_rows:
            counted = self._rules.stage_counted(plan, rows, self._positions.host[: plan.num_tokens])
        sampled, from_end, positions = _sampled_tokens(plan)
        num_sampled, sampled_rows = len(sampled), rows[sampled]
        self._logits_index.host[:num_sampled] = self._cu_seqlens_q.host[1:][sampled] - from_end
        self._sampled_index.host[:num_sampled] = sampled_rows
        sampling, wants_logprobs = self._sampling(sampled_rows, positions, plan)
        staged = self._stage(num_decodes, num_tokens, num_seqs, num_sampled)
        batch = StepBatch(*staged, sampling, wants_logprobs)
        if self._has_mtp:
            table = self._draft_table(plan, rows) if self._draft_blocks else None
            metadata = self._spec_decode_metadata(plan, batch.logits_index)
            batch = replace(batch, spec_decode_metadata=metadata, draft_table=table)
        if pending is not None:
            places, pending_rows = pending.unbind(1)
            batch.input_ids[places] = self._last_tokens[pending_rows]
        if counted is not None:
            self._rules.count(counted, batch.input_ids)
        return batch

    def keep_drawn(self, batch: StepBatch, token_ids: torch.Tensor) -> None:
        """Keep what the batch's rows drew for a plan that is made ahead of it.

        Call it before the next `build`. token_ids: int64 [N], on the device.
        """
        self._last_tokens[batch.sampled_rows] = token_ids

    def _spec_decode_metadata(
        self, plan: StepPlan, logits_index: torch.Tensor
    ) -> SpecDecodeMetadata:
        """Return where drafts are scored, and which tokens follow the plan's. logits_index: [N]"""
        draws = np.array(plan.output_index) >= 0
        num_drawn = np.array(plan.num_drawn, dtype=np.int64)[draws]
        ends, last = np.cumsum(plan.num_new) - 1, np.cumsum(num_drawn) - 1
        is_last = np.zeros(len(logits_index), dtype=bool)
        is_last[last] = True
        drafted = [token for *_, draft in plan.drafts() for token in draft]
        fields = {
            "num_draft_tokens": num_drawn - 1,
            "cu_num_draft_tokens": np.cumsum(num_drawn - 1),
            "draft_token_ids": np.array(drafted, dtype=np.int64),
            "target_logits_indices": np.flatnonzero(~is_last),
            "bonus_logits_indices": last,
            "known_indices": ends[~draws],
            "known_token_ids": np.array(plan.known_token_ids, dtype=np.int64),
        }
        # In one copy: most of them are of a few numbers.
        together = upload_array(np.concatenate(list(fields.values())), self.device)
        parts = together.split([len(values) for values in fields.values()])
        return SpecDecodeMetadata(
            logits_indices=logits_index, **dict(zip(fields, parts, strict=True))
        )

    def _draft_table(self, plan: StepPlan, rows: np.ndarray) -> torch.Tensor:
        draws = np.array(plan.output_index) >= 0
        rows, seq_lens = rows[draws], np.add(plan.num_computed, plan.num_new)[draws]
        num_columns, own = -(-seq_lens // self.block_size), np.arange(self._draft_blocks)
        table = np.zeros((len(rows), self.num_draft_columns), dtype=np.int32)
        table[:, : -len(own)] = self._row_blocks[rows]
        first = self.first_draft_block + rows * len(own)
        np.put_along_axis(table, num_columns[:, None] + own, first[:, None] + own, axis=1)
        return upload_array(table, self.device)

    def _upload(self, num_seqs: int) -> None:
        for staging in self._copied:
            staging.upload()
        self._block_table.spread(num_seqs)

    def _stage_pending(self, plan: StepPlan, rows: np.ndarray) -> torch.Tensor | None:
        """Stage the places and rows of tokens that the host does not know: int64 [P, 2]."""
        index = np.flatnonzero(self._input_ids.host[: plan.num_decodes] == PENDING)
        if not (num_pending := len(index)):
            return None
        # Each decode is one token, and they come first: a sequence's place is its token's.
        self._pending.host[:num_pending, 0] = index
        self._pending.host[:num_pending, 1] = rows[index]
        return self._pending.stage(num_pending)

    def _admit(self, admission: RowAdmission) -> None:
        row = admission.row
        self._row_temperature[row] = admission.temperature
        self._row_top_k[row] = admission.top_k
        # A mass that float32 rounds to 0 would keep no token.
        self._row_top_p[row] = max(admission.top_p, float(np.finfo(np.float32).tiny))
        self._row_min_p[row] = admission.min_p
        self._row_seed[row] = admission.seed
        self._row_adapter[row] = admission.adapter_place
        self._row_num_logprobs[row] = admission.num_logprobs
        self._rules.admit(admission)
        self._sampled = None

    def dummy(self, num_tokens: int, num_seqs: int, *, is_mixed: bool = False) -> StepBatch:
        """Return a batch of padding alone. With as many sequences as tokens every sequence decodes,
        unless `is_mixed`; else none of them attends to anything."""
        for staging in self._copied:
            staging.next_step()
        is_decode = num_tokens == num_seqs and not is_mixed
        self._cu_seqlens_q.host[0] = 0
        self._blocks = self._block_table.first_columns(1)
        self._pad(0, num_tokens, 0, num_seqs)
        nothing = np.zeros(0, dtype=np.int64)
        sampling, wants_logprobs = self._sampling(nothing, nothing)
        staged = self._stage(num_seqs if is_decode else 0, num_tokens, num_seqs, 0)
        return StepBatch(*staged, sampling, wants_logprobs)

    def _lay_out(self, plan: StepPlan, rows: np.ndarray) -> None:
        num_seqs, num_tokens, size = plan.num_seqs, plan.num_tokens, self.block_size
        num_new = np.array(plan.num_new, dtype=np.int64)
        computed = np.array(plan.num_computed, dtype=np.int64)
        cu = self._cu_seqlens_q.host
        cu[0] = 0
        np.cumsum(num_new, out=cu[1 : num_seqs + 1])
        seq_lens = computed + num_new
        self._seq_lens.host[:num_seqs] = seq_lens
        columns = -(-int(seq_lens.max()) // size)
        self._blocks = self._block_table.first_columns(columns)
        self._blocks[:num_seqs] = self._row_blocks[rows, :columns]

        self._input_ids.host[:num_tokens] = plan.token_ids
        if plan.num_decodes == num_seqs:
            positions, token_rows = computed, rows
        else:
            positions = np.repeat(computed - cu[:num_seqs], num_new) + np.arange(num_tokens)
            token_rows = np.repeat(rows, num_new)
        self._positions.host[:num_tokens] = positions
        if self._adapters is not None:
            self._adapters.host[:num_tokens] = self._row_adapter[token_rows]
        columns_of_tokens, offsets = np.divmod(positions, size)
        slots = self._slot_mapping.host[:num_tokens]
        blocks = self._row_blocks[token_rows, columns_of_tokens]
        np.multiply(blocks, size, out=slots, dtype=np.int64)
        slots += offsets

    def _pad(self, num_tokens: int, end: int, num_seqs: int, end_seqs: int) -> None:
        """Make the tokens and sequences behind the real ones padding, up to `end` each."""
        for buffer in (self._input_ids, self._positions, self._slot_mapping):
            buffer.host[num_tokens:end] = 0
        if self._adapters is not None:
            self._adapters.host[num_tokens:end] = 0
        self._seq_lens.host[num_seqs:end_seqs] = 0
        self._blocks[num_seqs:end_seqs] = 0
        self._cu_seqlens_q.host[num_seqs + 1 : end_seqs + 1] = self._cu_seqlens_q.host[num_seqs]

    def _stage(self, num_decodes: int, num_tokens: int, num_seqs: int, num_sampled: int) -> _Staged:
        sizes = (num_decodes, num_tokens, num_seqs, num_sampled)
        if sizes == self._sizes and not self._copied:
            return self._staged  # on a CPU the same views of what is filled anew
        attention = AttentionMetadata(
            num_decodes=num_decodes,
            block_table=self._block_table.stage(num_seqs),
            cu_seqlens_q=self._cu_seqlens_q.stage(num_seqs + 1),
            seq_lens=self._seq_lens.stage(num_seqs),
            slot_mapping=self._slot_mapping.stage(num_tokens),
        )
        self._sizes = sizes
        self._staged = (
            self._input_ids.stage(num_tokens),
            self._positions.stage(num_tokens),
            attention,
            self._logits_index.stage(num_sampled),
            self._sampled_index.stage(num_sampled),
            None if self._adapters is None else self._adapters.stage(num_tokens),
        )
        if self._copied:
            self._upload(num_seqs)
        return self._staged

    def _sampling(
        self, rows: np.ndarray, positions: np.ndarray, plan: StepPlan | None = None
    ) -> tuple[SamplingTensors, list[int]]:
        """Return how tokens of these rows and output positions are sampled, and how many logprobs
        each wants. rows, positions: int64 [N]."""
        known = self._sampled
        if known is None or known.rows != rows.tobytes():
            known = self._sampled_rows(rows)
            # Buffers hold the last rows that were written: none leave them as they are.
            self._sampled = known if len(rows) else self._sampled
        sampling = known.sampling
        adjustments = None
        if self._rules.num_rows:
            adjustments = self._rules.adjustments(rows, positions, plan)
        if not sampling.all_greedy:
            self._uniform.host[: len(rows)] = draw_uniform(self._row_seed[rows], positions)
            uniform = self._uniform.stage(len(rows))
            sampling = replace(sampling, uniform=uniform, adjustments=adjustments)
        elif adjustments is not None:
            sampling = replace(sampling, adjustments=adjustments)
        return sampling, known.wants_logprobs

    def _sampled_rows(self, rows: np.ndarray) -> _SampledRows:
        n = len(rows)
        temperature = self._row_temperature[rows]
        top_k, top_p, min_p = self._row_top_k[rows], self._row_top_p[rows], self._row_min_p[rows]
        self._temperature.host[:n] = temperature
        self._top_k.host[:n] = top_k
        self._top_p.host[:n] = top_p
        self._min_p.host[:n] = min_p
        sampling = SamplingTensors(
            temperature=self._temperature.stage(n),
            top_k=self._top_k.stage(n),
            top_p=self._top_p.stage(n),
            min_p=self._min_p.stage(n),
            uniform=self._uniform.stage(n),
            num_logprobs=int(self._row_num_logprobs[rows].max(initial=-1)),
            all_greedy=bool((temperature == 0).all()),
            any_top_k=bool((top_k > 0).any()),
            any_top_p=bool((top_p < 1).any()),
            any_min_p=bool((min_p > 0).any()),
            adjustments=None,
        )
        return _SampledRows(rows.tobytes(), sampling, self._row_num_logprobs[rows].tolist())


def _sampled_tokens(plan: StepPlan) -> tuple[np.ndarray, np.ndarray | int, np.ndarray]:
    """Return of each token that is sampled its sequence, which one it is of the sequence's tokens,
    counted from their end, and its output position: int64 [N] each."""
    output_index = np.array(plan.output_index, dtype=np.int64)
    if not plan.num_drafting:
        sampled = np.flatnonzero(output_index >= 0)
        return sampled, 1, output_index[sampled]
    num_drawn = np.array(plan.num_drawn, dtype=np.int64)
    sampled = np.repeat(np.arange(plan.num_seqs), num_drawn)
    from_end = np.cumsum(num_drawn)[sampled] - np.arange(len(sampled))
    return sampled, from_end, output_index[sampled] + num_drawn[sampled] - from_end
