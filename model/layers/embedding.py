"""Token embedding and output head, split over the vocabulary.

A head is packed like any other weight. One that also looks tokens up is packed where rows can be
read from packed memory, so that a tied model holds its largest matrix once; else it stays plain.

The vocabulary is padded to a multiple of the ranks. Padding rows are zero, no token id reaches
them, and their logits are cut off after gathering.

Shapes: T tokens, N rows, E hidden size, V vocabulary, Vr rows of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from model.kernels.packed_linear import PackedWeight, can_pack, packed_rows
from model.layers.linear import Linear
from model.layers.slices import WeightSlice
from model.parallel import Shard


class VocabParallelEmbedding(Linear):
    """This rank's rows of the vocabulary, to look tokens up, to score them, or both.

    Invariant: what is traced does not depend on the rank; `first_row`, an input, does.
    """

    first_row: torch.Tensor

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        looks_up: bool = True,
        scores: bool = False,
    ) -> None:
        rows_per_rank = -(-vocab_size // shard.size)
        super().__init__(hidden_size, rows_per_rank, False, dtype, device)
        self._shard = shard
        self._looks_up, self._scores = looks_up, scores
        self._vocab_size = vocab_size
        self._rows = shard.slice(vocab_size)
        first_row = torch.tensor(self._rows.start, device=device)
        self.register_buffer("first_row", first_row, persistent=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [T]. Returns [T, E], equal on all ranks."""
        if self._shard.size == 1:
            return self._look_up(token_ids)
        local_ids = token_ids - self.first_row
        is_mine = (local_ids >= 0) & (local_ids < self._out_features)
        rows = self._look_up(torch.where(is_mine, local_ids, 0))
        return self._shard.all_reduce(torch.where(is_mine.unsqueeze(-1), rows, 0.0))

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        if self.handle is None:
            return F.embedding(rows, self.weight)
        out: torch.Tensor = packed_rows(rows, self.handle, self.weight.shape[1], self.dtype)
        return out

    def loaded(self, name: str) -> None:
        """Zero the padding rows, and pack what scores."""
        self.weight[self._rows.stop - self._rows.start :].zero_()
        if not self._scores or not can_pack(self.dtype, self.device):
            return
        packed = PackedWeight(self.weight)
        if packed.has_rows or not self._looks_up:
            self.replace_weight(packed)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Score all tokens. hidden: [N, E]. Returns float32 [N, V] on rank 0, None on others."""
        logits = self._shard.gather(self.product(hidden, None), dim=-1)
        return None if logits is None else logits[:, : self._vocab_size].float()

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """Describe the checkpoint's tensor."""
        start, stop = self._rows.start, self._rows.stop
        shape, rows = (self._vocab_size, self.weight.shape[1]), slice(0, stop - start)
        yield WeightSlice(f"{name}.weight", shape, self, "weight", rows, 0, start, stop)
