"""Routed experts: against one token at a time, on grids of ranks, and what they read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from compile.context import DPMetadata, ForwardContext, forward_context
from model.config import Experts
from model.families import ExpertNames
from model.kernels import cpu, sparse_mlp
from model.kernels.cpu.packed_linear import PackedWeight, can_pack
from model.layers import moe
from model.layers.moe import SparseMLP
from model.parallel import Placement, Shard

CPU = torch.device("cpu")
NAMES = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")


@dataclass(frozen=True)
class Layer:
    """One layer's tensors. Invariant: there are at least as many experts as a token asks."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int
    norm: bool

    @classmethod
    def random(
        cls, num_experts: int, top_k: int, *, hidden: int = 12, size: int = 7, norm: bool = True
    ) -> Layer:
        gate_up, down = (
            torch.randn(num_experts, 2 * size, hidden),
            torch.randn(num_experts, hidden, size),
        )
        return cls(torch.randn(num_experts, hidden), gate_up, down, top_k, norm)

    def one_by_one(self, x: torch.Tensor) -> torch.Tensor:
        """Compute each token and each of its experts alone, as the definition says."""
        out = torch.zeros_like(x)
        for row, token in zip(out, x, strict=True):
            probabilities = (self.router @ token).softmax(0)
            chosen = probabilities.sort(descending=True).indices[: self.top_k].tolist()
            total = sum(float(probabilities[i]) for i in chosen) if self.norm else 1.0
            for i in chosen:
                gate, up = (self.gate_up[i] @ token).chunk(2)
                row += probabilities[i] / total * (self.down[i] @ (F.silu(gate) * up))
        return out

    def module(self, shard: Shard) -> SparseMLP:
        """Return this rank's part of the layer, loaded."""
        experts = Experts(len(self.down), self.top_k, self.down.shape[2], self.norm, (True,))
        place = Placement(torch.float32, CPU, shard)
        mlp = SparseMLP(self.router.shape[1], experts, NAMES, place)
        mlp.gate.allocate("weight").copy_(self.router)
        mlp.gate.loaded("weight")
        for layer, tensor in ((mlp.gate_up_proj, self.gate_up), (mlp.down_proj, self.down)):
            name = "layer.mlp.experts.gate_up_proj"
            [own] = layer.weight_slices("layer.mlp.weight", [name])
            own.target().copy_(tensor[own.start : own.stop])
            layer.loaded("weight")
        return mlp


def run(mlp: SparseMLP, x: torch.Tensor, counts: tuple[int, ...] | None = None) -> torch.Tensor:
    metadata = None if counts is None else DPMetadata(counts)
    with torch.inference_mode(), forward_context(ForwardContext(dp_metadata=metadata)):
        out: torch.Tensor = mlp(x)
    return out


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


# --- one rank -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 20),
    num_experts=st.integers(1, 12),
    top_k=st.integers(1, 12),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    norm=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_grouped_experts_equal_tokens_one_by_one(
    num_tokens: int, num_experts: int, top_k: int, sizes: tuple[int, int], norm: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, size = sizes
    top_k = min(top_k, num_experts)
    layer = Layer.random(num_experts, top_k, hidden=hidden, size=size, norm=norm)
    # A view of something wider, as a projection's output is.
    x = torch.randn(num_tokens, 2 * hidden)[:, :hidden]
    experts, weights = sparse_mlp.route(F.linear(x, layer.router), top_k, norm)
    wanted = layer.one_by_one(x)
    # Whichever experts a rank has: the parts sum to the whole.
    cut = num_experts // 2
    plain = [
        sparse_mlp.expert_mlp(x, experts, weights, layer.gate_up[part], layer.down[part], start)
        for part, start in ((slice(0, cut), 0), (slice(cut, None), cut))
    ]
    assert_close(plain[0] + plain[1], wanted)
    packed = [[PackedWeight(m) for m in matrices] for matrices in (layer.gate_up, layer.down)]
    handles = [torch.stack([p.handle for p in matrices]) for matrices in packed]
    found = cpu.expert_mlp(x, experts, weights, *handles, 0)
    assert found.dtype == x.dtype
    assert_close(found, wanted)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_experts_that_no_token_asks_for_are_not_read(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert can_pack(torch.float32, CPU)
    torch.manual_seed(0)
    layer = Layer.random(64, 2)
    mlp, x = layer.module(Shard()), torch.randn(num_tokens, 12)
    asked = F.linear(x, layer.router).topk(2).indices.flatten().unique().tolist()
    read: list[int] = []
    products = cpu.packed_products

    def counting(handles: torch.Tensor) -> Any:
        multiply, indices = products(handles), handles.tolist()

        def counted(rows: torch.Tensor, expert: int) -> torch.Tensor:
            read.append(indices[expert])
            return multiply(rows, expert)

        return counted

    monkeypatch.setattr(cpu, "packed_products", counting)
    assert_close(run(mlp, x), layer.one_by_one(x))
    handles = (mlp.gate_up_proj.handles, mlp.down_proj.handles)
    wanted = [int(matrices[i]) for i in asked for matrices in handles if matrices is not None]
    assert read == wanted


def test_a_token_that_is_not_a_number_reaches_no_other() -> None:
    torch.manual_seed(0)
    layer = Layer.random(5, 3)
    mlp, x = layer.module(Shard()), torch.randn(6, 12)
    wanted = run(mlp, x)
    x[2] = torch.nan
    found = run(mlp, x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert_close(found[others], wanted[others])


# --- experts in groups --------------------------------------------------------------------------


def routed_one_by_one(
    scores: list[float], biases: list[float] | None, top_k: int, num_groups: int, num_chosen: int
) -> set[int]:
    """Choose a token's experts as DeepSeek's reports say it."""
    choice = scores if biases is None else [a + b for a, b in zip(scores, biases, strict=True)]
    size = len(scores) // num_groups
    groups = [choice[i * size : (i + 1) * size] for i in range(num_groups)]
    counted = 1 if biases is None else 2
    values = [sum(sorted(group, reverse=True)[:counted]) for group in groups]
    best = sorted(range(num_groups), key=lambda i: -values[i])[:num_chosen]
    left = [i for i in range(len(scores)) if i // size in best]
    return set(sorted(left, key=lambda i: -choice[i])[:top_k])


@pytest.mark.feature("S04")
@settings(max_examples=60, deadline=None)
@given(
    num_groups=st.integers(1, 6),
    size=st.integers(2, 7),
    num_chosen=st.integers(1, 6),
    top_k=st.integers(1, 9),
    is_sigmoid=st.booleans(),
    norm=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_experts_are_chosen_from_the_best_groups(
    num_groups: int, size: int, num_chosen: int, top_k: int, is_sigmoid: bool, norm: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    num_chosen = min(num_chosen, num_groups)
    top_k = min(top_k, num_chosen * size)
    logits = 2 * torch.randn(5, num_groups * size)
    # So wide that the bias decides where the scores would not.
    bias = torch.randn(num_groups * size) if is_sigmoid else None
    experts, weights = sparse_mlp.route(logits, top_k, norm, bias, num_groups, num_chosen, 2.5)
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    biases = None if bias is None else bias.tolist()
    for row, found in zip(scores.tolist(), experts.tolist(), strict=True):
        assert set(found) == routed_one_by_one(row, biases, top_k, num_groups, num_chosen)
    wanted = scores.gather(1, experts)
    total = wanted.sum(1, keepdim=True) if norm else 1.0
    torch.testing.assert_close(weights, 2.5 * wanted / total)


@pytest.mark.feature("S04")
def test_sigmoids_that_are_all_zero_have_finite_weights() -> None:
    logits, bias = torch.full((1, 6), -200.0), torch.arange(6.0)
    experts, weights = sparse_mlp.route(logits, 2, True, bias, 3, 1, 1.0)
    assert experts.tolist() == [[5, 4]] and weights.tolist() == [[0.0, 0.0]]


@pytest.mark.feature("S04", "P15")
@pytest.mark.parametrize(("dp_size", "tp_size"), [(2, 1), (2, 2)])
def test_float32_scores_of_bfloat16_tokens_reach_every_rank_of_a_grid(
    dp_size: int, tp_size: int, run_grid: Callable[..., list[list[Any]]]
) -> None:
    """Rounded to bfloat16 these scores would be equal, and other experts chosen."""
    torch.manual_seed(0)
    experts = Experts(8, 2, 7, True, (True,), has_sigmoid_scores=True, num_groups=2)
    experts = replace(experts, num_groups_per_tok=1, has_float32_router=True)
    tensors = {"gate": 1 + 0.01 * torch.rand(8, 12), "up": torch.randn(8, 14, 12)}
    tensors |= {"down": torch.randn(8, 12, 7), "bias": torch.linspace(0, 1e-6, 8)}
    tokens = [torch.randn(n, 12).bfloat16() for n in (5, 3)[:dp_size]]

    def module(shard: Shard) -> SparseMLP:
        mlp = SparseMLP(12, experts, NAMES, Placement(torch.bfloat16, CPU, shard))
        own = shard.own_experts(8)
        rows = slice(own.start, own.stop)
        for layer, name, tensor in (
            (mlp.gate, "weight", tensors["gate"]),
            (mlp.gate, "e_score_correction_bias", tensors["bias"]),
            (mlp.gate_up_proj, "weight", tensors["up"][rows]),
            (mlp.down_proj, "weight", tensors["down"][rows]),
        ):
            layer.allocate(name).copy_(tensor)
            layer.loaded(name)
        return mlp

    def work(shard: Shard) -> torch.Tensor:
        return run(module(shard), tokens[shard.data.rank if shard.data else 0], (5, 3)[:dp_size])

    wanted = [run(module(Shard()), x) for x in tokens]
    for found, alone in zip(run_grid(dp_size, tp_size, work), wanted, strict=True):
        for each in found:
            torch.testing.assert_close(each, alone, atol=0.05, rtol=0.05)


# --- grids of ranks -----------------------------------------------------------------------------


def random_counts(rng: random.Random, dp_size: int) -> tuple[int, ...]:
    """Equal counts as in padded steps, or different ones, often none."""
    if rng.random() < 0.3:
        return (rng.randint(0, 9),) * dp_size
    return tuple(rng.choice([0, 0, 1, 2, rng.randint(0, 30)]) for _ in range(dp_size))


@pytest.mark.feature("P03")
@pytest.mark.parametrize("chunk_tokens", [4096, 4])
@pytest.mark.parametrize(("dp_size", "tp_size"), [(1, 2), (2, 1), (2, 2), (3, 1), (2, 3)])
def test_a_grid_computes_what_one_rank_does(
    dp_size: int,
    tp_size: int,
    chunk_tokens: int,
    run_grid: Callable[..., list[list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Uneven tokens, ranks without any, steps without any at all, chunks that some lack."""
    monkeypatch.setattr(moe, "CHUNK_TOKENS", chunk_tokens)
    gathered: list[int] = []
    all_gather = Shard.all_gather

    def counted(self: Shard, t: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        gathered.append(sum(sizes))
        return all_gather(self, t, dim, sizes)

    monkeypatch.setattr(Shard, "all_gather", counted)
    torch.manual_seed(dp_size)
    rng = random.Random(tp_size)
    layer = Layer.random(12, 3)
    steps = [(0,) * dp_size, *(random_counts(rng, dp_size) for _ in range(25))]
    tokens = [[torch.randn(n, 12) for n in counts] for counts in steps]

    def work(shard: Shard) -> list[torch.Tensor]:
        mlp = layer.module(shard)
        dp_rank = shard.data.rank if shard.data is not None else 0
        pairs = zip(steps, tokens, strict=True)
        return [run(mlp, xs[dp_rank], counts) for counts, xs in pairs]

    results = run_grid(dp_size, tp_size, work)
    for step, xs in enumerate(tokens):
        for dp_rank, x in enumerate(xs):
            first, *others = [found[step] for found in results[dp_rank]]
            assert_close(first, layer.one_by_one(x))
            # Whoever computes the same tokens goes on with the same numbers.
            assert all(torch.equal(found, first) for found in others)
    assert max(gathered, default=0) <= dp_size * chunk_tokens


def test_padding_of_any_rank_changes_no_token(run_grid: Callable[..., list[list[Any]]]) -> None:
    torch.manual_seed(0)
    layer = Layer.random(6, 2)
    tokens = [torch.randn(n, 12) for n in (5, 0)]

    def work(shard: Shard) -> torch.Tensor:
        assert shard.data is not None
        mlp, x = layer.module(shard), tokens[shard.data.rank]
        padded = torch.full((8, 12), torch.nan)
        padded[: len(x)] = x
        return run(mlp, padded, (8, 8))[: len(x)]

    for (found,), x in zip(run_grid(2, 1, work), tokens, strict=True):
        assert_close(found, layer.one_by_one(x))


@pytest.mark.parametrize("counts", [None, (3,), (3, 4), (3, 3, 3)])
def test_metadata_of_another_step_is_refused_before_any_collective(
    counts: tuple[int, ...] | None, run_grid: Callable[..., list[list[Any]]]
) -> None:
    layer = Layer.random(4, 2)

    def work(shard: Shard) -> None:
        assert shard.data is not None
        if shard.data.rank == 0:
            return
        wanted = r"dp_metadata: wanted 2 counts with 3 at rank 1, found "
        with pytest.raises(ValueError, match=wanted):
            run(layer.module(shard), torch.randn(3, 12), counts)

    run_grid(2, 1, work)
