"""Linear layers whose weights are split over the ranks of a shard (Megatron-LM; Shoeybi, 2019).

Column-parallel layers split their outputs and need no communication; a row-parallel layer splits
its inputs and sums the ranks' results: a pair of them costs one all-reduce. Token embedding and
output head are split over the vocabulary, padded with zero rows, whose logits are cut off after
gathering. A head that also looks tokens up is packed where rows can be read from packed memory.

Shapes: T tokens, I inputs, O outputs; weights are [O, I] as in `F.linear`. N rows, E hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from compile.errors import FieldError
from model.kernels.cpu.packed_linear import (
    PackedWeight,
    can_pack,
    packed_rows,
    scaled_linear,
)
from model.kernels.dispatch import packed_linear
from model.kernels.scaled_linear import quantize_inputs
from model.layers.lora import lora_add
from model.layers.slices import WeightedLayer, WeightSlice, whole
from model.parallel import Placement, Shard
from model.quantization import Float4, Float8, form_for


class Linear(WeightedLayer):
    """A product with a weight that is packed once it is read, where packing pays: then `weight`
    keeps its shape and dtype alone, and `handle` stands for it."""

    handle: torch.Tensor | None
    lora_a: torch.Tensor | None
    """[slots, parts * largest rank, I], if adapters add to the layer's outputs."""
    lora_b: torch.Tensor | None
    """[slots, largest rank, O]"""
    input_scale: torch.Tensor | None
    """Of whatever the layer multiplies, where it holds FP4 numbers: float32 [1]"""

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, bias: bool
    ) -> None:
        super().__init__(place)
        is_held_as = place.quantization if self.is_quantizable else "none"
        self.form = form_for(is_held_as, in_features)
        self.weight = self.declare(out_features, in_features)
        self.bias = self.declare(out_features) if bias else None
        for name in ("handle", "lora_a", "lora_b", "input_scale"):
            self.register_buffer(name, None, persistent=False)
        self._part_sizes: list[int] = []
        self._packed: PackedWeight | None = None
        self._out_features = out_features

    def loaded(self, name: str) -> None:
        if name != "weight":
            return
        kept = self.take_kept()
        if kept is not None:
            self.input_scale = kept.input_scale
            self.replace_weight(PackedWeight(kept))
        elif self.form or can_pack(self.dtype, self.device):
            self.replace_weight(PackedWeight(self.weight, self.form))

    def replace_weight(self, packed: PackedWeight) -> None:
        """Compute with a packed weight from now on, and free the plain one."""
        self._packed = packed
        self.handle = packed.handle
        self.weight = self.declare(*self.weight.shape)

    def forget_values(self) -> None:
        self._packed = None

    def take_adapters(self, num_slots: int, max_rank: int, part_sizes: list[int]) -> None:
        """Add what adapters make of the inputs from now on: nothing until the matrices of their
        slots are filled in. part_sizes: outputs of each tensor that the layer joins."""
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        inputs = self.weight.shape[1]
        self.lora_a = zeros((num_slots, len(part_sizes) * max_rank, inputs))
        self.lora_b = zeros((num_slots, max_rank, self._out_features))
        self._part_sizes = part_sizes

    def clear_slot(self, slot: int) -> None:
        """Let an adapter's slot add nothing."""
        assert self.lora_a is not None and self.lora_b is not None
        self.lora_a[slot].zero_()
        self.lora_b[slot].zero_()

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, I]. Returns [T, O], with what each token's adapter adds."""
        out: torch.Tensor
        if self.handle is None:
            out = F.linear(x, self.weight, bias)
        elif isinstance(self.form, Float8 | Float4):
            rounded = quantize_inputs(x, self.form, self.input_scale)
            out = scaled_linear(*rounded, self.handle, bias, self._out_features, x.dtype)
        else:
            out = packed_linear(x, self.handle, bias, self._out_features)
        if self.lora_a is not None:
            lora_add(out, x, self.lora_a, self.lora_b, self._part_sizes)
        return out


class _Columns(NamedTuple):
    """The outputs [start, start + size) of `total` that this rank takes from one tensor."""

    name: str
    total: int
    start: int
    size: int


class _ColumnSplit(Linear):
    """Outputs of several checkpoint tensors, this rank's part of each, one after the other."""

    is_quantizable = True

    def __init__(
        self, in_features: int, columns: Sequence[_Columns], place: Placement, *, bias: bool
    ) -> None:
        super().__init__(in_features, sum(part.size for part in columns), place, bias=bias)
        self._columns = tuple(columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, I], equal on all ranks. Returns this rank's outputs."""
        return self.product(x, self.bias)

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        parent, row = name.rpartition(".")[0], 0
        for part in self._columns:
            tensor, shape = f"{parent}.{part.name}", (part.total, self.weight.shape[1])
            where = (slice(row, row + part.size), 0, part.start, part.start + part.size)
            yield WeightSlice(f"{tensor}.weight", shape, self, "weight", *where)
            if self.bias is not None:
                yield WeightSlice(f"{tensor}.bias", shape[:1], self, "bias", *where)
            row += part.size


class MergedColumnParallelLinear(_ColumnSplit):
    """Several tensors of equal size in one product, each split evenly."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        names: Sequence[str],
        place: Placement,
        bias: bool,
    ) -> None:
        size = place.shard.divide("intermediate_size", out_features)
        start = place.shard.rank * size
        columns = [_Columns(name, out_features, start, size) for name in names]
        super().__init__(in_features, columns, place, bias=bias)


class ReplicatedLinear(_ColumnSplit):
    """Several tensors in one product, all of each on every rank."""

    def __init__(
        self, in_features: int, sizes: Mapping[str, int], place: Placement, *, bias: bool
    ) -> None:
        columns = [_Columns(name, size, 0, size) for name, size in sizes.items()]
        super().__init__(in_features, columns, place, bias=bias)


class QKVParallelLinear(_ColumnSplit):
    """Queries, keys and values of this rank's heads. With fewer KV heads than ranks, each lives on
    those whose query heads attend to it."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        place: Placement,
        *,
        bias: bool,
    ) -> None:
        shard = place.shard
        self.num_heads = shard.divide("num_attention_heads", num_heads)
        self.num_kv_heads, first = kv_heads_of(num_kv_heads, shard)
        self.head_dim = head_dim
        q_size, kv_size = self.num_heads * head_dim, self.num_kv_heads * head_dim
        of_kv = (num_kv_heads * head_dim, first * head_dim, kv_size)
        columns = (
            _Columns("q_proj", num_heads * head_dim, shard.rank * q_size, q_size),
            _Columns("k_proj", *of_kv),
            _Columns("v_proj", *of_kv),
        )
        super().__init__(hidden_size, columns, place, bias=bias)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views q [T, H, D] and k, v [T, Hkv, D] of the layer's output."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = heads.split_with_sizes(sizes, dim=1)
        return q, k, v


def kv_heads_of(num_kv_heads: int, shard: Shard) -> tuple[int, int]:
    """Return how many KV heads a rank holds and the first of them; a FieldError if neither the
    heads nor the ranks are a multiple of the other."""
    if num_kv_heads % shard.size == 0:
        count = num_kv_heads // shard.size
        return count, shard.rank * count
    if shard.size % num_kv_heads == 0:
        return 1, shard.rank // (shard.size // num_kv_heads)
    wanted = f"a multiple or a divisor of tensor_parallel_size={shard.size}"
    raise FieldError("num_key_value_heads", wanted, num_kv_heads)


class RowParallelLinear(Linear):
    """Inputs split evenly; the ranks' results are summed, and the bias is added once."""

    is_quantizable = True

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, bias: bool
    ) -> None:
        size = place.shard.divide("in_features", in_features)
        super().__init__(size, out_features, place, bias=bias)
        self._shard = place.shard
        self._in_features = in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, I / ranks], this rank's inputs. Returns [T, O], equal on all ranks."""
        if self._shard.size == 1:
            return self.product(x, self.bias)
        out = self._shard.all_reduce(self.product(x, None))
        return out if self.bias is None else out + self.bias

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        part = self._shard.slice(self._in_features)
        shape = (self.weight.shape[0], self._in_features)
        yield WeightSlice(
            f"{name}.weight", shape, self, "weight", slice(None), 1, part.start, part.stop
        )
        if self.bias is not None:
            yield whole(f"{name}.bias", self, "bias")


class VocabParallelEmbedding(Linear):
    """This rank's rows of the vocabulary, to look tokens up, to score them, or both. What is traced
    does not depend on the rank; `first_row`, an input, does."""

    first_row: torch.Tensor

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        place: Placement,
        *,
        looks_up: bool = True,
        scores: bool = False,
    ) -> None:
        rows_per_rank = -(-vocab_size // place.shard.size)
        super().__init__(hidden_size, rows_per_rank, place, bias=False)
        self._shard = place.shard
        self._looks_up, self._scores = looks_up, scores
        self._vocab_size = vocab_size
        self._rows = self._shard.slice(vocab_size)
        first_row = torch.tensor(self._rows.start, device=place.device)
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

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        start, stop = self._rows.start, self._rows.stop
        shape, rows = (self._vocab_size, self.weight.shape[1]), slice(0, stop - start)
        yield WeightSlice(f"{name}.weight", shape, self, "weight", rows, 0, start, stop)
