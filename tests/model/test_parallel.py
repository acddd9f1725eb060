"""`Shard`: parts and collectives."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from compile.errors import FieldError
from model.config import ModelConfig
from model.layers.decoder import CausalLM
from model.layers.linear import kv_heads_of
from model.parallel import Placement, Shard


@pytest.mark.parametrize("total", [0, 1, 2, 7, 8, 509])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_slices_cover_everything_once(total: int, size: int) -> None:
    covered = [i for rank in range(size) for i in range(total)[Shard(rank, size).slice(total)]]
    assert covered == list(range(total))


def test_one_rank_is_the_identity() -> None:
    t = torch.arange(6.0).view(2, 3)
    assert Shard().all_reduce(t) is t
    assert Shard().gather(t, dim=0) is t


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gathering_joins_in_rank_order_on_rank_0_alone(dim: int, run_ranks: Any) -> None:
    # As a transposed view: what travels is contiguous.
    parts = [torch.arange(6.0).view(3, 2) + 10 * rank for rank in range(3)]
    found, *others = run_ranks(3, lambda shard: shard.gather(parts[shard.rank].t(), dim))
    assert torch.equal(found, torch.cat([part.t() for part in parts], dim))
    assert others == [None, None]


def test_a_shard_is_found_by_the_name_of_its_group(run_ranks: Any) -> None:
    def work(shard: Shard) -> Shard:
        other = Shard(shard.rank, shard.size, shard.group, kind="dp")
        assert Shard.named(other.group_name) == other
        return Shard.named(shard.group_name)

    for rank, found in enumerate(run_ranks(2, work)):
        assert (found.rank, found.size, found.kind) == (rank, 2, "tp")
    assert Shard.named("") == Shard()
    with pytest.raises(LookupError, match="group_name: wanted a registered group"):
        Shard.named("nobody's")


def test_every_query_head_finds_its_kv_head() -> None:
    for size, num_heads, num_kv_heads in [(2, 8, 4), (4, 8, 4), (4, 8, 2), (8, 8, 1), (1, 6, 3)]:
        for rank in range(size):
            count, first = kv_heads_of(num_kv_heads, Shard(rank, size))
            heads = num_heads // size
            wanted = {
                head * num_kv_heads // num_heads for head in range(rank * heads, (rank + 1) * heads)
            }
            assert wanted == set(range(first, first + count))


def test_a_grids_ranks_hold_every_expert_once() -> None:
    for dp_size, tp_size in [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]:
        held = [
            Shard(rank, tp_size, data=Shard(dp_rank, dp_size, kind="dp")).own_experts(36)
            for dp_rank in range(dp_size)
            for rank in range(tp_size)
        ]
        assert [expert for experts in held for expert in experts] == list(range(36))
        assert {len(experts) for experts in held} == {36 // len(held)}


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("mlp_only_layers", [None, [], [0]], ids=["dense", "sparse", "unused"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 3), (12, 12), (12, 4), (8, 1), (5, 5)])
def test_the_sizes_that_a_model_names_are_those_that_its_layers_take(
    num_heads: int, num_kv_heads: int, mlp_only_layers: list[int] | None, dp_size: int
) -> None:
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 4 * num_heads,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }
    if mlp_only_layers is not None:
        fields |= {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": mlp_only_layers}
        fields |= {"num_experts": 12, "moe_intermediate_size": 7}
    config = ModelConfig.from_dict(fields, "config.json")
    takes = []
    for size in range(1, num_heads + 1):
        shard = Shard(0, size, data=Shard(0, dp_size, kind="dp"))
        with suppress(FieldError):
            CausalLM(config, Placement(torch.float32, torch.device("meta"), shard))
            takes.append(size)
    assert config.tensor_parallel_sizes(dp_size) == takes
