"""A step that judges drafts replays a graph of its query length and finds what single steps do."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from compile.config import CUDAGraphMode
from compile.context import BatchDescriptor, ForwardContext, forward_context, get_forward_context
from compile.graphs.capture import capture_window
from compile.graphs.pools import GraphPools, new_graph_pool
from compile.graphs.wrapper import CUDAGraphWrapper
from model.layers.attention import AttentionMetadata
from model.speculation import SpecDecodeMetadata

CPU = torch.device("cpu")
FULL = CUDAGraphMode.FULL
MAX_BLOCKS_PER_SEQ = 16
DRAFTS = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6)


@given(DRAFTS)
def test_every_row_of_the_logits_judges_one_draft_or_is_a_bonus(drafts: list[list[int]]) -> None:
    found = SpecDecodeMetadata.of(drafts, 4, CPU)
    # Rows as the batch has them: who computed them, and how far in its sequence.
    rows = [(i, j) for i, tokens in enumerate(drafts) for j in range(len(tokens) + 1)]
    judged = [rows[k] for k in found.target_logits_indices.tolist()]
    assert judged == [(i, j) for i, tokens in enumerate(drafts) for j in range(len(tokens))]
    assert found.draft_token_ids.tolist() == [drafts[i][j] for i, j in judged]
    bonus = [rows[k] for k in found.bonus_logits_indices.tolist()]
    assert bonus == [(i, len(tokens)) for i, tokens in enumerate(drafts)]
    assert found.num_draft_tokens_np.tolist() == [len(tokens) for tokens in drafts]
    starts = [0, *found.cu_num_draft_tokens.tolist()]
    for i, tokens in enumerate(drafts):
        assert found.draft_token_ids[starts[i] : starts[i + 1]].tolist() == tokens


def test_more_drafts_than_a_step_can_judge_are_refused() -> None:
    with pytest.raises(ValueError, match=r"drafts: wanted at most num_spec_steps=1 .*, found 2"):
        SpecDecodeMetadata.of([[1], [1, 2]], 1, CPU)


def verifying(paged: Any, query_len: int) -> Any:
    """Return a class of runners whose steps of `query_len` tokens each replay a full graph."""

    class Verifying(paged):  # type: ignore[misc]
        wrapper: CUDAGraphWrapper | None = None

        @torch.inference_mode()
        def _forward(
            self, tokens: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
        ) -> torch.Tensor:
            num_seqs = len(metadata.seq_lens)
            if len(tokens) != num_seqs * query_len:
                prefilled: torch.Tensor = super()._forward(tokens, positions, metadata)
                return prefilled
            if self.wrapper is None:
                self._capture(num_seqs)
            self.inputs[0].copy_(tokens)
            self.inputs[1].copy_(positions)
            static = self.context.attn_metadata
            for name in ("seq_lens", "slot_mapping"):
                getattr(static, name).copy_(getattr(metadata, name))
            static.block_table[:, : metadata.block_table.shape[1]].copy_(metadata.block_table)
            with forward_context(self.context):
                hidden = self.wrapper(*self.inputs)
            logits: torch.Tensor = self.model.compute_logits(hidden)
            return logits

        def _capture(self, num_seqs: int) -> None:
            num_tokens = num_seqs * query_len
            self.inputs = [torch.zeros(num_tokens, dtype=torch.int64) for _ in range(2)]
            metadata = AttentionMetadata(
                num_decodes=num_seqs if query_len == 1 else 0,
                cu_seqlens_q=torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32),
                seq_lens=torch.full((num_seqs,), query_len, dtype=torch.int32),
                block_table=torch.zeros(num_seqs, MAX_BLOCKS_PER_SEQ, dtype=torch.int32),
                slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            )
            self.context = ForwardContext(
                self.layers,
                metadata,
                self.caches,
                batch_descriptor=BatchDescriptor(num_tokens, num_seqs, True),
                cudagraph_runtime_mode=FULL,
            )
            pools = GraphPools(lambda: new_graph_pool(CPU))
            self.wrapper = CUDAGraphWrapper(self.model, FULL, pools)
            with capture_window(), forward_context(self.context):
                self.wrapper(*self.inputs)

    return Verifying


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_a_replayed_step_of_drafts_finds_the_tokens_of_single_steps(
    make_checkpoint: Any, load: Any, paged: Any, num_drafts: int, num_seqs: int
) -> None:
    model, config = load(make_checkpoint()[0])
    numbers = torch.Generator().manual_seed(0)
    prompts = {
        str(i): torch.randint(config.vocab_size, (5 + i,), generator=numbers)
        for i in range(num_seqs)
    }
    single, several = paged(model), verifying(paged, 1 + num_drafts)(model)
    tokens = {name: logits[-1].argmax() for name, logits in single.step(prompts).items()}
    several.step(prompts)
    for _ in range(3):
        # What single steps generate, of which the drafts are the middle.
        runs = {name: [token] for name, token in tokens.items()}
        for _ in range(num_drafts + 1):
            logits = single.step({name: run[-1].reshape(1) for name, run in runs.items()})
            for name, run in runs.items():
                run.append(logits[name][-1].argmax())
        drafts = [[int(token) for token in runs[name][1:-1]] for name in prompts]
        metadata = SpecDecodeMetadata.of(drafts, num_drafts, CPU)
        found = several.step({name: torch.stack(run[:-1]) for name, run in runs.items()})
        rows = torch.cat([found[name] for name in prompts]).argmax(dim=1)
        assert torch.equal(rows[metadata.target_logits_indices], metadata.draft_token_ids)
        bonus = rows[metadata.bonus_logits_indices]
        assert torch.equal(bonus, torch.stack([runs[name][-1] for name in prompts]))
        tokens = {name: runs[name][-1] for name in prompts}
    key = BatchDescriptor(num_seqs * (num_drafts + 1), num_seqs, True)
    assert several.wrapper.num_replays == {key: 3}


def test_a_forward_context_carries_the_drafts_to_whoever_judges_them() -> None:
    metadata = SpecDecodeMetadata.of([[1, 2], []], 2, CPU)
    with forward_context(ForwardContext(spec_decode_metadata=metadata)):
        assert get_forward_context().spec_decode_metadata is metadata
