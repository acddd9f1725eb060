"""`ModelConfig`: what it reads, what it refuses, and its defaults against transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from compile.errors import FieldError
from model import config
from model.config import Experts, ModelConfig
from model.families import FAMILIES

FAMILY_NAMES = ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe"]
FAMILY_NAMES += ["DeepseekV2", "DeepseekV3"]
FIELDS = sorted({name for family in FAMILIES.values() for name in family.defaults})
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LLAMA = {"architectures": ["LlamaForCausalLM"]}
LLAMA3 = {"type": "llama3", "factor": 2, "low_freq_factor": 4}


def read(**values: Any) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA | values, "config.json")


def write(directory: Path, name: str, value: object) -> None:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


def experts_of(theirs: Any) -> Experts | None:
    """Return what transformers' model classes make of a configuration."""
    if not hasattr(theirs, "num_experts_per_tok"):
        return None
    layers, dense = range(theirs.num_hidden_layers), getattr(theirs, "mlp_only_layers", [])
    step = getattr(theirs, "decoder_sparse_step", 1)
    is_sparse = tuple(i not in dense and (i + 1) % step == 0 for i in layers)
    experts = Experts(
        num_experts=theirs.num_experts,
        num_experts_per_tok=theirs.num_experts_per_tok,
        intermediate_size=getattr(theirs, "moe_intermediate_size", theirs.intermediate_size),
        norm_topk_prob=getattr(theirs, "norm_topk_prob", True),
        is_sparse=is_sparse,
    )
    return experts if any(is_sparse) else None


def windows_of(theirs: Any) -> tuple[int | None, ...]:
    """Return each layer's window as transformers' attention classes take it."""
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("name", FIELDS)
def test_each_default_is_what_transformers_takes_for_an_absent_field(
    family: str, name: str
) -> None:
    theirs = getattr(transformers, f"{family}Config")()
    defaults = FAMILIES[f"{family}ForCausalLM"].defaults
    if name not in defaults:
        # Either spelling of how many experts there are stands for the other one.
        assert not hasattr(theirs, name) or name in EXPERTS
    elif name == "rope_theta":
        assert defaults[name] == theirs.default_theta
    elif name == "sliding_window":
        default = type(theirs).__dataclass_fields__["sliding_window"].default
        assert defaults[name] == default
    elif defaults[name] is not None and name != "dtype":
        assert defaults[name] == getattr(theirs, name)


WINDOWED = [
    ("Mistral", {"sliding_window": 7}),
    ("Mistral", {"sliding_window": None}),
    ("Mixtral", {}),
    ("Mixtral", {"sliding_window": 7}),
    ("Qwen3Moe", {"sliding_window": 7}),
    ("Qwen3Moe", {"use_sliding_window": True}),
    ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 3}),
    ("Qwen2", {"sliding_window": 7}),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": None}),
    ("Qwen3", {"use_sliding_window": True, "max_window_layers": 4}),
    ("Qwen3", {"use_sliding_window": True, "sliding_window": 3, "layer_types": None}),
    (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
]


def in_both(
    family: str, values: dict[str, Any], directory: Path
) -> tuple[Any, ModelConfig, ModelConfig]:
    """Return transformers' configuration of four layers, ours of its file, and ours of the values.

    What the values leave out has transformers' defaults in the first two, and ours in the last.
    """
    architectures = [f"{family}ForCausalLM"]
    values = values | {"num_hidden_layers": 4}
    theirs = getattr(transformers, f"{family}Config")(architectures=architectures, **values)
    theirs.save_pretrained(directory)
    ours = ModelConfig.from_dict({"architectures": architectures} | values, "config.json")
    return theirs, ModelConfig.from_dir(directory), ours


@pytest.mark.feature("S06")
@pytest.mark.parametrize(("family", "values"), WINDOWED)
def test_windows_are_transformers(family: str, values: dict[str, Any], tmp_path: Path) -> None:
    theirs, read_back, ours = in_both(family, values, tmp_path)
    assert ours.layer_windows == read_back.layer_windows == windows_of(theirs)
    windows = set(ours.layer_windows)
    assert ours.kv_window == (None if None in windows else windows.pop())


SPARSE = [
    ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 5}),
    ("Qwen3Moe", {"num_experts": 9, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    ("Qwen3Moe", {"decoder_sparse_step": 2, "moe_intermediate_size": 77}),
    ("Qwen3Moe", {"decoder_sparse_step": 3, "mlp_only_layers": [2]}),
    ("Qwen3Moe", {"mlp_only_layers": [0, 3, 99]}),
    ("Qwen3Moe", {"mlp_only_layers": [0, 1, 2, 3]}),
]


@pytest.mark.parametrize(("family", "values"), SPARSE)
def test_experts_are_transformers(family: str, values: dict[str, Any], tmp_path: Path) -> None:
    theirs, read_back, ours = in_both(family, values, tmp_path)
    assert ours.experts == read_back.experts == experts_of(theirs)


LATENT: list[tuple[str, dict[str, Any]]] = [
    ("DeepseekV2", {"num_experts_per_tok": 6}),
    ("DeepseekV2", {"num_experts_per_tok": 2, "q_lora_rank": None, "n_group": 5, "topk_group": 9}),
    (
        "DeepseekV2",
        {
            "num_experts_per_tok": 6,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "norm_topk_prob": True,
            "first_k_dense_replace": 2,
        },
    ),
    ("DeepseekV3", {}),
    ("DeepseekV3", {"first_k_dense_replace": 4}),
    ("DeepseekV3", {"norm_topk_prob": False, "n_shared_experts": 3, "rope_interleave": False}),
]
YARN = {"rope_type": "yarn", "factor": 16.0, "mscale": 0.6, "original_max_position_embeddings": 256}
SCALED: list[dict[str, Any]] = [
    YARN | {"mscale_all_dim": 1.3},
    YARN | {"mscale_all_dim": 0},
    YARN,
    {"rope_type": "linear", "factor": 3.0, "mscale_all_dim": 1.3},
    {"rope_type": "linear", "factor": 0.5, "mscale_all_dim": 1.3},
    {"rope_type": "default", "mscale_all_dim": 1.3},
]


def grouped(family: str, theirs: Any) -> Experts | None:
    """Return what transformers' model classes make of a configuration with shared experts."""
    first, layers = theirs.first_k_dense_replace, theirs.num_hidden_layers
    is_grouped = getattr(theirs, "topk_method", "") != "greedy"
    experts = Experts(
        num_experts=theirs.n_routed_experts,
        num_experts_per_tok=theirs.num_experts_per_tok,
        intermediate_size=theirs.moe_intermediate_size,
        norm_topk_prob=theirs.norm_topk_prob and family == "DeepseekV3",
        is_sparse=tuple(i >= first for i in range(layers)),
        shared_size=theirs.moe_intermediate_size * theirs.n_shared_experts,
        has_sigmoid_scores=family == "DeepseekV3",
        num_groups=theirs.n_group if is_grouped else 1,
        num_groups_per_tok=theirs.topk_group if is_grouped else 1,
        scaling=theirs.routed_scaling_factor,
        has_float32_router=True,
    )
    return experts if first < layers else None


@pytest.mark.feature("S04")
@pytest.mark.parametrize(("family", "values"), LATENT)
def test_shared_experts_and_latents_are_transformers(
    family: str, values: dict[str, Any], tmp_path: Path
) -> None:
    theirs, read_back, ours = in_both(family, values, tmp_path)
    assert ours.experts == read_back.experts == grouped(family, theirs)
    assert ours.latent == read_back.latent
    assert ours.latent is not None
    assert ours.head_dim == ours.latent.rope_dim == theirs.head_dim == theirs.qk_rope_head_dim
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert (ours.latent.q_rank, ours.latent.kv_rank) == (theirs.q_lora_rank, theirs.kv_lora_rank)
    assert (ours.latent.nope_dim, ours.latent.v_dim) == (theirs.qk_nope_head_dim, theirs.v_head_dim)
    assert ours.latent.is_interleaved == getattr(theirs, "rope_interleave", True)


@pytest.mark.feature("S04")
@pytest.mark.parametrize("rope", SCALED)
@pytest.mark.parametrize("version", [2, 3])
def test_scores_are_scaled_as_transformers_does(
    version: int, rope: dict[str, Any], tmp_path: Path
) -> None:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    values = {"rope_parameters": rope, "num_experts_per_tok": 2}
    theirs, read_back, _ = in_both(f"DeepseekV{version}", values, tmp_path)
    module = {2: v2, 3: v3}[version]
    wanted = module.yarn_apply_mscale(theirs.rope_parameters, theirs.qk_head_dim**-0.5)
    assert read_back.latent is not None
    assert read_back.latent.scale == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_is_read_in_both_spellings(family: str, name: str) -> None:
    config = read(architectures=[f"{family}ForCausalLM"], **{name: 31})
    assert config.experts is not None
    assert config.experts.num_experts == 31


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
        {"head_dim": 80, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "eos_token_id": [5, 6], "bos_token_id": None},
        {"dtype": "bfloat16", "vocab_size": 509, "max_position_embeddings": 77},
        {"eos_token_id": None},
    ],
)
def test_reads_what_transformers_writes(overrides: dict[str, Any], tmp_path: Path) -> None:
    theirs = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **overrides)
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_dir(tmp_path)
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.dtype == overrides.get("dtype", "float32")
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == ((eos,) if isinstance(eos, int) else tuple(eos or ()))
    assert ours.bos_token_id == theirs.bos_token_id
    for name in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    ("values", "theta"),
    [
        ({"rope_theta": 7.0}, 7.0),
        ({"rope_theta": 7, "rope_scaling": None}, 7.0),
        ({"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}, 9.0),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 8.0}, 8.0),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 8.0}, 8.0),
        ({"rope_parameters": None}, 10000.0),
    ],
)
def test_rope_is_read_in_both_spellings(values: dict[str, Any], theta: float) -> None:
    assert read(**values).rope.theta == theta
    theirs = transformers.LlamaConfig(**values)
    assert theirs.rope_parameters["rope_theta"] == theta


def test_older_torch_dtype_is_read_where_dtype_is_absent() -> None:
    assert read(torch_dtype="float16").dtype == "float16"
    assert read(torch_dtype="float16", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({"eos_token_id": 9}, (9,)),
        ({"eos_token_id": [9, 8]}, (9, 8)),
        ({"eos_token_id": None}, (3,)),
        ({}, (3,)),
        (None, (3,)),
    ],
)
def test_generation_config_decides_the_end_tokens(
    generation: dict[str, Any] | None, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, "config.json", LLAMA | {"eos_token_id": 3})
    if generation is not None:
        write(tmp_path, "generation_config.json", generation)
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == wanted


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_each_field_of_a_family_is_checked(family: str) -> None:
    architecture = f"{family}ForCausalLM"
    for name in FAMILIES[architecture].defaults:
        with pytest.raises(FieldError, match=f"^{name}: wanted .*, found .* in config.json$"):
            read(architectures=[architecture], **{"num_experts_per_tok": 1, name: {"odd": 1}})


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("Llama", {"hidden_size": "64"}, "hidden_size: wanted an integer from 1 to 268435456, fou"),
        ("Llama", {"hidden_size": 100}, "hidden_size: wanted a multiple of num_attention_heads=32"),
        ("Llama", {"head_dim": 33}, "head_dim: wanted an even number, found 33"),
        ("Llama", {"head_dim": 1 << 20}, "head_dim: wanted an integer of at most 65536"),
        ("Llama", {"num_key_value_heads": 5}, "num_key_value_heads: wanted a divisor of num_atten"),
        ("Llama", {"rms_norm_eps": 10**400}, "rms_norm_eps: wanted a number above 0, found 1000"),
        ("Llama", {"eos_token_id": [-1]}, "eos_token_id: wanted a token id or a list of them"),
        (
            "Llama",
            {"quantization_config": 4},
            "quantization_config: wanted an object or null, found ",
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling.type: wanted default, linear, dynamic, llama3 or yarn, found 'longrope'",
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor: wanted a number above 0, found None",
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1},
            "rope_theta: wanted other than 1 for rope_type yarn",
        ),
        (
            "Llama",
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 4}},
            "rope_scaling.high_freq_factor: wanted a number above low_freq_factor=4, found 4.0",
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2},
            "head_dim: wanted above 2 for rope_type dynamic, found 2",
        ),
        (
            "Llama",
            {"rope_parameters": {"full_attention": {}}},
            "rope_parameters.full_attention: wanted one of rope_type, type, rope_theta, factor, ",
        ),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: wanted 1"),
        (
            "Mistral",
            {"layer_types": ["full_attention"]},
            "layer_types: wanted none (the layers of this architecture are alike)",
        ),
        (
            "Qwen2",
            {"layer_types": ["sliding_attention"], "num_hidden_layers": 1},
            "layer_types: wanted 1 of full_attention (sliding_window=None), found ['sliding_att",
        ),
        (
            "Qwen3",
            {"layer_types": ["full_attention"], "use_sliding_window": True},
            "layer_types: wanted 32 of full_attention or sliding_attention (sliding_window=4096)",
        ),
        ("Qwen3", {"head_dim": None}, "head_dim: wanted an integer from 1 to 268435456, found No"),
        ("Mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok: wanted at most the 8 expert"),
        (
            "Qwen3Moe",
            {"num_experts": 128, "num_local_experts": 127},
            "num_local_experts: wanted 128 like num_experts, found 127",
        ),
        ("Qwen3Moe", {"mlp_only_layers": [-1]}, "mlp_only_layers: wanted a list of layers' number"),
        (
            "DeepseekV2",
            {},
            "num_experts_per_tok: wanted an integer from 1 to 268435456, found None",
        ),
        (
            "DeepseekV3",
            {"num_experts_per_tok": 129},
            "num_experts_per_tok: wanted at most the 128 ",
        ),
        (
            "DeepseekV3",
            {"n_group": 7},
            "n_group: wanted a divisor of n_routed_experts=256 that lea",
        ),
        ("DeepseekV3", {"n_group": 256}, "n_group: wanted a divisor of n_routed_experts=256 that "),
        ("DeepseekV3", {"n_group": None}, "n_group: wanted a divisor of n_routed_experts=256 that"),
        ("DeepseekV3", {"topk_group": 9}, "topk_group: wanted at most n_group=8, found 9"),
        ("DeepseekV3", {"topk_group": None}, "topk_group: wanted at most n_group=8, found None"),
        (
            "DeepseekV2",
            {"topk_method": "group_limited_greedy", "num_experts_per_tok": 2},
            "n_group: wanted a divisor of n_routed_experts=64, found None",
        ),
        (
            "DeepseekV2",
            {"topk_method": "noaux_tc", "num_experts_per_tok": 2},
            "topk_method: wanted greedy or group_limited_greedy, found 'noaux_tc'",
        ),
        ("DeepseekV3", {"topk_method": "greedy"}, "topk_method: wanted noaux_tc, found 'greedy'"),
        ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func: wanted sigmoid, found 'softma"),
        ("DeepseekV3", {"moe_layer_freq": 2}, "moe_layer_freq: wanted 1 (every layer behind the d"),
        ("DeepseekV3", {"n_shared_experts": 0}, "n_shared_experts: wanted an integer from 1 to 10"),
        ("DeepseekV3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim: wanted an even number, found 7"),
        ("DeepseekV3", {"kv_lora_rank": 1 << 20}, "kv_lora_rank: wanted an integer of at most 655"),
        (
            "DeepseekV3",
            {"num_key_value_heads": 8},
            "num_key_value_heads: wanted num_attention_heads=128 (all heads have one latent), foun",
        ),
        ("Falcon", {}, f"architectures: wanted one of {', '.join(FAMILIES)}, found ['FalconForCa"),
    ],
)
def test_what_cannot_be_used_is_refused_by_field(
    family: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError) as caught:
        read(architectures=[f"{family}ForCausalLM"], **values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "config.json: wanted JSON, found 'a' named twice"),
        (None, "config.json: wanted a readable file, found No such file or directory in"),
        ("[1]", "config.json: wanted a JSON object, found [1] in"),
    ],
)
def test_files_that_are_not_configurations_are_named(
    text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        write(tmp_path, "config.json", text)
    with pytest.raises(FieldError) as caught:
        ModelConfig.from_dir(tmp_path)
    assert str(caught.value).startswith(message)
    assert str(tmp_path) in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=5,
)
OTHERS = ["dtype", "torch_dtype", "rope_scaling", "rope_parameters"]
OTHERS += ["original_max_position_embeddings", "quantization_config"]


@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS + OTHERS), JSON, max_size=4),
    st.sampled_from(FAMILY_NAMES),
)
def test_any_json_is_read_or_refused_in_one_line(values: dict[str, Any], family: str) -> None:
    values = values | {"architectures": [f"{family}ForCausalLM"]}
    try:
        config = read(**values)
    except FieldError as error:
        assert "\n" not in str(error)
        assert ": wanted " in str(error)
        assert ", found " in str(error)
    else:
        assert config.num_heads % config.num_kv_heads == 0
        assert config.head_dim % 2 == 0
        assert hash(config) == hash(read(**values))


def test_weights_are_sampled_from_the_first_byte_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(config, "SAMPLE_BYTES", 100)
    path = tmp_path / "model.safetensors"
    found = set()
    for changed in (None, 0, 99_999):
        data = bytearray(100_000)
        if changed is not None:
            data[changed] = 1
        path.write_bytes(data)
        found.add(config.fingerprint(tmp_path))
    path.write_bytes(bytes(100_001))
    assert len({*found, config.fingerprint(tmp_path)}) == 4
