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
from model.config import Experts, ModelConfig
from model.families import FAMILIES
from model.rope import DefaultRope

FAMILY_NAMES = ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe"]
ROPE_TYPES = "default, linear, dynamic, llama3 or yarn"
FIELDS = sorted({name for family in FAMILIES.values() for name in family.defaults})
LLAMA = {"architectures": ["LlamaForCausalLM"]}


def read(**values: Any) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA | values, "config.json")


def write(directory: Path, name: str, value: object) -> None:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    theirs = getattr(transformers, f"{family}Config")()
    ours = ModelConfig.from_dict({"architectures": [f"{family}ForCausalLM"]}, "config.json")
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    own_head_dim = getattr(theirs, "head_dim", None)
    assert ours.head_dim == (own_head_dim or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope == DefaultRope(theirs.rope_parameters["rope_theta"])
    assert theirs.rope_parameters["rope_type"] == "default"
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.hidden_act == theirs.hidden_act
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == ((theirs.eos_token_id,) if theirs.eos_token_id else ())
    assert ours.layer_windows == windows_of(theirs)
    assert ours.experts == experts_of(theirs)


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
        assert not hasattr(theirs, name) or name in ("num_experts", "num_local_experts")
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
    assert ours.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))
    assert ours.bos_token_id == theirs.bos_token_id
    for name in ("vocab_size", "max_position_embeddings", "tie_word_embeddings", "mlp_bias"):
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


def test_null_end_token_means_none() -> None:
    assert read(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size: wanted an integer from 1 to 268435456, found '64'"),
        ({"hidden_size": -3}, "hidden_size: wanted an integer from 1 to 268435456, found -3"),
        ({"hidden_size": None}, "hidden_size: wanted an integer from 1 to 268435456, found None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: wanted an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers: wanted an integer"),
        ({"vocab_size": 1.5}, "vocab_size: wanted an integer"),
        ({"hidden_size": 100}, "hidden_size: wanted a multiple of num_attention_heads=32"),
        ({"head_dim": 33}, "head_dim: wanted an even number, found 33"),
        (
            {"num_key_value_heads": 5},
            "num_key_value_heads: wanted a divisor of num_attention_heads=32, found 5",
        ),
        ({"rms_norm_eps": 0}, "rms_norm_eps: wanted a number above 0, found 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: wanted a number above 0, found nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: wanted a number above 0, found 1000"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: wanted true or false, found 1"),
        ({"hidden_act": "gelu"}, "hidden_act: wanted silu, found 'gelu'"),
        ({"dtype": "float8"}, "dtype: wanted float32, bfloat16 or float16, found 'float8'"),
        ({"eos_token_id": "2"}, "eos_token_id: wanted a token id or a list of them, found '2'"),
        ({"eos_token_id": [-1]}, "eos_token_id: wanted a token id"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: wanted none"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            f"rope_scaling.type: wanted {ROPE_TYPES}, found 'longrope'",
        ),
        (
            {"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1.0}},
            f"rope_parameters.rope_type: wanted {ROPE_TYPES}, found ['yarn']",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor: wanted a number above 0, found None",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}},
            "rope_scaling.truncate: wanted true or false, found 1",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1},
            "rope_theta: wanted other than 1 for rope_type yarn",
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "rope_scaling.high_freq_factor: wanted a number above low_freq_factor=4, found 4.0",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2},
            "head_dim: wanted above 2 for rope_type dynamic, found 2",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: wanted an integer from 1 to 1024"),
        ({"vocab_size": 10**12}, "vocab_size: wanted an integer from 1 to 268435456"),
        ({"head_dim": 1 << 20}, "head_dim: wanted an integer of at most 65536"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta: wanted a number ab"),
        (
            {"rope_parameters": {"full_attention": {}}},
            "rope_parameters.full_attention: wanted one of rope_type, type, rope_theta, factor, ",
        ),
        ({"rope_parameters": [1]}, "rope_parameters: wanted an object or null, found [1]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: wanted 1"),
    ],
)
def test_refuses_by_field_and_file(values: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        read(**values)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith(" in config.json")


REFUSED_WINDOWS = [
    (
        "Mistral",
        {"layer_types": ["full_attention"]},
        "layer_types: wanted none (the layers of this architecture are alike)",
    ),
    (
        "Mistral",
        {"sliding_window": 0},
        "sliding_window: wanted an integer from 1 to 268435456, found 0",
    ),
    ("Mistral", {"num_key_value_heads": 0}, "num_key_value_heads: wanted an integer"),
    ("Qwen2", {"use_sliding_window": 1}, "use_sliding_window: wanted true or false, found 1"),
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
    (
        "Qwen3",
        {"layer_types": [[]], "num_hidden_layers": 1},
        "layer_types: wanted full_attention or sliding_attention, found []",
    ),
    ("Qwen3", {"max_window_layers": -1}, "max_window_layers: wanted an integer from 0"),
    ("Qwen3", {"head_dim": None}, "head_dim: wanted an integer from 1 to 268435456, found None"),
]
REFUSED_EXPERTS = [
    ("Mixtral", {"num_local_experts": 0}, "num_local_experts: wanted an integer from 1 to 1024"),
    ("Mixtral", {"num_local_experts": None}, "num_local_experts: wanted an integer from 1 to 1024"),
    (
        "Mixtral",
        {"num_experts_per_tok": 9},
        "num_experts_per_tok: wanted at most the 8 experts that there are, found 9",
    ),
    (
        "Qwen3Moe",
        {"num_experts": 128, "num_local_experts": 127},
        "num_local_experts: wanted 128 like num_experts, found 127",
    ),
    ("Qwen3Moe", {"num_experts": 1 << 20}, "num_experts: wanted an integer from 1 to 1024"),
    ("Qwen3Moe", {"num_experts_per_tok": 0}, "num_experts_per_tok: wanted an integer from 1"),
    ("Qwen3Moe", {"moe_intermediate_size": "8"}, "moe_intermediate_size: wanted an integer from 1"),
    ("Qwen3Moe", {"norm_topk_prob": 1}, "norm_topk_prob: wanted true or false, found 1"),
    ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: wanted an integer from 1"),
    ("Qwen3Moe", {"mlp_only_layers": [-1]}, "mlp_only_layers: wanted a list of layers' numbers"),
    ("Qwen3Moe", {"mlp_only_layers": 3}, "mlp_only_layers: wanted a list of layers' numbers"),
    ("Qwen3Moe", {"layer_types": ["full_attention"]}, "layer_types: wanted none (the layers of"),
]


@pytest.mark.parametrize(("family", "values", "message"), REFUSED_WINDOWS + REFUSED_EXPERTS)
def test_a_familys_own_fields_are_checked(
    family: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError) as caught:
        read(architectures=[f"{family}ForCausalLM"], **values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("architectures", [None, [], ["FalconForCausalLM"], "LlamaForCausalLM"])
def test_unsupported_architecture_names_the_supported(architectures: object) -> None:
    wanted = (
        "architectures: wanted one of LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, found"
    )
    with pytest.raises(FieldError, match=wanted):
        ModelConfig.from_dict({"architectures": architectures}, "config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "config.json: wanted JSON, found 'a' named twice"),
        (None, "config.json: wanted a readable file, found No such file or directory in"),
        ("{", "config.json: wanted JSON, found"),
        ("[1]", "config.json: wanted a JSON object, found [1] in"),
        ("[" * 100_000, "config.json: wanted JSON, found"),
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
OTHERS += ["original_max_position_embeddings"]


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
