"""A captured decode step of a real model equals the eager one, whatever its inputs hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile.config import CUDAGraphMode
from compile.context import BatchDescriptor, ForwardContext, forward_context
from compile.counters import counter
from compile.graphs.capture import capture_window
from compile.graphs.pools import GraphPools, new_graph_pool
from compile.graphs.wrapper import CUDAGraphWrapper
from model.layers.attention import AttentionMetadata

MAX_BLOCKS_PER_SEQ = 16


class StaticDecode:
    """Static inputs of decode steps with `num_seqs` padded sequences, and the graph on them."""

    def __init__(self, model: Any, layers: Any, caches: Any, num_seqs: int) -> None:
        pools = GraphPools(lambda: new_graph_pool(torch.device("cpu")))
        self.wrapper = CUDAGraphWrapper(model, CUDAGraphMode.FULL, pools)
        self.input_ids = torch.zeros(num_seqs, dtype=torch.int64)
        self.positions = torch.zeros(num_seqs, dtype=torch.int64)
        self.metadata = AttentionMetadata(
            num_decodes=num_seqs,
            cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
            seq_lens=torch.zeros(num_seqs, dtype=torch.int32),
            block_table=torch.zeros(num_seqs, MAX_BLOCKS_PER_SEQ, dtype=torch.int32),
            slot_mapping=torch.zeros(num_seqs, dtype=torch.int64),
        )
        self.context = ForwardContext(
            layers,
            self.metadata,
            caches,
            batch_descriptor=BatchDescriptor(num_seqs, num_seqs, True),
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
        )
        # Every sequence is a padding one: what is captured is the work, not the values.
        with capture_window():
            self.forward()

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        with forward_context(self.context):
            hidden: torch.Tensor = self.wrapper(self.input_ids, self.positions)
        return hidden

    def replay(
        self, tokens: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        self.input_ids.copy_(tokens)
        self.positions.copy_(positions)
        static = self.metadata
        for name in ("seq_lens", "slot_mapping"):
            getattr(static, name).copy_(getattr(metadata, name))
        static.block_table.zero_()
        static.block_table[:, : metadata.block_table.shape[1]].copy_(metadata.block_table)
        return self.forward()


@pytest.fixture
def replaying(paged: Any) -> Callable[..., Any]:
    """Return a maker of runners whose decode steps replay a graph."""

    class Replaying(paged):  # type: ignore[misc]
        decode: StaticDecode | None = None

        def _forward(
            self, tokens: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
        ) -> torch.Tensor:
            num_seqs = len(metadata.seq_lens)
            if metadata.num_decodes < num_seqs:
                prefilled: torch.Tensor = super()._forward(tokens, positions, metadata)
                return prefilled
            if self.decode is None:
                self.decode = StaticDecode(self.model, self.layers, self.caches, num_seqs)
            hidden = self.decode.replay(tokens, positions, metadata)
            logits: torch.Tensor = self.model.compute_logits(hidden)
            return logits

    return Replaying


@pytest.mark.feature("X02")
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize("num_padding_decodes", [0, 2])
def test_replayed_decode_steps_equal_eager_ones(
    make_checkpoint: Any,
    load: Any,
    paged: Any,
    replaying: Any,
    num_padding_decodes: int,
    family: str,
) -> None:
    model, config = load(make_checkpoint(family=family)[0])
    eager, graphs = paged(model), replaying(model)
    numbers = torch.Generator().manual_seed(0)
    prompts = {
        name: torch.randint(config.vocab_size, (n,), generator=numbers)
        for name, n in (("a", 5), ("b", 9), ("c", 2))
    }
    for runner in (eager, graphs):
        runner.step(prompts)
    with counter.expect(num_cudagraph_captured=1, num_cudagraph_replayed=12, num_late_captures=0):
        for _ in range(12):
            chunks = {
                name: torch.randint(config.vocab_size, (1,), generator=numbers) for name in prompts
            }
            wanted = eager.step(chunks, num_padding_decodes=num_padding_decodes)
            found = graphs.step(chunks, num_padding_decodes=num_padding_decodes)
            assert all(torch.equal(found[name], wanted[name]) for name in prompts)
    # The replays wrote the same keys and values.
    assert torch.equal(graphs.pool.nan_to_num(), eager.pool.nan_to_num())
