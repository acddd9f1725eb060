"""A captured step of a real model equals the eager one, whatever its inputs hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile.config import CUDAGraphMode
from compile.context import BatchDescriptor, ForwardContext, forward_context
from compile.counters import counter
from compile.graphs.capture import capture_window
from compile.graphs.pools import GraphPools, new_graph_pool
from compile.graphs.wrapper import CUDAGraphWrapper
from model.kernels.cpu import native, packed_linear
from model.layers.attention import AttentionMetadata

CPU = torch.device("cpu")
FULL = CUDAGraphMode.FULL
MAX_BLOCKS_PER_SEQ = 16


def replaying(paged: Any) -> Any:
    """Return a class of runners whose decode steps replay a full graph."""

    class Replaying(paged):  # type: ignore[misc]
        wrapper: CUDAGraphWrapper | None = None

        @torch.inference_mode()
        def _forward(
            self, tokens: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
        ) -> torch.Tensor:
            num_seqs = len(metadata.seq_lens)
            if len(tokens) != num_seqs:
                prefilled: torch.Tensor = super()._forward(tokens, positions, metadata)
                return prefilled
            if self.wrapper is None:
                self._capture(num_seqs)
            self.inputs[0].copy_(tokens)
            self.inputs[1].copy_(positions)
            static = self.context.attn_metadata
            for name in ("seq_lens", "slot_mapping"):
                getattr(static, name).copy_(getattr(metadata, name))
            static.block_table.zero_()
            static.block_table[:, : metadata.block_table.shape[1]].copy_(metadata.block_table)
            with forward_context(self.context):
                hidden = self.wrapper(*self.inputs)
            logits: torch.Tensor = self.model.compute_logits(hidden)
            return logits

        def _capture(self, num_seqs: int) -> None:
            self.inputs = [torch.zeros(num_seqs, dtype=torch.int64) for _ in range(2)]
            metadata = AttentionMetadata(
                num_decodes=num_seqs,
                cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
                seq_lens=torch.ones(num_seqs, dtype=torch.int32),
                block_table=torch.zeros(num_seqs, MAX_BLOCKS_PER_SEQ, dtype=torch.int32),
                slot_mapping=torch.zeros(num_seqs, dtype=torch.int64),
            )
            self.context = ForwardContext(
                self.layers,
                metadata,
                self.caches,
                batch_descriptor=BatchDescriptor(num_seqs, num_seqs, True),
                cudagraph_runtime_mode=FULL,
            )
            pools = GraphPools(lambda: new_graph_pool(CPU))
            self.wrapper = CUDAGraphWrapper(self.model, FULL, pools)
            with capture_window(), forward_context(self.context):
                self.wrapper(*self.inputs)

    return Replaying


@pytest.mark.feature("X02")
@pytest.mark.parametrize(
    ("family", "has_kernels"), [("Llama", True), ("Llama", False), ("Mixtral", True)]
)
@pytest.mark.parametrize("num_padding_decodes", [0, 2])
def test_replayed_decode_steps_equal_eager_ones(
    make_checkpoint: Any,
    load: Any,
    paged: Any,
    num_padding_decodes: int,
    family: str,
    has_kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_kernels:
        monkeypatch.setattr(native, "run", lambda *_, **__: False)
        monkeypatch.setattr(packed_linear, "_kernel_rows", lambda _: 0)
    model, config = load(make_checkpoint(family=family)[0])
    eager, graphs = paged(model), replaying(paged)(model)
    numbers = torch.Generator().manual_seed(0)
    prompts = {
        name: torch.randint(config.vocab_size, (n,), generator=numbers)
        for name, n in (("a", 5), ("b", 9), ("c", 2))
    }
    for runner in (eager, graphs):
        runner.step(prompts)
    with counter.expect(num_cudagraph_captured=1, num_cudagraph_replayed=12, num_late_captures=0):
        for i in range(12):
            torch.set_num_threads(1 + i % 2)
            chunks = {
                name: torch.randint(config.vocab_size, (1,), generator=numbers) for name in prompts
            }
            wanted = eager.step(chunks, num_padding_decodes=num_padding_decodes)
            found = graphs.step(chunks, num_padding_decodes=num_padding_decodes)
            assert all(torch.equal(found[name], wanted[name]) for name in prompts)
    torch.set_num_threads(1)
    # The replays wrote the same keys and values.
    assert torch.equal(graphs.pool.nan_to_num(), eager.pool.nan_to_num())
