"""Weights that a rank holds as integers or FP8: products, what they take, and whole models."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from integers import group_of, rounded, rounded_fp8, rounded_model
from quantizer import KINDS, write
from torch import nn

from compile.errors import FieldError
from compile.passes.quantizers import quantize_fp8_per_token
from model.kernels import scaled_linear as scaled_module
from model.kernels.cpu import native
from model.kernels.cpu import packed_linear as module
from model.kernels.cpu.packed_linear import PackedWeight, packed_linear, scaled_linear
from model.kernels.scaled_linear import FIRST_FP8_GPU, ScaledWeight, multiplies_on_gpu
from model.layers.decoder import CausalLM
from model.layers.linear import Linear
from model.parallel import Shard
from model.quantization import Integers, WeightFormat, form_for
from model.weights import blank_model, load_model
from serve.llm import LLM, SamplingParams

KINDS_HELD: tuple[WeightFormat, WeightFormat] = ("int8", "int4")
FORMS: tuple[WeightFormat, ...] = (*KINDS_HELD, "w8a8", "fp8")
ROUNDED_BOUND = 0.25
"""Of what rounding changes in logits: what another order of summation changes in the last bit may
tip an input over to the next number: with FP8 a sixteenth further."""
PARTS = (slice(0, 4), slice(4, 5), slice(5, 6))
DTYPES = (torch.float32, torch.bfloat16)
TINY = Path(__file__).parents[2] / "examples" / "tiny"
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": 9},
    "Qwen2": {"intermediate_size": 272},  # in groups of 16
    "Qwen3": {"head_dim": 40},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 4,  # whichever is next, whatever rounds
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 48,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
    },
}


def packed(weight: torch.Tensor, held: WeightFormat) -> PackedWeight:
    return PackedWeight(weight, form_for(held, weight.shape[1]))


def held_numbers(weight: torch.Tensor, held: WeightFormat) -> torch.Tensor:
    """Return what a weight's integers stand for."""
    made = packed(weight, held)
    return numbers_of(made.handle)


def numbers_of(handle: torch.Tensor) -> torch.Tensor:
    entry = module._entry(handle)
    if entry.scaled is None:
        return module._widened(entry)
    return entry.scaled.numbers.float() * entry.scaled.scales.t()


def assert_equal_to_rounding(
    found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Compare with the product in float64, in units of the sum's magnitude."""
    weight, bias = weight.double(), None if bias is None else bias.double()
    wanted = F.linear(x.double(), weight, bias)
    size = F.linear(x.double().abs(), weight.abs(), None if bias is None else bias.abs())
    error = ((found.double() - wanted).abs() / size.clamp_min(1e-30)).max()
    assert error < (2e-6 if found.dtype == torch.float32 else 2**-8), error


def multiplies(
    held: WeightFormat, dtype: torch.dtype, rows: int, shape: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(dtype)
    weight[0] = 0
    bias = torch.randn(shape[0], generator=generator).to(dtype) if seed % 2 else None
    # Read past its inputs, a row yields NaN.
    wide = torch.full((rows, shape[1] + 3), torch.nan, dtype=dtype)
    x = wide[:, : shape[1]].copy_(torch.randn(rows, shape[1], generator=generator))
    made = packed(weight, held)
    found = packed_linear(x, made.handle, bias, shape[0])
    assert found.dtype == dtype and found.shape == (rows, shape[0])
    assert_equal_to_rounding(found, x, rounded(weight, held), bias)
    if native.native_function("quantized_linear", dtype, "integers") is not None:
        alone = [packed_linear(row, made.handle, bias, shape[0]) for row in x.split(1)]
        assert torch.equal(found, torch.cat(alone))


@pytest.mark.feature("S08")
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    held=st.sampled_from(KINDS_HELD),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 130),
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 128) | st.integers(17, 110).map(lambda n: n * 8),
    seed=st.integers(0, 99),
)
@example(held="int4", dtype=torch.bfloat16, rows=130, outputs=70, inputs=896, seed=1)
@example(held="int8", dtype=torch.bfloat16, rows=97, outputs=70, inputs=1030, seed=1)
@example(held="int4", dtype=torch.float32, rows=13, outputs=33, inputs=272, seed=1)
@example(held="int8", dtype=torch.float32, rows=12, outputs=5, inputs=300, seed=1)
def test_products_are_those_of_rounded_weights_whatever_rows_stand_beside(
    held: WeightFormat, dtype: torch.dtype, rows: int, outputs: int, inputs: int, seed: int
) -> None:
    multiplies(held, dtype, rows, (outputs, inputs), seed)


@pytest.mark.feature("S08")
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 130),
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 1100),
    threads=st.sampled_from((1, 2)),
    seed=st.integers(0, 99),
)
@example(dtype=torch.bfloat16, rows=1, outputs=509, inputs=4864, threads=2, seed=1)
@example(dtype=torch.float32, rows=200, outputs=509, inputs=4863, threads=2, seed=0)
def test_integers_times_integers_are_exact_whatever_rows_stand_beside(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, threads: int, seed: int
) -> None:
    """A row of zeros stays zero, and numbers that are infinite or none stay in their row."""
    if native.native_function("quantized_linear", dtype, "integers") is None:
        pytest.skip("needs a C++ compiler")
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    weight[0] = 0
    bias = torch.randn(outputs, generator=generator).to(dtype) if seed % 2 else None
    wide = torch.full((rows, inputs + 3), torch.nan, dtype=dtype)
    x = wide[:, :inputs].copy_(torch.randn(rows, inputs, generator=generator) * 9)
    x[3:4], x[5:6] = 0, 1  # the second one is 127 throughout
    made = packed(weight, "w8a8")
    torch.set_num_threads(threads)
    try:
        found = packed_linear(x, made.handle, bias, outputs)
    finally:
        torch.set_num_threads(1)
    of_tokens, numbers = integers_of(x)
    of_outputs, integers = integers_of(weight)
    sums = F.linear(numbers.double(), integers.double()).float()
    wanted = sums * (of_outputs.t() * of_tokens)
    assert torch.equal(found, (wanted if bias is None else wanted + bias.float()).to(dtype))
    x[rows // 2, inputs // 2] = (torch.nan, torch.inf)[seed % 2]
    odd = packed_linear(x, made.handle, bias, outputs)
    assert odd[rows // 2].isnan().all()
    others = torch.arange(rows) != rows // 2
    assert torch.equal(odd[others], found[others])


def integers_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales [N, 1] of rows, and their numbers, whose largest is 127."""
    scales = rows.float().abs().amax(-1, keepdim=True) / 127
    return scales, (rows.float() / scales.masked_fill(scales == 0, 1)).round()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_torch_rounds_tokens_where_no_kernel_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "native_function", lambda *_: None)
    weight, x = torch.randn(37, 272).to(dtype), torch.randn(3, 272).to(dtype)
    x[1] = 0
    made = packed(weight, "w8a8")
    for bias in (None, torch.randn(37).to(dtype)):
        found = packed_linear(x, made.handle, bias, 37)
        assert found.dtype == dtype
        assert_equal_to_rounding(found, rounded(x, "w8a8"), rounded(weight, "w8a8"), bias)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("held", KINDS_HELD)
def test_torch_multiplies_where_no_kernel_does(
    held: WeightFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "native_function", lambda *_: None)
    weight, x = torch.randn(37, 272).to(dtype), torch.randn(3, 272).to(dtype)
    made = packed(weight, held)
    for bias in (None, torch.randn(37).to(dtype)):
        found = packed_linear(x, made.handle, bias, 37)
        assert found.dtype == dtype
        assert_equal_to_rounding(found, x, rounded(weight, held), bias)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", KINDS_HELD)
def test_threads_share_columns_of_outputs(
    held: WeightFormat, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    try:
        multiplies(held, dtype, 200, (509, 384), 1)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("held", KINDS_HELD)
def test_numbers_are_within_half_a_step_and_integers_come_back(held: WeightFormat) -> None:
    weight = torch.randn(70, 256)
    wide = held_numbers(weight, held)
    assert torch.equal(wide, rounded(weight, held))
    steps = 127.0 if held == "int8" else 7.5
    largest = weight.unflatten(1, (-1, group_of(held, 256))).abs().amax(-1, keepdim=True)
    error = (wide - weight).abs().unflatten(1, (-1, group_of(held, 256)))
    assert (error <= largest / steps * 0.5001).all()
    if held == "int8":  # such as a checkpoint's, whose largest is 127
        whole = torch.randint(-127, 128, (70, 256)).float()
        whole[:, 0] = 127
        scales = torch.rand(70, 1) + 0.1
        back = held_numbers(whole * scales, held)
        torch.testing.assert_close(back, whole * scales, atol=0, rtol=1e-6)


def test_groups_divide_the_inputs_and_what_has_none_is_refused() -> None:
    sizes = {896: 128, 4864: 128, 448: 112, 272: 16, 136: 8, 128: 128, 60: 60, 37: 37, 1: 1}
    for inputs, group in sizes.items():
        found = form_for("int4", inputs)
        assert isinstance(found, Integers) and found.group == group
    assert form_for("none", 37) is None
    with pytest.raises(FieldError) as error:
        form_for("int4", 4 * 37)
    assert str(error.value) == (
        "quantization: wanted none, fp8 or int8 where layers have over 128 inputs, and no multiple "
        "of 8, found int4 and 148 inputs"
    )


@pytest.mark.parametrize("has_rows", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_fp8_products_are_those_of_rounded_weights_and_inputs(
    dtype: torch.dtype, has_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether torch multiplies by rows here or not; rows of zeros stay zero, a NaN stays alone."""
    if has_rows and not scaled_module.multiplies_rows():
        pytest.skip("this version of torch multiplies by tensors alone")
    monkeypatch.setattr(scaled_module, "multiplies_rows", lambda: has_rows)
    weight = torch.randn(149, 272).to(dtype)
    weight[0] = 0
    made = packed(weight, "fp8")
    for rows in (1, 7, 0):
        # Read past its inputs, a row yields NaN.
        wide = torch.full((rows, 275), torch.nan, dtype=dtype)
        x = wide[:, :272].copy_(torch.randn(rows, 272))
        x[2:3] = 0
        numbers, scales = quantize_fp8_per_token(x)
        for bias in (None, torch.randn(149).to(dtype)):
            found = scaled_linear(numbers, scales, made.handle, bias, 149, dtype)
            assert found.dtype == dtype and found.shape == (rows, 149)
            if rows:
                assert_equal_to_rounding(found, rounded_fp8(x), rounded(weight, "fp8"), bias)
    x[1:2, 5] = torch.nan
    found = scaled_linear(*quantize_fp8_per_token(x), made.handle, None, 149, dtype)
    assert found.isnan().any(1).nonzero().tolist() == [[1]] * (rows > 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "sm", "is_grouped", "by_torch"),
    [
        ((48, 272), torch.bfloat16, (9, 0), False, True),
        ((48, 272), torch.bfloat16, (8, 9), False, True),
        ((48, 272), torch.bfloat16, (8, 0), False, False),
        ((48, 272), torch.float16, (9, 0), False, False),
        ((48, 272), torch.bfloat16, (9, 0), True, False),
        ((40, 272), torch.bfloat16, (9, 0), False, False),
        ((48, 264), torch.bfloat16, (9, 0), False, False),
    ],
)
def test_on_a_gpu_torch_multiplies_what_it_takes(
    shape: tuple[int, int],
    dtype: torch.dtype,
    sm: tuple[int, int],
    is_grouped: bool,
    by_torch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = ScaledWeight.empty(shape, torch.device("cpu"), is_grouped=is_grouped)
    monkeypatch.setattr(scaled_module, "multiplies_fp8", lambda _: sm >= FIRST_FP8_GPU)
    assert multiplies_on_gpu(weight, dtype) == by_torch


# --- whole models -----------------------------------------------------------------------------


def weight_bytes(model: nn.Module) -> int:
    """Return what the linear layers of attention and MLPs hold."""
    handles = [m.handle for m in model.modules() if isinstance(m, Linear) and m.is_quantizable]
    entries = [module._entry(handle) for handle in handles if handle is not None]
    held = [entry.tiles if entry.scaled is None else entry.scaled for entry in entries]
    assert len(held) == len(handles) > 0
    return sum(each.nbytes for each in held if each is not None)


@pytest.mark.feature("S08")
@pytest.mark.parametrize("held", FORMS)
def test_a_model_holds_a_half_or_a_quarter(held: WeightFormat) -> None:
    found = {}
    for kind in ("none", held):
        model, _ = load_model(TINY, dtype=torch.bfloat16, device="cpu", quantization=kind)
        found[kind] = weight_bytes(model)
        # Nothing else is left of what became integers.
        layers = [m for m in model.modules() if isinstance(m, Linear) and m.is_quantizable]
        assert all(layer.weight.is_meta for layer in layers)
        head = None if model.lm_head.handle is None else module._entry(model.lm_head.handle)
        assert head is None or (head.integers, head.scaled) == (None, None)
    share = 1.07 if held == "int4" else 1.02
    assert found[held] <= found["none"] / (4 if held == "int4" else 2) * share, found


@pytest.mark.feature("S08")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("held", KINDS_HELD)
def test_logits_are_those_of_a_model_with_rounded_weights(
    held: WeightFormat, family: str, make_checkpoint: Any, paged: Any
) -> None:
    path, reference = make_checkpoint(family=family, **FAMILIES[family])
    wanted_model = rounded_model(reference, held)
    model, _ = load_model(path, dtype=torch.float32, device="cpu", quantization=held)
    ids = torch.randint(509, (30,), generator=torch.Generator().manual_seed(1))
    runner = paged(model)
    parts = [runner.step({"a": part})["a"] for part in (ids[:20], *ids[20:].split(1))]
    with torch.inference_mode():
        wanted, plain = (m(ids[None]).logits[0] for m in (wanted_model, reference))
    found = torch.cat(parts)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-5)
    assert (wanted - plain).abs().max() > 0.01


@pytest.mark.feature("S08")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("held", ["fp8", "w8a8"])
def test_logits_are_those_of_a_model_with_rounded_weights_and_inputs(
    held: WeightFormat, family: str, make_checkpoint: Any, paged: Any
) -> None:
    """An input that another order of summation tips over changes its sequence, few of them."""
    path, reference = make_checkpoint(family=family, **FAMILIES[family])
    wanted_model = rounded_model(reference, held)
    model, _ = load_model(path, dtype=torch.float32, device="cpu", quantization=held)
    prompts = torch.randint(509, (8, 6), generator=torch.Generator().manual_seed(1))
    runner = paged(model)
    steps = [{str(i): ids[part] for i, ids in enumerate(prompts)} for part in PARTS]
    logits = [torch.stack(list(runner.step(step).values())) for step in steps]
    with torch.inference_mode():
        wanted, plain = (m(prompts).logits for m in (wanted_model, reference))
    errors = (torch.cat(logits, 1) - wanted).abs().amax((1, 2))
    assert (errors < 2e-4).sum() >= 5, errors
    assert errors.max() < ROUNDED_BOUND * (wanted - plain).abs().max(), errors


@pytest.mark.parametrize("held", FORMS)
@pytest.mark.parametrize("kind", ["int by channel", "fp8", "gptq 4", "awq"])
def test_a_quantized_checkpoint_is_held_as_the_plain_one(
    kind: str, held: WeightFormat, make_checkpoint: Any, paged: Any, tmp_path: Path
) -> None:
    source, _ = make_checkpoint(family="Qwen3Moe", **FAMILIES["Qwen3Moe"], intermediate_size=96)
    ids, logits = torch.randint(509, (12,)), []
    for path in write(source, KINDS[kind], tmp_path):
        model, _ = load_model(path, dtype=torch.float32, device="cpu", quantization=held)
        logits.append(paged(model).step({"a": ids})["a"])
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("kind", "held", "is_told"),
    [
        ("int by channel", "none", True),
        ("int by channel", "int8", True),
        ("int by channel", "w8a8", False),
        ("gptq 8 by channel", "none", False),
    ],
)
def test_who_reads_integers_that_are_meant_to_meet_integers_is_told(
    kind: str,
    held: WeightFormat,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    path, _ = write(TINY, KINDS[kind], tmp_path)
    with caplog.at_level(logging.INFO, logger="lockstep.model"):
        load_model(path, dtype=torch.float32, device="cpu", quantization=held)
    line = "with quantization=w8a8 they are multiplied as they are stored, and faster"
    assert (line in caplog.messages) == is_told


@pytest.mark.parametrize("held", FORMS)
def test_each_of_two_ranks_rounds_its_part(held: WeightFormat, make_checkpoint: Any) -> None:
    path, reference = make_checkpoint(intermediate_size=512)
    wanted = dict(rounded_model(reference, held, 2).named_parameters())
    for rank in range(2):
        model, _ = load_model(
            path, shard=Shard(rank, 2), dtype=torch.float32, device="cpu", quantization=held
        )
        layer = model.model.layers[1].mlp.down_proj
        found = numbers_of(layer.handle)
        whole = wanted["model.layers.1.mlp.down_proj.weight"]
        assert torch.equal(found, whole.chunk(2, 1)[rank])


@pytest.mark.parametrize("held", FORMS)
def test_a_blank_model_has_the_tensors_of_a_loaded_one(
    held: WeightFormat, make_checkpoint: Any
) -> None:
    def shapes(model: CausalLM) -> dict[str, Any]:
        state = model.state_dict()
        return {name: (t.dtype, t.shape, t.stride()) for name, t in state.items()}

    path, _ = make_checkpoint(family="Mixtral", **FAMILIES["Mixtral"])
    blank, _ = blank_model(path, dtype=torch.float32, quantization=held)
    loaded, _ = load_model(path, dtype=torch.float32, device="cpu", quantization=held)
    assert shapes(blank) == shapes(loaded)


@pytest.mark.feature("S08")
@pytest.mark.parametrize(
    "options",
    [
        {"level": 0},
        {"level": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        pytest.param({"level": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("held", FORMS)
def test_the_bundled_model_is_served(
    held: WeightFormat, options: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    import transformers

    compilation = options | {"cache_dir": str(tmp_path)}
    with caplog.at_level(logging.INFO, logger="lockstep.model"):
        llm = LLM(
            dtype="float32",
            kv_memory="16MiB",
            max_num_seqs=2,
            quantization=held,
            compilation_config=compilation,
        )
    lines = [record.message for record in caplog.records if "held as" in record.message]
    assert lines == [f"weights of linear layers are held as {held}"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[5, 77, 130, 400, 9], [320, 8, 8, 61] * 20]
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = rounded_model(model, held)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        if held in ("fp8", "w8a8"):
            gaps = logits.amax(-1) - logits[range(len(tokens)), tokens]
            assert (gaps == 0).float().mean() > 0.7 and gaps.max() < ROUNDED_BOUND, gaps
        else:
            assert tokens == logits.argmax(-1).tolist()
