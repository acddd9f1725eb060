"""Experts' tensors: both spellings, and each rank's experts alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile.errors import FieldError
from model.parallel import Shard

SHAPES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "intermediate_size": 20},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
}
EXPERT = {
    "Mixtral": "model.layers.1.block_sparse_moe.experts.4.w3.weight",
    "Qwen3Moe": "model.layers.1.mlp.experts.4.up_proj.weight",
}

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=SHAPES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def copy(make_checkpoint: Any, family: str, tmp_path: Path) -> Callable[..., Path]:
    """Return a copy of a checkpoint, its tensors changed, in the spelling that is asked for."""

    def do(change: Callable[[Tensors], object], *, is_fused: bool = False) -> Path:
        source, reference = make_checkpoint(family=family, **SHAPES[family])
        path = tmp_path / "checkpoint"
        if is_fused:
            reference.save_pretrained(path, save_original_format=False)
        else:
            shutil.copytree(source, path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        return path

    return do


def refusal(load: Any, path: Path, shard: Shard | None = None) -> str:
    with pytest.raises(FieldError) as caught:
        load(path, shard)
    assert str(caught.value).endswith((str(path), str(path / "model.safetensors")))
    return str(caught.value)


def weights_of(load: Any, path: Path, *, rank: int = 0, size: int = 1) -> list[torch.Tensor]:
    """Return the second layer's router and experts on a rank."""
    mlp = load(path, Shard(rank, size))[0].model.layers[1].mlp
    return [layer.weight for layer in (mlp.gate, mlp.gate_up_proj, mlp.down_proj)]


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("is_fused", [False, True])
def test_experts_are_read_in_both_spellings(
    is_fused: bool,
    copy: Callable[..., Path],
    load: Any,
    make_checkpoint: Any,
    family: str,
) -> None:
    _, reference = make_checkpoint(family=family, **SHAPES[family])
    theirs = reference.model.layers[1].mlp
    wanted = [theirs.gate.weight, theirs.experts.gate_up_proj, theirs.experts.down_proj]
    path = copy(lambda tensors: None, is_fused=is_fused)
    for found, tensor in zip(weights_of(load, path), wanted, strict=True):
        assert torch.equal(found, tensor)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("is_fused", [False, True])
def test_ranks_hold_whole_experts_that_join_to_all(
    is_fused: bool, copy: Callable[..., Path], load: Any
) -> None:
    path = copy(lambda tensors: None, is_fused=is_fused)
    gate, *experts = weights_of(load, path)
    gates, *parts = zip(*(weights_of(load, path, rank=r, size=2) for r in range(2)), strict=True)
    assert all(torch.equal(part, gate) for part in gates)
    for matrices, ranks in zip(experts, parts, strict=True):
        assert [part.shape[0] for part in ranks] == [3, 3]
        assert torch.equal(torch.cat(ranks), matrices)


def test_a_rank_reads_its_own_experts_alone(
    copy: Callable[..., Path], load: Any, family: str
) -> None:
    def plant(tensors: Tensors) -> None:
        tensors[EXPERT[family]][3, 5] = torch.nan

    path = copy(plant)
    load(path, Shard(0, 2))
    message = refusal(load, path, Shard(1, 2))
    assert message.startswith(f"tensor {EXPERT[family]}: wanted finite numbers, found nan in")


def test_spellings_are_not_mixed(copy: Callable[..., Path], load: Any, family: str) -> None:
    name = EXPERT[family]
    path = copy(lambda tensors: tensors.update({name: torch.zeros(20, 48)}), is_fused=True)
    assert refusal(load, path).startswith(f"tensor {name}: wanted only tensors of {family}For")


@pytest.mark.parametrize(
    ("shard", "sizes"),
    [
        (Shard(0, 4), "tensor_parallel_size=4"),
        (
            Shard(0, 2, data=Shard(0, 2, kind="dp")),
            "tensor_parallel_size=2 times data_parallel_size=2",
        ),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused_by_name(
    shard: Shard, sizes: str, copy: Callable[..., Path], load: Any
) -> None:
    path = copy(lambda tensors: None)
    with pytest.raises(FieldError, match=f"num_experts: wanted a multiple of {sizes}, found 6"):
        load(path, shard)
