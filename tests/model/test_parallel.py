"""`Shard`: parts, and collectives as ops, of sizes that differ between ranks and steps."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group

from compile.custom_op import function_of
from compile.errors import FieldError
from compile.passes.fuse_all_reduce_rms_norm import all_reduce_add_rms_norm, all_reduce_then_norm
from model import parallel
from model.config import ModelConfig
from model.kernels.triton import all_reduce
from model.kernels.triton.all_reduce import MEMORY_BYTES, PeerMemory
from model.layers.decoder import CausalLM
from model.parallel import Placement, Shard


@pytest.mark.parametrize("total", [0, 1, 2, 7, 8, 509])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_slices_cover_everything_once(total: int, size: int) -> None:
    covered = [i for rank in range(size) for i in range(total)[Shard(rank, size).slice(total)]]
    assert covered == list(range(total))


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
    names_the_sizes_that_layers_take(fields, num_heads, dp_size)


@pytest.mark.feature("S04")
@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("num_dense", [0, 1, 2])
@pytest.mark.parametrize(("num_heads", "moe_size"), [(12, 7), (12, 8), (12, 12), (5, 10), (8, 4)])
def test_shared_experts_and_latents_are_split_as_the_model_says(
    num_heads: int, moe_size: int, num_dense: int, dp_size: int
) -> None:
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 20,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "first_k_dense_replace": num_dense,
        "n_routed_experts": 24,
        "n_shared_experts": 2,
        "moe_intermediate_size": moe_size,
    }
    names_the_sizes_that_layers_take(fields, num_heads, dp_size)


def names_the_sizes_that_layers_take(fields: dict[str, Any], num_heads: int, dp_size: int) -> None:
    config = ModelConfig.from_dict(fields, "config.json")
    takes = []
    for size in range(1, num_heads + 1):
        shard = Shard(0, size, data=Shard(0, dp_size, kind="dp"))
        with suppress(FieldError):
            CausalLM(config, Placement(torch.float32, torch.device("meta"), shard))
            takes.append(size)
    assert config.tensor_parallel_sizes(dp_size) == takes


RANKS = 3


def rows_of(rank: int, num_rows: int) -> torch.Tensor:
    return torch.full((num_rows, 2), rank + 1.0) + torch.arange(num_rows).unsqueeze(1) / 16


def random_sizes(rng: random.Random) -> list[int]:
    return [rng.choice([0, 1, 2, 3, 7, 33]) for _ in range(RANKS)]


def traced(function: Callable[..., Any], graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """Return `function` traced once, its guards dropped."""

    def keep(graph: torch.fx.GraphModule, _inputs: Any, **_: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(function, backend=keep, fullgraph=True, dynamic=True, options=options)


@pytest.fixture(autouse=True)
def _forget_traces() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.feature("K08")
@pytest.mark.parametrize("dim", [0, 1])
def test_sizes_that_change_run_in_one_graph(dim: int, run_ranks: Any) -> None:
    rng = random.Random(0)
    steps = [[3, 5, 4], *(random_sizes(rng) for _ in range(30))]
    graphs: list[torch.fx.GraphModule] = []

    def gather(x: torch.Tensor, sizes: list[int], shard: Shard) -> torch.Tensor:
        return shard.all_gather(2 * x, dim, sizes)

    def work(shard: Shard) -> list[torch.Tensor]:
        # The other ranks run as written: a graph and the model meet in the same collective.
        entry = traced(gather, graphs) if shard.rank == 0 else gather
        parts = [rows_of(shard.rank, sizes[shard.rank]).movedim(0, dim) for sizes in steps]
        return [entry(part, sizes, shard) for part, sizes in zip(parts, steps, strict=True)]

    results = run_ranks(RANKS, work)
    for step, sizes in enumerate(steps):
        parts = [2 * rows_of(rank, n).movedim(0, dim) for rank, n in enumerate(sizes)]
        fake = parallel.all_gather(parts[0].to("meta"), sizes, dim, "tp")
        for found in results:
            assert torch.equal(found[step], torch.cat(parts, dim))
            assert (fake.shape, fake.stride()) == (found[step].shape, found[step].stride())
    (graph,) = graphs
    (call,) = [node for node in graph.graph.nodes if node.target is parallel.all_gather]
    assert all(isinstance(size, torch.fx.Node) for size in call.args[1])


@pytest.mark.parametrize("sizes", [[1, 2], [2, 2, 2], [2, 9, 9, 2]])
def test_sizes_that_are_not_the_tensors_are_refused(sizes: list[int], run_ranks: Any) -> None:
    def work(shard: Shard) -> None:
        with pytest.raises(ValueError, match=r"sizes: wanted 3 with 4 at rank \d, found \["):
            shard.all_gather(torch.zeros(4, 2), 0, sizes)
        with pytest.raises(ValueError, match=r"sizes: wanted 3 with the sum 4, found \["):
            shard.reduce_scatter(torch.zeros(4, 2), sizes)

    run_ranks(RANKS, work)


@pytest.mark.feature("K08")
def test_sums_are_scattered_in_sizes_that_change(run_ranks: Any) -> None:
    rng = random.Random(1)
    steps = [[2, 2, 2], [0, 0, 5], *(random_sizes(rng) for _ in range(20))]
    tensors = [
        [torch.randn(sum(sizes), 2, generator=torch.manual_seed(step)) + rank for rank in range(3)]
        for step, sizes in enumerate(steps)
    ]

    def work(shard: Shard) -> list[torch.Tensor]:
        pairs = zip(tensors, steps, strict=True)
        return [shard.reduce_scatter(parts[shard.rank].clone(), sizes) for parts, sizes in pairs]

    found = run_ranks(RANKS, work)
    for step, sizes in enumerate(steps):
        total = torch.stack(tensors[step]).sum(0)
        joined = torch.cat([rank[step] for rank in found])
        assert [len(rank[step]) for rank in found] == sizes
        torch.testing.assert_close(joined, total)


@pytest.mark.feature("O02")
def test_sums_are_their_own_op_where_memory_is_not_common_or_too_small(
    run_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the op calls on a GPU. No kernel can be launched here, so none was if it returns. On a
    CPU the op does not look for such memory."""
    op = all_reduce_add_rms_norm.default
    assert function_of(op, "cpu") is all_reduce_then_norm
    monkeypatch.setattr(all_reduce, "SLOT_BYTES", SimpleNamespace(value=1024))

    def work(shard: Shard) -> bool:
        on_gpu, group = function_of(op, "cuda"), shard.group
        assert on_gpu is not None and group is not None
        residual, weight = torch.randn(2, 9, 32)
        x = torch.randn(9, 32)
        given = (residual, weight[0], 1e-5, shard.group_name)
        wanted = op(x.clone(), *given)
        results = [on_gpu(x.clone(), *given)]
        memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8)
        parallel.share_peer_memory(group, PeerMemory(memory, [memory.data_ptr()] * 2, shard.rank))
        results.append(on_gpu(x.clone(), *given))
        return all(
            torch.equal(*pair) for found in results for pair in zip(found, wanted, strict=True)
        )

    assert run_ranks(2, work) == [True, True]


def group_in_name() -> dist.ProcessGroup:
    return dist.ProcessGroup(dist.HashStore(), 0, 1)


@pytest.mark.feature("K08")
def test_torch_finds_the_groups_of_two_ranks_by_their_names(run_grid: Any) -> None:
    """As symmetric memory looks for them: it is told a name, and meets in the group's store."""

    def work(shard: Shard) -> list[str]:
        names = []
        for each in (shard, shard.data):
            assert each is not None and each.group is not None
            found = _resolve_process_group(each.group_name)  # type: ignore[arg-type]
            assert found is each.group and found.group_name == each.group_name
            assert (found.rank(), found.size()) == (each.rank, 2)
            x = torch.full((2, 3), 1.0 + each.rank)
            joined = torch.empty(4, 3)
            found._allgather_base(joined, x).wait()
            assert joined[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
            with pytest.raises(RuntimeError, match="already registered"):
                _register_process_group(found.group_name, found)
            names.append(each.group_name)
        return names

    found = [names for row in run_grid(2, 2, work) for names in row]
    # Four ranks share this process. One with a process of its own calls its groups tp and dp.
    assert {re.sub(r"[.]\d+$", "", tensor) for tensor, _ in found} == {"tp"}
    assert {re.sub(r"[.]\d+$", "", data) for _, data in found} == {"dp"}
    assert len({name for names in found for name in names}) == 8


def test_a_process_that_has_one_group_calls_it_by_its_kind() -> None:
    # Ranks' processes agree on names because each of them counts for itself.
    first, second = group_in_name(), group_in_name()
    name = parallel.register_group("test", first)
    assert name == "test"
    assert parallel.register_group("test", first) == "test"
    assert parallel.register_group("test", second) == "test.1"
    del first
    gc.collect()
    third = group_in_name()
    assert parallel.register_group("test", third) == "test"
