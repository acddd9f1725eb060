"""FP8 weights as their checkpoint has them, a scale for each 128 inputs or for all of them: what is
held, products, and whole models."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from integers import round_inputs, rounded_fp8, rounded_fp8_groups
from quantizer import KINDS, Kind, Tensors, float_or_int, fp8, write
from safetensors.torch import load_file, save_file
from served import COMPILATIONS, assert_served

from compile.errors import FieldError
from compile.passes.quantizers import quantize_fp8_per_token_group, quantize_groups, quantize_rows
from model.kernels.cpu import packed_linear as module
from model.kernels.cpu.packed_linear import PackedWeight, scaled_linear
from model.kernels.scaled_linear import ScaledWeight
from model.layers import moe
from model.parallel import Shard
from model.quantization import Float8
from model.weights import blank_model, load_model

TINY = Path(__file__).parents[2] / "examples" / "tiny"
GROUPED = {
    "fp8": fp8((128, 128)),
    "block": float_or_int("float-quantized", "block", (64, 128), block_structure=[64, 128]),
    "group": float_or_int("float-quantized", "group", (1, 128), group_size=128),
}
ALL = {
    **GROUPED,
    "channel": KINDS["float by channel"],
    "tensor": KINDS["float by tensor"],
    "number": KINDS["AutoFP8"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {
        "hidden_size": 256,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "attention_bias": True,
    },
    "Qwen3Moe": {
        "hidden_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 144,
        "decoder_sparse_step": 2,
        "intermediate_size": 256,
    },
    "DeepseekV3": {
        "hidden_size": 160,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "moe_intermediate_size": 144,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
}
BOUND = 0.25
"""Of what rounding inputs changes in logits: what another order of summation changes in the last
bit may tip an input over to the next number, a sixteenth further."""
PARTS = (slice(0, 4), slice(4, 5), slice(5, 6))


@pytest.fixture(scope="module")
def written(
    make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Path]]:
    """Return the function from a family and a kind to (quantized, plain) checkpoints."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(family: str, kind: str) -> tuple[Path, Path]:
        if (family, kind) not in made:
            source, _ = make_checkpoint(family=family, **FAMILIES[family])
            made[family, kind] = write(source, ALL[kind], tmp_path_factory.mktemp("fp8"))
        return made[family, kind]

    return make


def load(path: Path, shard: Shard | None = None, dtype: torch.dtype = torch.float32) -> Any:
    given: dict[str, Any] = {"dtype": dtype, "device": "cpu", "quantization": "fp8"}
    return load_model(path, shard=shard or Shard(), **given)[0]


def held(layer: Any) -> ScaledWeight:
    scaled = module._entry(layer.handle).scaled
    assert isinstance(scaled, ScaledWeight)
    return scaled


def values(weight: ScaledWeight) -> torch.Tensor:
    """Return what a weight stands for."""
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // 128 if weight.form.is_grouped else torch.zeros(inputs).long()
    return weight.numbers.float() * weight.scales.t()[:, groups]


# --- products -------------------------------------------------------------------------------------


@pytest.mark.feature("S08")
@pytest.mark.parametrize("size", [1, 127, 128, 300, 512])
def test_each_128_inputs_are_rounded_as_a_row_of_their_own(size: int) -> None:
    x = torch.randn(5, size) * 10 ** torch.linspace(-3, 3, size)
    x[1], x[2, size // 2] = 0, torch.nan
    numbers, scales = quantize_groups(x)
    parts = [quantize_rows(part) for part in x.split(128, 1)]
    wanted, wanted_scales = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    compare = partial(torch.testing.assert_close, atol=0, rtol=0, equal_nan=True)
    compare(numbers.float(), wanted.float())
    compare(scales, wanted_scales)
    assert numbers.is_contiguous() and scales.isnan().sum() == 1


@pytest.mark.feature("S08")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_numbers_that_either_side_stands_for(dtype: torch.dtype) -> None:
    weight = torch.randn(149, 272)
    weight[0] = 0
    numbers, scales = quantize_groups(weight)
    made = PackedWeight(ScaledWeight(numbers, scales.t().contiguous()))
    wanted_weight = rounded_fp8_groups(weight).double()
    for rows in (1, 7, 0):
        # Read past its inputs, a row yields NaN.
        wide = torch.full((rows, 275), torch.nan, dtype=dtype)
        x = wide[:, :272].copy_(torch.randn(rows, 272))
        x[2:3] = 0
        for bias in (None, torch.randn(149).to(dtype)):
            rounded = quantize_fp8_per_token_group(x)
            found = scaled_linear(*rounded, made.handle, bias, 149, dtype)
            assert found.dtype == dtype and found.shape == (rows, 149)
            if not rows:
                continue
            sides = rounded_fp8_groups(x).double(), wanted_weight
            extra = torch.zeros(149).double() if bias is None else bias.double()
            wanted = F.linear(*sides, extra)
            size = F.linear(*(side.abs() for side in sides), extra.abs())
            error = ((found.double() - wanted).abs() / size.clamp_min(1e-30)).max()
            assert error < (2e-6 if dtype == torch.float32 else 2**-8), error


# --- what is held ---------------------------------------------------------------------------------


@pytest.mark.feature("S08")
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_numbers_and_scales_are_the_checkpoints(
    family: str, kind: str, written: Callable[[str, str], tuple[Path, Path]]
) -> None:
    path, plain = written(family, kind)
    tensors, wanted = (load_file(each / "model.safetensors") for each in (path, plain))
    layer, name = load(path).model.layers[1], "model.layers.1"
    matrices = {f"{name}.self_attn.o_proj": held(layer.self_attn.o_proj)}
    if family == "Llama":
        matrices[f"{name}.mlp.down_proj"] = held(layer.mlp.down_proj)
    else:
        for expert, handle in enumerate(layer.mlp.down_proj.handles):
            entry = module._table[int(handle)].scaled
            assert isinstance(entry, ScaledWeight)
            matrices[f"{name}.mlp.experts.{expert}.down_proj"] = entry
    for each, found in matrices.items():
        stored = tensors[f"{each}.weight"]
        assert torch.equal(found.numbers.view(torch.uint8), stored.view(torch.uint8))
        assert torch.equal(values(found), wanted[f"{each}.weight"])
        assert found.form == Float8(is_grouped=kind in GROUPED and stored.shape[1] > 128)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_of_two_ranks_holds_its_part_to_the_bit(
    dtype: torch.dtype, kind: str, written: Callable[[str, str], tuple[Path, Path]]
) -> None:
    path, plain = written("Llama", kind)
    wanted = load_file(plain / "model.safetensors")
    for rank in range(2):
        mlp = load(path, Shard(rank, 2), dtype).model.layers[1].mlp
        down = wanted["model.layers.1.mlp.down_proj.weight"]
        assert torch.equal(values(held(mlp.down_proj)), down.chunk(2, 1)[rank])
        both = (wanted[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        mine = torch.cat([weight.chunk(2)[rank] for weight in both])
        assert torch.equal(values(held(mlp.gate_up_proj)), mine)


def test_other_groups_are_rounded_again(make_checkpoint: Any, tmp_path: Path) -> None:
    source, _ = make_checkpoint(**FAMILIES["Llama"])
    path, plain = write(source, fp8((4, 8)), tmp_path)
    wanted = load_file(plain / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    layer = load(path).model.layers[0].mlp.down_proj
    assert layer.form == Float8()
    assert torch.equal(values(held(layer)), rounded_fp8(wanted))


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("kind", ["fp8", "channel"])
def test_a_blank_model_is_that_of_a_loaded_one(
    kind: str, family: str, written: Callable[[str, str], tuple[Path, Path]]
) -> None:
    def facts(model: Any) -> dict[str, Any]:
        tensors = {**model.state_dict(), **dict(model.named_buffers())}
        forms = {name: each.form for name, each in model.named_modules() if hasattr(each, "form")}
        return forms | {name: (t.dtype, t.shape, t.stride()) for name, t in tensors.items()}

    path, _ = written(family, kind)
    blank, _ = blank_model(path, dtype=torch.float32, quantization="fp8")
    found = facts(blank)
    assert found == facts(load(path))
    assert (Float8(is_grouped=True) in found.values()) == (kind == "fp8")


def test_on_a_gpu_all_experts_of_a_layer_are_one_entry(
    written: Callable[[str, str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("Qwen3Moe", "fp8")[0]
    apart = load(path).model.layers[1].mlp.gate_up_proj
    monkeypatch.setattr(moe, "is_on_gpu", lambda tensor: tensor.device.type == "cpu")
    together = load(path).model.layers[1].mlp.gate_up_proj
    assert together.handles.unique().numel() == 1
    stacked = module.short_numbers(together.handles)
    for expert, one in enumerate(apart.handles):
        entry = module._table[int(one)].scaled
        assert entry is not None
        for wanted, found in zip(entry, stacked, strict=True):
            assert torch.equal(found[expert].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("is_kept", ["down_proj", "up_proj"])
def test_a_layer_that_its_checkpoint_has_plain_is_rounded_by_rows(
    is_kept: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """All that one product joins is of one kind."""
    kind, name = GROUPED["fp8"], f"model.layers.0.mlp.{is_kept}"
    plain = [*kind.config["modules_to_not_convert"], name]
    source, reference = make_checkpoint(**FAMILIES["Llama"])
    config = {**kind.config, "modules_to_not_convert": plain}
    path, _ = write(
        source, Kind(config, kind.parts), tmp_path, lambda tensor: tensor == f"{name}.weight"
    )
    if is_kept == "up_proj":
        with pytest.raises(FieldError, match=f"^tensor {name}.weight: wanted quantized like"):
            load(path)
        return
    layer = load(path).model.layers[0].mlp.down_proj
    weight = reference.state_dict()[f"{name}.weight"]
    assert layer.form == Float8() and torch.equal(values(held(layer)), rounded_fp8(weight))


@pytest.mark.parametrize(("part", "value"), [("weight", "nan"), ("weight_scale_inv", "inf")])
def test_what_is_no_number_is_refused_by_name(
    part: str, value: str, written: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(written("Llama", "fp8")[0], tmp_path / "checkpoint"))
    tensors: Tensors = load_file(path / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    wide = tensors[name].float()
    wide[-1, -1] = float(value)
    tensors[name] = wide.to(tensors[name].dtype)
    save_file(tensors, path / "model.safetensors")
    wanted = rf"^tensor {re.escape(name)}: wanted finite numbers, found {value}"
    with pytest.raises(FieldError, match=wanted):
        load(path)


# --- whole models ---------------------------------------------------------------------------------


@pytest.mark.feature("S08")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_checkpoints_weights_and_rounded_inputs(
    family: str, written: Callable[[str, str], tuple[Path, Path]], paged: Any
) -> None:
    """An input that another order of summation tips over changes its sequence, few of them."""
    path, plain_path = written(family, "fp8")
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain_path, dtype=torch.float32)
    prompts = torch.randint(509, (8, 6), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain = reference(prompts).logits
        round_inputs(reference, "fp8 groups", 1)
        wanted = reference(prompts).logits
    runner = paged(load(path))
    steps = [{str(i): ids[part] for i, ids in enumerate(prompts)} for part in PARTS]
    logits = [torch.stack(list(runner.step(step).values())) for step in steps]
    errors = (torch.cat(logits, 1) - wanted).abs().amax((1, 2))
    assert (errors < 2e-4).sum() >= 5, errors
    assert errors.max() < BOUND * (wanted - plain).abs().max(), errors


@pytest.mark.feature("S08")
@pytest.mark.parametrize("options", COMPILATIONS, ids=str)
def test_a_checkpoint_is_served(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path, plain = write(TINY, GROUPED["fp8"], tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    round_inputs(reference, "fp8 groups", 1)
    compilation = options | {"cache_dir": str(tmp_path / "cache")}
    with caplog.at_level(logging.INFO, logger="lockstep.model"):
        assert_served(path, "fp8", compilation, reference, BOUND)
    lines = [record.message for record in caplog.records if "weights" in record.message]
    assert lines == ["weights of linear layers are held as fp8"]
