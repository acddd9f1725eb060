"""A captured step of a real model equals the eager one, whatever its inputs hold, with one token of
each sequence or with several."""

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


def replaying(paged: Any, query_len: int) -> Any:
    """Return a class of runners whose steps of `query_len` tokens each replay a full graph."""

    class Replaying(paged):  # type: ignore[misc]
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
            static.block_table.zero_()
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
    eager, graphs = paged(model), replaying(paged, 1)(model)
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


@pytest.mark.parametrize("query_len", [2, 3, 4])
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_a_replayed_step_of_several_tokens_finds_those_of_single_steps(
    make_checkpoint: Any, load: Any, paged: Any, query_len: int, num_seqs: int
) -> None:
    model, config = load(make_checkpoint()[0])
    numbers = torch.Generator().manual_seed(0)
    prompts = {
        str(i): torch.randint(config.vocab_size, (5 + i,), generator=numbers)
        for i in range(num_seqs)
    }
    single, several = paged(model), replaying(paged, query_len)(model)
    tokens = {name: logits[-1].argmax() for name, logits in single.step(prompts).items()}
    several.step(prompts)
    for _ in range(3):
        runs = {name: [token] for name, token in tokens.items()}
        for _ in range(query_len):
            logits = single.step({name: run[-1].reshape(1) for name, run in runs.items()})
            for name, run in runs.items():
                run.append(logits[name][-1].argmax())
        found = several.step({name: torch.stack(run[:-1]) for name, run in runs.items()})
        for name, run in runs.items():
            assert torch.equal(found[name].argmax(dim=1), torch.stack(run[1:]))
        tokens = {name: run[-1] for name, run in runs.items()}
    key = BatchDescriptor(num_seqs * query_len, num_seqs, True)
    assert several.wrapper.num_replays == {key: 3}
