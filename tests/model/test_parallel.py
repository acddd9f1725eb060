"""`Shard`: parts and collectives."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from compile.errors import FieldError
from model.config import ModelConfig
from model.files import refused
from model.layers.decoder import CausalLM
from model.layers.linear import kv_heads_of
from model.parallel import ExpertShard, Placement, Shard


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


def test_reducing_sums(run_ranks: Any) -> None:
    for found in run_ranks(3, lambda shard: shard.all_reduce(torch.full((4,), shard.rank + 1.0))):
        assert found.tolist() == [6.0] * 4


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


def test_a_grids_ranks_hold_every_expert_once() -> None:
    for dp_size, tp_size in [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]:
        grid = [
            ExpertShard(Shard(tp_rank, tp_size), Shard(dp_rank, dp_size, kind="dp"))
            for dp_rank in range(dp_size)
            for tp_rank in range(tp_size)
        ]
        assert [shard.rank for shard in grid] == list(range(dp_size * tp_size))
        assert {shard.divide(36) for shard in grid} == {36 // len(grid)}


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
def test_ranks_outside_of_the_group_are_refused(rank: int, size: int) -> None:
    with pytest.raises(FieldError, match="shard: wanted a rank from 0 to"):
        Shard(rank, size)


def test_every_query_head_finds_its_kv_head() -> None:
    for size, num_heads, num_kv_heads in [(2, 8, 4), (4, 8, 4), (4, 8, 2), (8, 8, 1), (1, 6, 3)]:
        for rank in range(size):
            count, first = kv_heads_of(num_kv_heads, Shard(rank, size))
            heads = num_heads // size
            wanted = {
                head * num_kv_heads // num_heads for head in range(rank * heads, (rank + 1) * heads)
            }
            assert wanted == set(range(first, first + count))


def test_kv_heads_that_cannot_be_spread_are_refused() -> None:
    with pytest.raises(FieldError, match="num_key_value_heads: wanted a multiple or a divisor"):
        kv_heads_of(3, Shard(0, 2))


def test_errors_survive_a_process_border() -> None:
    error = refused("field", "this", "that", "file")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is FieldError
    assert str(again) == "field: wanted this, found 'that' in file"


@pytest.mark.parametrize("num_heads", [5, 6, 8, 12])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6])
def test_the_sizes_that_a_model_names_are_those_that_its_layers_take(
    num_heads: int, num_kv_heads: int
) -> None:
    if num_heads % num_kv_heads:
        return
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 4 * num_heads,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }
    config = ModelConfig.from_dict(fields, "config.json")
    takes = []
    for size in range(1, num_heads + 1):
        try:
            CausalLM(config, Placement(torch.float32, torch.device("meta"), Shard(0, size)))
        except FieldError:
            continue
        takes.append(size)
    assert config.tensor_parallel_sizes() == takes
