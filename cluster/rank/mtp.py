"""The MTP layer's runs behind a step, on all ranks alike: they cache its KV, and find drafts.

1. It runs on the step's tokens, each with the one behind it.
2. The likeliest token at each sequence's last one that holds is its first draft. For each further
   one the layer runs again, on one token of each sequence.

Both are captured with the forward's full graphs, and replayed from static inputs: the first with
the step's own graph, the second with that of as many sequences that decode a token each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cluster.group.membership import GroupMembership
from cluster.rank.inputs import StepBatch, StepInputs
from cluster.wire.messages import StepAgreement
from compile.config import CUDAGraphMode
from compile.context import (
    BatchDescriptor,
    DPMetadata,
    ForwardContext,
    forward_context,
    get_forward_context,
)
from compile.dispatch import CapturedGraphs, decide
from compile.graphs.pools import GraphPools
from compile.graphs.wrapper import CUDAGraphWrapper
from model.layers.attention import AttentionMetadata
from model.layers.decoder import CausalLM


class MTPForward:
    """Invariant: graphs read and write static inputs alone, and the step's hidden states where the
    forward's own graph leaves them."""

    def __init__(
        self, model: CausalLM, inputs: StepInputs, group: GroupMembership, pools: GraphPools
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._group = group
        full = CUDAGraphMode.FULL
        self._step = CUDAGraphWrapper(model.predict_ahead, full, pools, trims_pool=False)
        self._further = CUDAGraphWrapper(self._draft_further, full, pools, trims_pool=False)
        device, dtype = inputs.device, model.model.embed_tokens.dtype
        rows, num_tokens = inputs.max_num_seqs, inputs.max_num_batched_tokens
        self._tokens_behind = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        # Of the last draft of each sequence.
        self._token_ids, self._positions, self._slots = torch.zeros(
            3, rows, dtype=torch.int64, device=device
        ).unbind(0)
        self._hidden = torch.zeros(rows, model.config.hidden_size, dtype=dtype, device=device)
        self._block_table = torch.zeros(
            rows, inputs.num_draft_columns, dtype=torch.int32, device=device
        )
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device)

    @property
    def num_replays(self) -> tuple[dict[BatchDescriptor, int], dict[BatchDescriptor, int]]:
        """How often each graph was replayed: those of steps, and those of further drafts."""
        return dict(self._step.num_replays), dict(self._further.num_replays)

    def run_padding(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """Run all that follows a forward on padding, in its context, which may capture it. hidden:
        [T, E], what the forward returned."""
        context, size = get_forward_context(), batch.attention.seq_lens.shape[0]
        self._run_step(batch, hidden, batch.sampled_rows, context)
        mode, key = context.cudagraph_runtime_mode, context.batch_descriptor
        if self._inputs.query_len > 2 and (key is None or not key.has_chunks):
            self._fill(hidden[:0], batch.logits_index[:0], batch.positions[:0], None, size)
            across = [size] * self._group.dp_size
            self._run_further(size, self._further_context(context, size, across, mode, key))

    def draft(
        self,
        batch: StepBatch,
        agreed: StepAgreement,
        hidden: torch.Tensor,
        drawn: torch.Tensor,
        context: ForwardContext,
        captured: CapturedGraphs,
    ) -> torch.Tensor | None:
        """Run the layer behind a step, in whose context `hidden` was computed; return what it has
        each sequence that drew say next: int64 [D, drafts], on rank 0, or None where nothing is
        drafted. hidden: [T, E]; drawn: int64 [N]"""
        hidden = self._run_step(batch, hidden, drawn, context)
        num_drafts, metadata = self._inputs.query_len - 1, batch.spec_decode_metadata
        if not num_drafts:
            return None
        last = batch.logits_index[:0] if metadata is None else metadata.last_accepted(drawn)
        if not len(last) and self._group.dp_size == 1:
            return None
        hidden = hidden[last]
        found = [self._likeliest(hidden)]
        if num_drafts > 1:
            mode, key, across = self._further_sizes(agreed, captured)
            size = across[self._group.dp_rank]
            self._fill(hidden, found[0], batch.positions[last], batch.draft_table, size)
            further = self._further_context(context, size, across, mode, key)
            for _ in range(num_drafts - 1):
                self._run_further(size, further)
                found.append(self._token_ids[: len(last)].clone())
        return torch.stack(found, dim=1) if len(last) and not self._group.shard.rank else None

    def _run_step(
        self, batch: StepBatch, hidden: torch.Tensor, drawn: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Run the layer on the step's tokens; return [T, E]. Piecewise graphs have none of it."""
        if context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE:
            none = CUDAGraphMode.NONE
            context = replace(context, cudagraph_runtime_mode=none, batch_descriptor=None)
        facts = context.context
        facts = None if facts is None else replace(facts, is_draft=True)
        with forward_context(replace(context, context=facts)):
            behind = self._tokens_behind[: len(batch.input_ids)]
            behind.copy_(self._model.tokens_behind(batch.input_ids, drawn))
            out: torch.Tensor = self._step(behind, batch.positions, hidden)
        return out

    def _likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens, int64 [D], on all ranks. hidden: [D, E]"""
        token_ids = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        if len(hidden):
            self._score(hidden, token_ids)
            self._group.shard.broadcast(token_ids)
        return token_ids

    def _score(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Put the likeliest tokens into `token_ids`, on rank 0. hidden: [D, E]"""
        logits = self._model.compute_logits(hidden)
        if logits is not None:
            torch.argmax(logits, dim=-1, out=token_ids)

    # --- further drafts, one token of each sequence ---

    def _further_sizes(
        self, agreed: StepAgreement, captured: CapturedGraphs
    ) -> tuple[CUDAGraphMode, BatchDescriptor | None, Sequence[int]]:
        """Return how all ranks run further drafts, and how many tokens each has: as many as it has
        sequences, of which some draw nothing, or as many as the graph that they replay."""
        across = [max(num, 1) for num in agreed.num_seqs_across_dp]
        most = max(across)
        mode, key = decide(
            is_uniform_decode=True, num_tokens=most, num_seqs=most, captured=captured
        )
        if mode is CUDAGraphMode.FULL:
            return mode, key, [key.num_tokens] * len(across)
        return CUDAGraphMode.NONE, None, across

    def _fill(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor | None,
        size: int,
    ) -> None:
        """Put what a draft follows from into the static inputs, and padding behind, up to `size`.
        hidden: [D, E]; token_ids, int64 [D], are behind `positions`; block_table: [D, columns]"""
        num = len(token_ids)
        for static, values in (
            (self._token_ids, token_ids),
            (self._positions, positions),
            (self._seq_lens, positions + 1),
            (self._hidden, hidden),
            (self._block_table, block_table),
        ):
            if num:
                assert values is not None, "`draft_blocks`"
                static[:num].copy_(values)
            static[num:size].zero_()

    def _further_context(
        self,
        context: ForwardContext,
        size: int,
        across: Sequence[int],
        mode: CUDAGraphMode,
        key: BatchDescriptor | None,
    ) -> ForwardContext:
        assert context.context is not None, "a step's context"
        attention = AttentionMetadata(
            num_decodes=size,
            block_table=self._block_table[:size],
            cu_seqlens_q=self._cu_seqlens_q[: size + 1],
            seq_lens=self._seq_lens[:size],
            slot_mapping=self._slots[:size],
        )
        dp_metadata: DPMetadata | None = None
        if self._group.dp_size > 1:
            dp_metadata = DPMetadata.make(across, self._group.dp_rank, size)
        facts = replace(
            context.context,
            is_prefill=False,
            graph_bs=size,
            is_draft=True,
            positions=self._positions[:size],
        )
        return replace(
            context,
            attn_metadata=attention,
            context=facts,
            dp_metadata=dp_metadata,
            adapters=None,
            spec_decode_metadata=None,
            cudagraph_runtime_mode=mode,
            batch_descriptor=key,
        )

    def _run_further(self, size: int, context: ForwardContext) -> None:
        """Put the next draft of each sequence in the place of its last one, on all ranks."""
        with forward_context(context):
            self._further(self._token_ids[:size], self._positions[:size], self._hidden[:size])
        self._group.shard.broadcast(self._token_ids[:size])

    def _draft_further(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Go on by a position, and put there what the layer says. token_ids: int64 [B], behind
        `positions`, int64 [B]; hidden: [B, E], what the layer returned for those"""
        attention: AttentionMetadata = get_forward_context().attn_metadata
        block_size = self._inputs.block_size
        positions.add_(1)
        attention.seq_lens.add_(attention.seq_lens > 0)  # padding attends to nothing
        blocks = attention.block_table.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1)
        torch.add(positions % block_size, blocks, alpha=block_size, out=attention.slot_mapping)
        hidden.copy_(self._model.predict_ahead(token_ids, positions, hidden))
        self._score(hidden, token_ids)
