"""Experts' tensors: both spellings, each rank's experts alone, and everything broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile.errors import FieldError
from model.config import ModelConfig
from model.layers.decoder import CausalLM
from model.parallel import Placement, Shard

SHAPES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "intermediate_size": 20},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
}
EXPERT = {
    "Mixtral": "model.layers.1.block_sparse_moe.experts.4.w3.weight",
    "Qwen3Moe": "model.layers.1.mlp.experts.4.up_proj.weight",
}
FUSED = "model.layers.1.mlp.experts.gate_up_proj"

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


def weights_of(
    load: Any, plain: Any, path: Path, *, rank: int = 0, size: int = 1
) -> list[torch.Tensor]:
    """Return the second layer's router and experts on a rank."""
    mlp = load(path, Shard(rank, size))[0].model.layers[1].mlp
    return [plain(layer) for layer in (mlp.gate, mlp.gate_up_proj, mlp.down_proj)]


@pytest.mark.parametrize("is_fused", [False, True])
def test_experts_are_read_in_both_spellings(
    is_fused: bool,
    copy: Callable[..., Path],
    load: Any,
    plain_weight: Any,
    make_checkpoint: Any,
    family: str,
) -> None:
    _, reference = make_checkpoint(family=family, **SHAPES[family])
    theirs = reference.model.layers[1].mlp
    wanted = [theirs.gate.weight, theirs.experts.gate_up_proj, theirs.experts.down_proj]
    path = copy(lambda tensors: None, is_fused=is_fused)
    for found, tensor in zip(weights_of(load, plain_weight, path), wanted, strict=True):
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("is_fused", [False, True])
def test_ranks_hold_whole_experts_that_join_to_all(
    is_fused: bool, copy: Callable[..., Path], load: Any, plain_weight: Any
) -> None:
    path = copy(lambda tensors: None, is_fused=is_fused)
    gate, *experts = weights_of(load, plain_weight, path)
    gates, *parts = zip(
        *(weights_of(load, plain_weight, path, rank=r, size=2) for r in range(2)), strict=True
    )
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


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_names_an_expert_that_is_missing_or_misshaped(
    rank: int, copy: Callable[..., Path], load: Any, family: str
) -> None:
    name, shard = EXPERT[family], Shard(rank, 2)
    path = copy(lambda tensors: tensors.pop(name))
    assert refusal(load, path, shard).startswith(f"tensor {name}: wanted in the checkpoint, found")
    shutil.rmtree(path)
    path = copy(lambda tensors: tensors.update({name: torch.zeros(48, 20)}))
    message = refusal(load, path, shard)
    assert message.startswith(f"tensor {name}: wanted shape (20, 48), found (48, 20) in")


def test_an_expert_too_many_is_named(copy: Callable[..., Path], load: Any, family: str) -> None:
    name = EXPERT[family].replace("experts.4", "experts.6")
    path = copy(lambda tensors: tensors.update({name: torch.zeros(20, 48)}))
    assert refusal(load, path).startswith(f"tensor {name}: wanted only tensors of {family}For")


def test_spellings_are_not_mixed(copy: Callable[..., Path], load: Any, family: str) -> None:
    name = EXPERT[family]
    path = copy(lambda tensors: tensors.update({name: torch.zeros(20, 48)}), is_fused=True)
    assert refusal(load, path).startswith(f"tensor {name}: wanted only tensors of {family}For")


@pytest.mark.parametrize("shape", [(5, 40, 48), (6, 48, 40), (240, 48)])
def test_fused_experts_of_another_shape_are_named(
    shape: tuple[int, ...], copy: Callable[..., Path], load: Any
) -> None:
    path = copy(lambda tensors: tensors.update({FUSED: torch.zeros(shape)}), is_fused=True)
    message = refusal(load, path)
    assert message.startswith(f"tensor {FUSED}: wanted shape (6, 40, 48), found {shape} in")


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


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_the_sizes_that_a_sparse_model_names_are_those_that_its_layers_take(dp_size: int) -> None:
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 48,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "num_experts": 12,
        "moe_intermediate_size": 7,
    }
    for dense in ([], [0]):
        config = ModelConfig.from_dict(fields | {"mlp_only_layers": dense}, "config.json")
        takes = []
        for size in range(1, 13):
            shard = Shard(0, size, data=Shard(0, dp_size, kind="dp"))
            try:
                CausalLM(config, Placement(torch.float32, torch.device("meta"), shard))
            except FieldError:
                continue
            takes.append(size)
        assert config.tensor_parallel_sizes(dp_size) == takes
