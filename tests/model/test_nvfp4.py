"""FP4 numbers (NVFP4): rounding to the bit, products, and models that hold them."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from integers import rounded, rounded_fp4, rounded_model
from quantizer import (
    E2M1,
    INPUT_SCALE,
    KINDS,
    Kind,
    Tensors,
    e2m1_codes,
    fp4_blocks,
    fp4_scale,
    nvfp4,
    write,
)
from safetensors.torch import load_file, save_file
from served import COMPILATIONS, assert_served

from compile.errors import FieldError
from compile.passes.quantizers import FP8, fp4_values, quantize_blocks, quantize_nvfp4
from model.config import ModelConfig
from model.kernels import scaled_linear as scaled_module
from model.kernels.cpu import packed_linear as module
from model.kernels.cpu.packed_linear import PackedWeight, scaled_linear
from model.kernels.scaled_linear import BlockScaledWeight, in_tiles
from model.layers import moe
from model.layers.linear import Linear
from model.parallel import Shard
from model.weights import blank_model, load_model

TINY = Path(__file__).parents[2] / "examples" / "tiny"
CPU = torch.device("cpu")
BOUND = 0.5
"""Of what rounding changes in logits: what another order of summation changes in the last bit may
tip an input over to the next number, up to a half further."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "head_dim": 16, "intermediate_size": 96},
    "Qwen3": {"head_dim": 32, "intermediate_size": 96},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 16},
    "Qwen3Moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 4,  # whichever is next, whatever rounds
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
        "intermediate_size": 96,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def packed(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def check_blocks(x: torch.Tensor, scale: float) -> None:
    codes, scales, values = fp4_blocks(x, scale)
    numbers, blocks = quantize_nvfp4(x, torch.tensor([scale]))
    assert numbers.dtype == torch.uint8 and blocks.dtype == FP8
    assert torch.equal(blocks.float(), scales)
    assert torch.equal(numbers, packed(codes))
    each = (blocks.float() / scale).repeat_interleave(16, -1)
    assert torch.equal(fp4_values(numbers) * each, values)


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.feature("O04")
def test_every_bfloat16_is_rounded_to_the_nearest_number_and_ties_to_even() -> None:
    """Of a block whose scale is 1: its first number is 6."""
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    every = every[every.isfinite() & (every.abs() <= 6)].float()
    every = torch.cat((every, *(every.nextafter(torch.tensor(end)) for end in (-9.0, 9.0))))
    every = every[every.abs() <= 6]
    blocks = F.pad(every, (0, -len(every) % 15)).view(-1, 15)
    blocks = torch.cat((torch.full((len(blocks), 1), 6.0), blocks), 1)
    numbers, scales = quantize_blocks(blocks, torch.ones(1))
    assert (scales.float() == 1).all()
    assert torch.equal(numbers, packed(e2m1_codes(blocks)))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    assert fp4_values(quantize_blocks(ties, torch.ones(1))[0]).tolist()[:8] == [
        *(0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0)
    ]


@pytest.mark.feature("O04")
def test_every_byte_is_two_numbers_and_they_are_found_again() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    values = fp4_values(every).view(256, 2)
    low, high = every.long() % 16, every.long() // 16
    signed = torch.tensor([*E2M1, *(-each for each in E2M1)])
    assert torch.equal(values, torch.stack((signed[low], signed[high]), 1))
    blocks = F.pad(values.view(-1, 8), (0, 8), value=6.0)
    numbers, _ = quantize_blocks(blocks, torch.ones(1))
    found = numbers[:, :4].flatten()
    # Zero has no sign once it is rounded.
    assert torch.equal(fp4_values(found), fp4_values(every))


@pytest.mark.feature("O04")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_of_any_size_are_rounded_by_their_own_scale(dtype: torch.dtype) -> None:
    """From scales that are rounded to zero to such as are cut off at 448."""
    sizes = torch.logspace(-12, 4, 200).unsqueeze(1)
    x = (torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * sizes).to(dtype)
    x[3], x[4, :16] = 0, 0
    wide = torch.full((200, 67), torch.nan, dtype=dtype)
    for scale in (1.0, INPUT_SCALE, 1e-3):
        check_blocks(x, scale)
        check_blocks(wide[:, :64].copy_(x), scale)
        check_blocks(x.view(2, 100, 64), scale)
    numbers, blocks = quantize_nvfp4(x[:0], torch.ones(1))
    assert numbers.shape == (0, 32) and blocks.shape == (0, 4)


def test_what_is_not_finite_makes_its_block_nan_and_no_other() -> None:
    x = torch.randn(3, 48)
    x[0, 20], x[1, 0], x[2, 47] = torch.nan, torch.inf, -torch.inf
    _, scales = quantize_blocks(x, torch.ones(1))
    assert scales.isnan().nonzero().tolist() == [[0, 1], [1, 0], [2, 2]]


def test_numbers_and_scales_are_those_of_the_library_that_writes_them() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.quant_scheme import NVFP4
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

    x = torch.randn(70, 64) * torch.logspace(-9, 2, 70).unsqueeze(1)
    scale, inputs = torch.tensor([INPUT_SCALE]), NVFP4["input_activations"]
    given: dict[str, Any] = {"args": inputs, "global_scale": scale}
    shared, _ = compute_dynamic_scales_and_zp(value=x, module=torch.nn.Linear(4, 4), **given)
    numbers, blocks = quantize_blocks(x, scale)
    assert torch.equal(blocks.float(), shared.float())
    theirs = pack_fp4_to_uint8(quantize(x=x, scale=shared, zero_point=None, **given))
    assert torch.equal(numbers, theirs)
    tensors, plain = KINDS["nvfp4"].parts(x)
    scheme = QuantizationScheme(targets=["Linear"], weights=NVFP4["weights"])
    # It computes in the dtype of what it unpacks, bfloat16, but for the global scale.
    found = NVFP4PackedCompressor.decompress(tensors, scheme)["weight"]
    assert torch.equal(found, plain.to(found.dtype))


# --- products -------------------------------------------------------------------------------------


def block_scaled(weight: torch.Tensor, *, input_scale: float = INPUT_SCALE) -> BlockScaledWeight:
    made = BlockScaledWeight.empty(weight.shape, CPU)
    tensors, _ = KINDS["nvfp4"].parts(weight)
    tensors["input_global_scale"] = torch.tensor([input_scale])
    made.fill(slice(None), *tensors.values())
    return made


@pytest.mark.feature("O04")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_numbers_that_either_side_stands_for(dtype: torch.dtype) -> None:
    weight = torch.randn(37, 272)
    weight[0] = 0
    made = PackedWeight(block_scaled(weight))
    scale, wanted_weight = torch.tensor([INPUT_SCALE]), KINDS["nvfp4"].parts(weight)[1].double()
    for rows in (1, 7, 0):
        # Read past its inputs, a row yields NaN.
        wide = torch.full((rows, 275), torch.nan, dtype=dtype)
        x = wide[:, :272].copy_(torch.randn(rows, 272))
        x[2:3] = 0
        for bias in (None, torch.randn(37).to(dtype)):
            found = scaled_linear(*quantize_nvfp4(x, scale), made.handle, bias, 37, dtype)
            assert found.dtype == dtype and found.shape == (rows, 37)
            if not rows:
                continue
            sides = rounded_fp4(x).double(), wanted_weight
            extra = torch.zeros(37) if bias is None else bias
            wanted = F.linear(*sides, extra.double())
            size = F.linear(*(side.abs() for side in sides), extra.abs().double())
            error = ((found.double() - wanted).abs() / size.clamp_min(1e-30)).max()
            assert error < (2e-6 if dtype == torch.float32 else 2**-8), error
    x[1:2, 5] = torch.nan
    found = scaled_linear(*quantize_nvfp4(x, scale), made.handle, None, 37, dtype)
    assert found.isnan().any(1).nonzero().tolist() == [[1]] * (rows > 1)


@pytest.mark.parametrize("shape", [(128, 4), (3, 1), (129, 17), (300, 8)])
def test_scales_lie_where_cublas_looks_for_them(shape: tuple[int, int]) -> None:
    """The offsets of its documentation's "1D block scaling factors layout"."""
    scales = torch.randint(1, 120, shape).to(torch.uint8)
    across = -(-shape[1] // 4)
    wanted = torch.zeros(512 * across * -(-shape[0] // 128), dtype=torch.uint8)
    for row in range(shape[0]):
        for column in range(shape[1]):
            tile = row // 128 * across + column // 4
            offset = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            wanted[tile * 512 + offset] = scales[row, column]
    assert torch.equal(in_tiles(scales.view(FP8)).view(torch.uint8), wanted)


def test_a_gpus_product_is_given_what_torch_says_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch multiplies, scales lie in tiles, and global scales are left to the result."""
    monkeypatch.setattr(scaled_module, "multiplies_blocks", lambda _: True)
    weight, x, shapes = torch.randn(48, 96), torch.randn(5, 96), []
    plain, torchs = block_scaled(weight), F.scaled_mm
    numbers, scales = quantize_blocks(x, plain.input_scale)

    def scaled_mm(*args: Any, **options: Any) -> torch.Tensor:
        on_meta = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in args]
        found = torchs(*on_meta, **options)
        shapes.append((found.shape, found.dtype))
        assert torch.equal(args[2].view(torch.uint8), in_tiles(scales).view(torch.uint8))
        return scaled_module._multiply_wide_blocks(args[0].view(torch.uint8), scales, plain)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    made = plain.laid_out()
    assert made.blocks.shape == (128 * 8,)
    found = scaled_module.scaled_linear(numbers, scales, made, None, torch.float32)
    assert shapes == [((5, 48), torch.float32)]
    wanted = F.linear(rounded_fp4(x), KINDS["nvfp4"].parts(weight)[1])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)
    # Other sizes are multiplied in float32 everywhere.
    for size in ((40, 96), (48, 80)):
        assert block_scaled(torch.randn(*size)).laid_out().blocks.ndim == 2


def test_one_line_says_why_products_become_float32(caplog: pytest.LogCaptureFixture) -> None:
    scaled_module.multiplies_blocks.cache_clear()
    with caplog.at_level(logging.INFO, logger="model.kernels.scaled_linear"):
        for _ in range(2):
            PackedWeight(block_scaled(torch.randn(48, 96)))
    assert [record.message for record in caplog.records] == [
        "FP4 numbers are widened: no GPU from sm_100 on"
    ]


# --- whole models ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized(
    make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Any]]:
    """Return the function from a family to a checkpoint, and transformers' model of its numbers."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(family: str) -> tuple[Path, Any]:
        if family not in made:
            source, reference = make_checkpoint(family=family, **FAMILIES[family])
            path, _ = write(source, KINDS["nvfp4"], tmp_path_factory.mktemp("fp4"))
            made[family] = path, reference
        return made[family]

    return make


def load(path: Path, shard: Shard | None = None, dtype: torch.dtype = torch.float32) -> Any:
    given: dict[str, Any] = {"dtype": dtype, "device": "cpu", "quantization": "nvfp4"}
    return load_model(path, shard=shard or Shard(), **given)[0]


def held(layer: Linear) -> BlockScaledWeight:
    scaled = module._entry(layer.handle).scaled
    assert isinstance(scaled, BlockScaledWeight)
    return scaled


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_on_a_gpu_all_experts_of_a_layer_are_one_entry(
    form: str, quantized: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quantized("DeepseekV3")[0]
    given: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "quantization": form}
    apart, _ = load_model(path, **given)
    monkeypatch.setattr(moe, "is_on_gpu", lambda tensor: tensor.device.type == "cpu")
    together, _ = load_model(path, **given)
    pairs = [
        (one.handles, all_.handles)
        for one, all_ in zip(apart.modules(), together.modules(), strict=True)
        if isinstance(one, moe.ExpertWeights) and isinstance(all_, moe.ExpertWeights)
    ]
    assert len(pairs) >= 2
    for handles, handle in pairs:
        assert handles is not None and handle is not None and handle.unique().numel() == 1
        stacked = module.short_numbers(handle)
        for expert, one in enumerate(handles):
            entry = module._table[int(one)].scaled
            assert entry is not None
            for wanted, found in zip(entry, stacked, strict=True):
                assert torch.equal(found[expert].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.feature("O04", "S08")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_model_with_rounded_weights_and_inputs(
    family: str, quantized: Callable[[str], tuple[Path, Any]], paged: Any
) -> None:
    """An input that another order of summation tips over changes its sequence, few of them."""
    path, reference = quantized(family)
    wanted_model = rounded_model(reference, "nvfp4")
    for name, weight in wanted_model.named_parameters():
        if "kv_b_proj" in name:  # multiplied from either side, by what is not rounded
            weight.data.copy_(rounded(weight.detach(), "nvfp4"))
    prompts = torch.randint(509, (8, 6), generator=torch.Generator().manual_seed(1))
    runner = paged(load(path))
    parts = (slice(0, 4), slice(4, 5), slice(5, 6))
    steps = [{str(i): ids[part] for i, ids in enumerate(prompts)} for part in parts]
    logits = [torch.stack(list(runner.step(step).values())) for step in steps]
    with torch.inference_mode():
        wanted, plain = (m(prompts).logits for m in (wanted_model, reference))
    errors = (torch.cat(logits, 1) - wanted).abs().amax((1, 2))
    assert (errors < 2e-4).sum() >= 5, errors
    assert errors.max() < BOUND * (wanted - plain).abs().max(), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_of_two_ranks_holds_its_part_to_the_bit(
    dtype: torch.dtype, quantized: Callable[[str], tuple[Path, Any]]
) -> None:
    path, _ = quantized("Llama")
    tensors = load_file(path / "model.safetensors")
    for rank in range(2):
        layer = load(path, Shard(rank, 2), dtype).model.layers[1]
        for name, found, dim in (
            ("mlp.down_proj", held(layer.mlp.down_proj), 1),
            ("self_attn.o_proj", held(layer.self_attn.o_proj), 1),
        ):
            stored = [tensors[f"model.layers.1.{name}.weight_{part}"] for part in PARTS]
            for mine, whole in zip(found, stored, strict=False):
                wanted = whole.view(torch.uint8).chunk(2, dim)[rank]
                assert torch.equal(mine.view(torch.uint8), wanted)
        found = held(layer.mlp.gate_up_proj)
        for i, name in enumerate(("gate_proj", "up_proj")):
            of_part = slice(i * 48, i * 48 + 48)
            stored = [tensors[f"model.layers.1.mlp.{name}.weight_{part}"] for part in PARTS]
            for mine, whole in zip(found, stored, strict=False):
                wanted = whole.view(torch.uint8).chunk(2)[rank]
                assert torch.equal(mine[of_part].view(torch.uint8), wanted)
            scale = tensors[f"model.layers.1.mlp.{name}.weight_global_scale"]
            assert (found.global_scales[0, of_part] == scale).all()


PARTS = ("packed", "scale")


def test_of_several_input_scales_the_one_that_cuts_nothing_off_counts(
    quantized: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(quantized("Llama")[0], tmp_path / "checkpoint"))
    tensors = load_file(path / "model.safetensors")
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        tensors[f"model.layers.0.self_attn.{name}.input_global_scale"][:] = (7.0, 5.0, 9.0)[i]
    save_file(tensors, path / "model.safetensors")
    layer = load(path).model.layers[0]
    assert layer.self_attn.qkv_proj.input_scale.tolist() == [5.0]
    assert layer.self_attn.o_proj.input_scale.tolist() == [INPUT_SCALE]


@pytest.mark.feature("S08")
def test_a_model_holds_little_more_than_a_quarter(tmp_path: Path) -> None:
    path, _ = write(TINY, KINDS["nvfp4"], tmp_path)
    model = load(path, dtype=torch.bfloat16)
    layers = [m for m in model.modules() if isinstance(m, Linear) and m.is_quantizable]
    assert layers and all(layer.weight.is_meta and layer.kept is None for layer in layers)
    for layer in layers:
        outputs, inputs = layer.weight.shape
        assert held(layer).nbytes == outputs * inputs * 9 // 16 + 4 * outputs + 4


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_blank_model_has_the_tensors_of_a_loaded_one(
    family: str, quantized: Callable[[str], tuple[Path, Any]]
) -> None:
    def shapes(model: Any) -> dict[str, Any]:
        tensors = {**model.state_dict(), **dict(model.named_buffers())}
        return {name: (t.dtype, t.shape, t.stride()) for name, t in tensors.items()}

    path, _ = quantized(family)
    blank, _ = blank_model(path, dtype=torch.float32, quantization="nvfp4")
    assert shapes(blank) == shapes(load(path))


@pytest.mark.parametrize("is_kept", ["down_proj", "up_proj"])
def test_layers_that_a_checkpoint_has_plain_stay_plain(
    is_kept: str, make_checkpoint: Any, tmp_path: Path, paged: Any
) -> None:
    """All that one product joins is of one kind."""
    kind = KINDS["nvfp4"]
    names = [f"model.layers.0.mlp.{is_kept}"]
    config = {**kind.config, "ignore": [*kind.config["ignore"], *names]}
    source, _ = make_checkpoint(**FAMILIES["Llama"])
    path, _ = write(
        source, Kind(config, kind.parts), tmp_path, lambda name: name == f"{names[0]}.weight"
    )
    if is_kept == "up_proj":
        with pytest.raises(FieldError, match=f"^tensor {names[0]}.weight: wanted quantized like"):
            load(path)
        return
    ids = torch.randint(509, (12,))
    layer = load(path).model.layers[0].mlp.down_proj
    assert layer.form is None and layer.input_scale is None
    blank, _ = blank_model(path, dtype=torch.float32, quantization="nvfp4")
    assert blank.model.layers[0].mlp.down_proj.form is None
    found = paged(load(path)).step({"a": ids})["a"]
    assert found.isfinite().all()


@pytest.mark.parametrize("kind", ["plain", "fp8", "nvfp4 of weights alone"])
def test_without_scales_for_inputs_it_is_refused(
    kind: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    source, _ = make_checkpoint(**FAMILIES["Llama"])
    path = source if kind == "plain" else write(source, KINDS[kind], tmp_path)[0]
    for make in (load, lambda path: blank_model(path, dtype=torch.float32, quantization="nvfp4")):
        with pytest.raises(FieldError) as error:
            make(path)
        assert str(error.value) == (
            "quantization: wanted none where no input_global_scale is stored: it takes "
            "nvfp4-pack-quantized with activations, found 'nvfp4'"
        )


def test_parts_of_blocks_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    source, _ = make_checkpoint(head_dim=16, intermediate_size=80)
    path, _ = write(source, KINDS["nvfp4"], tmp_path)
    wanted = "wanted none where inputs of layers are no multiple of 16 on a rank, found nvfp4 and"
    with pytest.raises(FieldError, match=f"^quantization: {wanted} 40 inputs"):
        load(path, Shard(0, 2))


@pytest.mark.parametrize("part", ["weight_global_scale", "input_global_scale", "weight_scale"])
def test_scales_that_are_no_numbers_are_refused_by_name(
    part: str, quantized: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(quantized("Llama")[0], tmp_path / "checkpoint"))
    tensors: Tensors = load_file(path / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    tensors[name] = (tensors[name].float() * torch.nan).to(tensors[name].dtype)
    save_file(tensors, path / "model.safetensors")
    wanted = "finite numbers" if part == "weight_scale" else "a number above 0"
    with pytest.raises(FieldError, match=f"^tensor {re.escape(name)}: wanted {wanted}, found nan"):
        load(path)


@pytest.mark.feature("O04", "S08")
@pytest.mark.parametrize("options", COMPILATIONS, ids=str)
def test_a_checkpoint_is_served(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    import transformers

    path, _ = write(TINY, nvfp4(), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    compilation = options | {"cache_dir": str(tmp_path / "cache")}
    with caplog.at_level(logging.INFO, logger="lockstep.model"):
        assert_served(path, "nvfp4", compilation, rounded_model(model, "nvfp4"), BOUND)
    lines = [record.message for record in caplog.records if "weights" in record.message]
    assert lines == ["weights of linear layers are held as nvfp4"]


def test_the_configuration_says_whether_inputs_are_rounded(tmp_path: Path) -> None:
    for kind, has_scales in (("nvfp4", True), ("nvfp4 of weights alone", False)):
        path, _ = write(TINY, KINDS[kind], tmp_path / kind)
        found = ModelConfig.from_dir(path).quantization
        assert found is not None and found.has_input_scales == has_scales
        assert json.loads((path / "config.json").read_text())["quantization_config"]
    assert fp4_scale(torch.tensor([[-6.0, 3.0]])) == 448
