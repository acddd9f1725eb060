"""Quantized checkpoints: what they mean, what each rank reads of them, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizer import (
    KINDS,
    KV_SCHEME,
    REORDERED,
    Kind,
    Tensors,
    awq,
    fp8,
    gptq,
    nvfp4,
    pack,
    write,
)
from safetensors.torch import load_file, save_file

from compile.errors import FieldError
from model import stored_weights, weights
from model.config import ModelConfig, fingerprint
from model.parallel import Shard
from model.quantization import read_quantization
from model.stored_weights import Cut, stored_tensors, values_of
from model.weights import blank_model, load_model
from serve.llm import LLM, SamplingParams

TINY = Path(__file__).parents[2] / "examples" / "tiny"
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 16, "intermediate_size": 96, "attention_bias": True},
    "Qwen3Moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
        "intermediate_size": 96,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
    },
}
ALL = KINDS | REORDERED
Written = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(
    make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Written]:
    """Return the function from a family and a kind to (quantized, plain) checkpoints."""
    made: dict[tuple[str, str], Written] = {}

    def make(family: str, kind: str) -> Written:
        if (family, kind) not in made:
            source, _ = make_checkpoint(family=family, **MODELS[family])
            directory = tmp_path_factory.mktemp("quantized")
            made[family, kind] = write(source, ALL[kind], directory)
        return made[family, kind]

    return make


@pytest.fixture
def copy(pair: Callable[[str, str], Written], tmp_path: Path) -> Callable[..., Path]:
    """Return the function that copies a quantized checkpoint and changes its tensors."""

    def make(kind: str, change: Callable[[Tensors], object], family: str = "Llama") -> Path:
        path = Path(shutil.copytree(pair(family, kind)[0], tmp_path / "checkpoint"))
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, path / "model.safetensors")
        return path

    return make


def state(path: Path, shard: Shard | None = None, dtype: torch.dtype = torch.float32) -> Tensors:
    model, _ = load_model(path, shard=shard or Shard(), dtype=dtype, device="cpu")
    return dict(model.state_dict())


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("kind", ALL)
def test_weights_are_what_their_tensors_mean_to_the_bit(
    kind: str, family: str, pair: Callable[[str, str], Written]
) -> None:
    quantized, plain = pair(family, kind)
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal(state(quantized, dtype=dtype), state(plain, dtype=dtype))


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_of_two_ranks_reads_its_part(
    kind: str, family: str, pair: Callable[[str, str], Written]
) -> None:
    quantized, plain = pair(family, kind)
    for rank in range(2):
        assert_equal(state(quantized, Shard(rank, 2)), state(plain, Shard(rank, 2)))


@pytest.mark.feature("S04")
@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("kind", ["fp8", "int by channel", "gptq 4", "awq"])
def test_latent_projections_and_shared_experts_are_read_like_others(
    kind: str, pair: Callable[[str, str], Written]
) -> None:
    quantized, plain = pair("DeepseekV3", kind)
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        assert_equal(state(quantized, shard), state(plain, shard))


@pytest.mark.parametrize("kind", ALL)
def test_greedy_tokens_are_those_of_the_plain_checkpoint(
    kind: str, pair: Callable[[str, str], Written], load: Any, paged: Any
) -> None:
    def tokens(path: Path) -> list[int]:
        runner, found = paged(load(path)[0]), []
        ids = torch.tensor([3, 141, 59, 26, 5])
        for _ in range(10):
            ids = runner.step({"a": ids})["a"][-1:].argmax(-1)
            found.append(int(ids))
        return found

    quantized, plain = pair("Qwen3Moe", kind)
    assert tokens(quantized) == tokens(plain)


SERVED = {
    "float by channel": KINDS["float by channel"],
    "int by channel": KINDS["int by channel"],
    "fp8": fp8((128, 128)),
    "packed 4": pack(4, 128),
    "gptq 4": gptq(4, 128, sym=False, desc_act=True),
    "awq": awq(128),
    "nvfp4": nvfp4(),
}


@pytest.mark.feature("S08")
@pytest.mark.parametrize("kind", SERVED)
def test_a_quantized_checkpoint_is_served(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = []
    with caplog.at_level(logging.INFO, logger="lockstep.model"):
        for path in write(TINY, SERVED[kind], tmp_path):
            options: dict[str, Any] = {"dtype": "float32", "kv_memory": "16MiB"}
            llm = LLM(str(path), max_num_seqs=2, compilation_config={"level": 0}, **options)
            texts.append(llm.chat([{"role": "user", "content": "What is 12 + 30?"}], params))
    [found], [wanted] = texts
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    lines = [record.message for record in caplog.records if "stored as" in record.message]
    layout = ModelConfig.from_dir(tmp_path / "quantized").quantization.layout  # type: ignore[union-attr]
    assert lines == [f"weights that are stored as {layout} are computed in float32"]


@pytest.mark.parametrize("kind", ["int by channel", "gptq 4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_blank_model_has_the_tensors_of_a_loaded_one(
    dtype: torch.dtype, kind: str, pair: Callable[[str, str], Written]
) -> None:
    def shapes(tensors: Tensors) -> dict[str, Any]:
        return {name: (t.dtype, t.shape, t.stride()) for name, t in tensors.items()}

    path, _ = pair("Qwen3Moe", kind)
    blank, _ = blank_model(path, dtype=dtype)
    assert shapes(dict(blank.state_dict())) == shapes(state(path, dtype=dtype))


def test_checkpoints_that_differ_in_what_their_numbers_mean_have_other_fingerprints(
    pair: Callable[[str, str], Written], tmp_path: Path
) -> None:
    """It is part of the KV hash, and of the numerics hash that separates pools."""
    path = Path(shutil.copytree(pair("Llama", "gptq 4 with zeros")[0], tmp_path / "checkpoint"))
    before = fingerprint(path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (path / "config.json").write_text(json.dumps(config))
    assert fingerprint(path) != before


# --- any shape ------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Kind, torch.Tensor, Cut]:
    """Return a kind of random group and bits, a weight that its words fit, and a cut of it."""
    group, bits = draw(st.sampled_from([0, 8, 16, 24])), draw(st.sampled_from([4, 8]))
    is_symmetric = draw(st.booleans())
    block = draw(st.sampled_from([2, 3, 8])), draw(st.sampled_from([2, 5, 8]))
    kinds = (
        fp8(block),
        pack(bits, group, symmetric=is_symmetric),
        gptq(bits, group, sym=is_symmetric, version=draw(st.sampled_from([1, 2]))),
        awq(group),
        nvfp4(has_inputs=is_symmetric),
    )
    which = draw(st.sampled_from(range(len(kinds))))
    unit = (block, *[(8, group or 8)] * 3, (1, 16))[which]
    units = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    # FP8 in blocks and compressed-tensors' words may end with the weight; the others are even.
    short = [draw(st.integers(0, n - 1)) if which == 0 else 0 for n in unit]
    sizes = [count * n - less for count, n, less in zip(units, unit, short, strict=True)]
    dim = draw(st.sampled_from([0, 1]))
    first = draw(st.integers(0, units[dim] - 1))
    last = draw(st.integers(first + 1, units[dim]))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    cut = Cut(dim, first * unit[dim], min(last * unit[dim], sizes[dim]))
    return kinds[which], torch.randn(*sizes, generator=seed), cut


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 40))
def test_any_cut_at_whole_groups_and_words_is_read_to_the_bit(
    case: tuple[Kind, torch.Tensor, Cut], outputs_at_once: int
) -> None:
    kind, weight, cut = case
    quantization, _ = read_quantization(kind.config)
    assert quantization is not None
    tensors, plain = kind.parts(weight)
    sizes = tuple(weight.shape)
    stored = stored_tensors(quantization, "a.weight", sizes, cut)
    assert {each.name: each.shape for each in stored} == {
        f"a.{name}": tuple(tensor.shape) for name, tensor in tensors.items()
    }
    parts = {each.part.name: tensors[each.part.name][each.where(cut)] for each in stored}
    wanted = plain.narrow(cut.dim, cut.start, cut.stop - cut.start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_weights, "OUTPUTS_AT_ONCE", outputs_at_once)
        assert torch.equal(values_of(quantization, parts, cut, sizes), wanted)


# --- what is refused ------------------------------------------------------------------------------


def refusal(path: Path, shard: Shard | None = None) -> str:
    with pytest.raises(FieldError) as caught:
        state(path, shard)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((str(path), "model.safetensors"))
    return message


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        (
            fp8((32, 48)),
            2,
            "k_proj.weight_scale_inv: wanted ranks' parts of a multiple of 32 out",
        ),
        (pack(4, 32), 2, "down_proj.weight_scale: wanted ranks' parts of a multiple of 32 inputs"),
        (
            pack(4, symmetric=False),
            4,
            "q_proj.weight_zero_point: wanted ranks' parts of a multiple",
        ),
        (
            pack(4, 0),
            8,
            "o_proj.weight_packed: wanted ranks' parts of a multiple of 8 inputs, found",
        ),
        (
            nvfp4(),
            4,
            "o_proj.weight_scale: wanted ranks' parts of a multiple of 16 inputs, found inputs 0",
        ),
        (
            gptq(),
            4,
            "q_proj.qzeros: wanted ranks' parts of a multiple of 8 outputs, found outputs 0",
        ),
        (
            gptq(desc_act=True),
            2,
            "o_proj.g_idx: wanted all inputs on each rank where desc_act is",
        ),
        (
            awq(),
            4,
            "q_proj.qweight: wanted ranks' parts of a multiple of 8 outputs, found outputs 0",
        ),
    ],
)
def test_a_cut_through_what_is_stored_together_is_refused_before_any_is_read(
    kind: Kind,
    size: int,
    message: str,
    make_checkpoint: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"head_dim": 16 if size == 2 else 4, "intermediate_size": 96}
    heads = {"num_attention_heads": max(4, size), "num_key_value_heads": size}
    source, _ = make_checkpoint(**sizes, **heads)
    monkeypatch.setattr(weights, "_parts", None)
    path, _ = write(source, kind, tmp_path)
    assert f".{message}" in refusal(path, Shard(0, size))


DAMAGES: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = [
    ("int by channel", "weight_scale", lambda t: None, "wanted in the checkpoint, found none"),
    ("int by channel", "weight", lambda t: t.float(), "wanted I8, found 'F32'"),
    ("int by channel", "weight_scale", lambda t: t[:, 0], "wanted shape (96, 1), found (96,)"),
    ("float by channel", "weight", lambda t: t.to(torch.int8), "wanted F8_E4M3, found 'I8'"),
    (
        "float by channel",
        "weight_scale",
        lambda t: t * torch.nan,
        "wanted finite numbers, found nan",
    ),
    ("float by channel", "weight", lambda t: (t.float() * torch.nan).to(t.dtype), "wanted finite"),
    ("fp8", "weight_scale_inv", lambda t: t[:-1], "wanted shape (24, 6), found (23, 6)"),
    (
        "fp8",
        "weight_scale_inv",
        lambda t: t.int(),
        "wanted one of F64, F32, F16, BF16, found 'I32'",
    ),
    ("packed 4", "weight_packed", lambda t: t.long(), "wanted I32, found 'I64'"),
    ("packed 4", "weight_packed", lambda t: t[:, 1:], "wanted shape (96, 6), found (96, 5)"),
    ("packed 4", "weight_shape", lambda t: t.flip(0), "wanted [96, 48], found [48, 96]"),
    ("packed 4", "weight_shape", lambda t: None, "wanted in the checkpoint, found none"),
    ("gptq 4", "g_idx", lambda t: t + 1, "wanted groups 0 to 5, found 1 to 6"),
    ("gptq 4", "g_idx", lambda t: -t, "wanted groups 0 to 5, found -5 to 0"),
    (
        "gptq 4",
        "qzeros",
        lambda t: t * 0,
        "wanted zero points of 8 where sym is true, found 1 to 1",
    ),
    ("gptq 4", "qweight", lambda t: t.T, "wanted shape (6, 96), found (96, 6)"),
    ("nvfp4", "weight_packed", lambda t: t.view(torch.int8), "wanted U8, found 'I8'"),
    ("nvfp4", "weight_packed", lambda t: t[:, 1:], "wanted shape (96, 24), found (96, 23)"),
    ("nvfp4", "weight_scale", lambda t: t.float(), "wanted F8_E4M3, found 'F32'"),
    ("nvfp4", "weight_scale", lambda t: (t.float() * torch.nan).to(t.dtype), "wanted finite"),
    ("nvfp4", "weight_global_scale", lambda t: t * 0, "wanted a number above 0, found 0.0"),
    ("nvfp4", "weight_global_scale", lambda t: t / 0, "wanted a number above 0, found inf"),
    ("nvfp4", "weight_global_scale", lambda t: t.repeat(2), "wanted shape (1,), found (2,)"),
    ("AutoFP8", "weight_scale", lambda t: t.repeat(2), "wanted shape (1,), found (2,)"),
    ("nvfp4", "input_global_scale", lambda t: None, "wanted in the checkpoint, found none"),
    ("awq", "qzeros", lambda t: None, "wanted in the checkpoint, found none"),
    ("awq", "scales", lambda t: t * torch.inf, "wanted finite numbers, found"),
]


@pytest.mark.parametrize(("kind", "part", "change", "message"), DAMAGES)
def test_damaged_tensors_are_refused_by_name(
    kind: str,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    message: str,
    copy: Callable[..., Path],
) -> None:
    name = f"model.layers.1.mlp.up_proj.{part}"

    def damage(tensors: Tensors) -> None:
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    assert refusal(copy(kind, damage)).startswith(f"tensor {name}: {message}")


def test_scales_are_of_one_16_bit_type_that_need_not_be_the_plain_tensors(
    copy: Callable[..., Path],
) -> None:
    def convert(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.half() if name.endswith(".scales") else tensor.bfloat16()

    path = copy("gptq 4", convert)
    state(path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.scales"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, path / "model.safetensors")
    assert "wanted F16 as tensor" in refusal(path) or "wanted BF16 as tensor" in refusal(path)


def test_tensors_of_another_kind_are_unknown(copy: Callable[..., Path]) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale"
    path = copy("gptq 4", lambda tensors: tensors.update({name: torch.ones(96, 1)}))
    assert refusal(path).startswith(f"tensor {name}: wanted only tensors of Llama")


def test_experts_in_one_tensor_are_refused_where_weights_are_quantized(
    copy: Callable[..., Path],
) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    path = copy("fp8", lambda t: t.update({name: torch.zeros(4, 48, 48)}), "Qwen3Moe")
    wanted = "wanted a tensor for each expert (quantization_config), found all experts in one"
    assert refusal(path).startswith(f"tensor {name}: {wanted}")


def test_scales_of_activations_are_passed_over_only_where_they_are_static(
    copy: Callable[..., Path],
) -> None:
    name = "model.layers.0.mlp.up_proj.input_scale"
    path = copy("float by tensor", lambda t: t.update({name: torch.ones(1)}))
    assert refusal(path).startswith(f"tensor {name}: wanted only tensors of Llama")
    config = json.loads((path / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"]["dynamic"] = False
    (path / "config.json").write_text(json.dumps(config))
    state(path)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize(
    ("kind", "field", "names"),
    [
        ("int by channel", "ignore", ["model.layers.0.mlp.up_proj"]),
        ("int by channel", "ignore", ["re:model.layers.0.mlp.(up|none)"]),
        ("fp8", "modules_to_not_convert", ["model.layers.0.mlp.up_proj"]),
        ("fp8", "ignored_layers", ["layers.0.mlp.up_proj"]),
        ("gptq 4", "modules_to_not_convert", ["0.mlp.up_proj"]),
        ("awq", "modules_to_not_convert", ["0.mlp.up_proj"]),
    ],
)
def test_modules_that_are_not_quantized_are_read_as_they_are(
    kind: str, field: str, names: list[str], make_checkpoint: Any, tmp_path: Path
) -> None:
    config = ALL[kind].config
    changed = config | {field: [*(config.get(field) or []), *names]}
    source, _ = make_checkpoint(**MODELS["Llama"])
    name = "model.layers.0.mlp.up_proj.weight"
    quantized, plain = write(
        source, Kind(changed, ALL[kind].parts), tmp_path, lambda found: found == name
    )
    assert_equal(state(quantized), state(plain))


def test_a_name_stands_for_whole_components() -> None:
    config = {**ALL["awq"].config, "modules_to_not_convert": ["mlp.gate", "0.mlp"]}
    of, _ = read_quantization(config)
    assert of is not None
    plain = ["a.mlp.gate", "layers.0.mlp", "layers.0.mlp.up_proj"]
    quantized = ["a.mlp.gate_proj", "xmlp.gate", "layers.10.mlp.up_proj"]
    assert [of.is_plain(name) for name in plain + quantized] == [True] * 3 + [False] * 3
    of, _ = read_quantization({**ALL["int by channel"].config, "ignore": ["a.b", "re:.*c$"]})
    assert of is not None
    assert [of.is_plain(name) for name in ("a.b", "x.c", "a.b.d", "x.cd", "aXb")] == [
        *[True] * 2,
        *[False] * 3,
    ]


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    inner = changed(config.get(first, {}), rest, value) if rest else value
    return {**config, first: inner}


IN_GROUP = "config_groups.group_0"
CONFIGS = {name: kind.config for name, kind in KINDS.items()}
CONFIGS["packed 4, FP8 KV"] = {**CONFIGS["packed 4"], "kv_cache_scheme": KV_SCHEME}
REFUSED: list[tuple[str, str, object, str]] = [
    (
        "fp8",
        "quant_method",
        "bitsandbytes",
        "wanted one of compressed-tensors, fp8, gptq, awq, found",
    ),
    ("fp8", "quant_method", ["fp8"], "wanted one of compressed-tensors, fp8, gptq, awq, found ["),
    ("fp8", "weight_block_size", [8], "wanted two sizes, or null, found [8]"),
    ("fp8", "weight_block_size", [0, 8], "wanted an integer from 1 up, found 0"),
    ("fp8", "activation_scheme", "odd", "wanted dynamic or static, found 'odd'"),
    ("fp8", "fmt", "e5m2", "wanted e4m3, found 'e5m2'"),
    ("fp8", "modules_to_not_convert", "gate", "wanted a list of modules' names, or null, found"),
    ("fp8", "kv_cache_scheme", {"num_bits": 8}, "wanted static or null, found {'num_bits': 8}"),
    ("AutoFP8", "kv_cache_scheme", "dynamic", "wanted static or null, found 'dynamic'"),
    ("packed 4", "format", "marlin-24", "wanted float-quantized, int-quantized, pack-q"),
    ("packed 4", "kv_cache_scheme", "fp8", "wanted object, found 'fp8'"),
    ("packed 4, FP8 KV", "kv_cache_scheme.num_bits", 4, "wanted 8, found 4"),
    ("packed 4, FP8 KV", "kv_cache_scheme.type", "int", "wanted float, found 'int'"),
    ("packed 4, FP8 KV", "kv_cache_scheme.symmetric", False, "wanted true, found False"),
    ("packed 4, FP8 KV", "kv_cache_scheme.strategy", "channel", "wanted tensor or attn_head, fo"),
    ("packed 4, FP8 KV", "kv_cache_scheme.dynamic", True, "wanted false, found True"),
    ("packed 4, FP8 KV", "config_groups", {"a": {}, "b": {}}, "wanted one group, found ['a', 'b']"),
    ("packed 4", "config_groups", {}, "wanted one group, found []"),
    ("packed 4", "sparsity_config", {"format": "dense"}, "wanted none, found {'format': 'dense'}"),
    ("packed 4", "transform_config", {"config_groups": {}}, "wanted none, found {'config_groups'"),
    ("packed 4", "ignore", ["re:("], "wanted regular expressions after re:, found '('"),
    ("packed 4", f"{IN_GROUP}.targets", ["Conv2d"], "wanted ['Linear'], found ['Conv2d']"),
    ("packed 4", f"{IN_GROUP}.format", "odd", "wanted pack-quantized, found 'odd'"),
    ("packed 4", f"{IN_GROUP}.output_activations", {}, "wanted none, found {}"),
    ("packed 4", f"{IN_GROUP}.weights", None, "wanted object, found None"),
    ("packed 4", f"{IN_GROUP}.weights.num_bits", 3, "wanted 4 or 8, found 3"),
    (
        "packed 4",
        f"{IN_GROUP}.weights.type",
        "float",
        "wanted int for pack-quantized, found 'float'",
    ),
    (
        "packed 4",
        f"{IN_GROUP}.weights.strategy",
        "block",
        "wanted channel or group for pack-quanti",
    ),
    ("packed 4", f"{IN_GROUP}.weights.group_size", 0, "wanted an integer from 1 up, found 0"),
    (
        "packed 4",
        f"{IN_GROUP}.weights.actorder",
        "group",
        "wanted weight, static or null (inputs in",
    ),
    (
        "int by channel",
        f"{IN_GROUP}.weights.symmetric",
        False,
        "wanted true for int-quantized, found",
    ),
    ("int by channel", f"{IN_GROUP}.weights.num_bits", 4, "wanted 8 for int-quantized, found 4"),
    ("nvfp4", f"{IN_GROUP}.weights.num_bits", 8, "wanted 4 for nvfp4-pack-quantized, found 8"),
    ("nvfp4", f"{IN_GROUP}.weights.type", "int", "wanted float for nvfp4-pack-quantized, found"),
    ("nvfp4", f"{IN_GROUP}.weights.symmetric", False, "wanted true for nvfp4-pack-quantized, fou"),
    ("nvfp4", f"{IN_GROUP}.weights.strategy", "group", "wanted tensor_group for nvfp4-pack-quant"),
    ("nvfp4", f"{IN_GROUP}.weights.group_size", 32, "wanted 16, found 32"),
    (
        "float by tensor",
        f"{IN_GROUP}.weights.strategy",
        "tensor_group",
        "wanted another one where format is not nvfp4-pack-quantized, found 'tensor_group'",
    ),
    ("float by block", f"{IN_GROUP}.weights.block_structure", None, "wanted two sizes, found None"),
    ("gptq 4", "bits", 3, "wanted 4 or 8, found 3"),
    ("gptq 4", "group_size", 0, "wanted -1, or an integer from 1 up, found 0"),
    ("gptq 4", "checkpoint_format", "marlin", "wanted gptq or gptq_v2, found 'marlin'"),
    ("gptq 4", "dynamic", {"+:.*": {"bits": 8}}, "wanted none, found {'+:.*': {'bits': 8}}"),
    ("gptq 4", "lm_head", True, "wanted false, found True"),
    ("gptq 4", "modules_in_block_to_quantize", [["mlp"]], "wanted none, found [['mlp']]"),
    ("awq", "bits", 8, "wanted 4, found 8"),
    ("awq", "version", "gemv", "wanted gemm, found 'gemv'"),
    ("awq", "zero_point", False, "wanted true, found False"),
]


@pytest.mark.parametrize(("kind", "field", "value", "message"), REFUSED)
def test_what_is_not_served_is_refused_by_field(
    kind: str, field: str, value: object, message: str
) -> None:
    config = changed(CONFIGS[kind], field, value)
    with pytest.raises(FieldError) as caught:
        ModelConfig.from_dict(
            {"architectures": ["LlamaForCausalLM"], "quantization_config": config}, "config.json"
        )
    found = str(caught.value)
    assert found.startswith(f"quantization_config.{field}: {message}")
    assert found.endswith(" in config.json")


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
JSON |= st.lists(JSON, max_size=2) | st.dictionaries(st.text(max_size=4), JSON, max_size=2)


def paths_in(config: dict[str, Any]) -> list[str]:
    inner = [f"{name}.{path}" for name in config for path in paths_in_value(config[name])]
    return [*config, *inner]


def paths_in_value(value: object) -> list[str]:
    return paths_in(value) if isinstance(value, dict) else []


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_json_in_place_of_a_field_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    config = CONFIGS[data.draw(st.sampled_from(list(CONFIGS)))]
    config = changed(config, data.draw(st.sampled_from(paths_in(config))), data.draw(JSON))
    values = {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    try:
        found = ModelConfig.from_dict(values, "config.json")
    except FieldError as error:
        assert str(error).startswith("quantization_config.") and "\n" not in str(error)
        assert ": wanted " in str(error) and ", found " in str(error)
    else:
        assert found.quantization is not None or found.has_fp8_kv
        assert hash(found) == hash(ModelConfig.from_dict(values, "config.json"))
