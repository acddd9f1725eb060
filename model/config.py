"""`ModelConfig`: what a checkpoint's `config.json` says about its model, checked when it is read.

The Hugging Face transformers library is not imported here. The defaults of fields that a file
leaves out are written down below, and a test compares them with the library's.

The experts of a sparse model are numbers only. How many there are is read in either spelling:
`num_experts` is what published Qwen3-MoE files say, and `num_local_experts` what Mixtral's do and
what transformers 5 writes for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.fields import LARGEST, Fields, read_json, refused, whole_number
from model.rope import DynamicRope, Rope, longest_context, read_rope

CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")

_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}

_MISTRAL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# By Hugging Face architecture name: the values of fields that its config.json leaves out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _MISTRAL
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen2ForCausalLM": _QWEN | {"head_dim": None},
    "Qwen3ForCausalLM": _QWEN | {"head_dim": 128, "attention_bias": False},
    "Qwen3MoeForCausalLM": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    },
}

# Fields that change what is computed, in ways that no family here implements.
_REFUSED_UNLESS_NULL = ("quantization_config",)

MAX_LAYERS = 1024
"""A damaged number must not build layers for minutes; published models have at most 126."""
MAX_HEAD_DIM = 1 << 16

SLIDING, FULL = "sliding_attention", "full_attention"
MAX_EXPERTS = 1024
"""A damaged number must not describe tensors for minutes; published models have at most 512."""
MAX_WHOLE_BYTES = 16 << 20
"""Files up to here are read whole."""
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096
"""Of each larger one, from its first byte to its last."""
SUFFIXES = (".json", ".jinja", ".safetensors")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model's shape and constants.

    Invariant: all sizes are positive, `head_dim` is even, `num_heads` is a multiple of
    `num_kv_heads`, and `architecture` has a family.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...]
    """Each layer's sliding window: a token attends to so many, itself the last; None: to all."""
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    experts: Experts | None
    """None for a dense model."""
    hidden_act: str
    dtype: str
    """Of the tensors in the checkpoint: one of CHECKPOINT_DTYPES."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence; empty where the checkpoint names none."""
    bos_token_id: int | None

    @property
    def longest_context(self) -> int:
        """Positions that the rotary embedding is made for; `max_position_embeddings` or more."""
        return longest_context(self.rope, self.max_position_embeddings)

    @property
    def max_prompt_len(self) -> int | None:
        """The longest prompt whose KV can be computed; None where any can. See `DynamicRope`."""
        return self.rope.original_len if isinstance(self.rope, DynamicRope) else None

    @property
    def kv_window(self) -> int | None:
        """How many of a sequence's last tokens any layer ever reads; None: all."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def has_dense_layers(self) -> bool:
        """Return whether any layer has a dense MLP."""
        return self.experts is None or not all(self.experts.is_sparse)

    def tensor_parallel_sizes(self, data_parallel_size: int = 1) -> list[int]:
        """Return how many ranks can hold the model together, with so many of them that do.

        Query heads and dense MLPs are split evenly. So are KV heads, or each lives on several
        ranks. Whole experts are spread over the ranks of all data-parallel ranks.
        """
        kv_heads = self.num_kv_heads
        num_split = self.intermediate_size if self.has_dense_layers else 0
        num_experts = 0 if self.experts is None else self.experts.num_experts
        return [
            n
            for n in range(1, self.num_heads + 1)
            if self.num_heads % n == num_split % n == 0
            and num_experts % (n * data_parallel_size) == 0
            and (kv_heads % n == 0 or n % kv_heads == 0)
        ]

    @classmethod
    def from_dir(cls, path: Path | str) -> ModelConfig:
        """Read `config.json` and, where there is one, `generation_config.json` of a checkpoint.

        Raises:
            FieldError: a file is missing, is not JSON or holds what cannot be used.
        """
        directory = Path(path)
        config_path = directory / "config.json"
        generation_path = directory / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        eos = _token_ids(generation.get("eos_token_id"), generation_path)
        return cls.from_dict(read_json(config_path), config_path, eos_token_ids=eos)

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        source: Path | str,
        *,
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> ModelConfig:
        """Return the configuration that a parsed `config.json` describes.

        Args:
            source: the file, for messages.
            eos_token_ids: end tokens that beat those of `values`; None where there are none.

        Raises:
            FieldError: names the field and the file.
        """
        architecture = _architecture(values.get("architectures"), source)
        for name in _REFUSED_UNLESS_NULL:
            if values.get(name) is not None:
                raise refused(name, "none (not built yet)", values[name], source)
        fields = Fields(values, DEFAULTS[architecture], source)
        if eos_token_ids is None:
            eos_token_ids = _token_ids(fields.value("eos_token_id"), source) or ()
        num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            divisor = f"a divisor of num_attention_heads={num_heads}"
            raise refused("num_key_value_heads", divisor, num_kv_heads, source)
        head_dim = _head_dim(fields, num_heads)
        max_positions = fields.integer("max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=read_rope(fields, max_positions, head_dim),
            max_position_embeddings=max_positions,
            layer_windows=_layer_windows(fields, num_layers),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            experts=read_experts(fields, num_layers),
            hidden_act=fields.choice("hidden_act", ("silu",)),
            dtype=_dtype(fields),
            eos_token_ids=eos_token_ids,
            bos_token_id=fields.optional_integer("bos_token_id", minimum=0),
        )


def _architecture(names: object, source: Path | str) -> str:
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name in DEFAULTS:
                return name
    raise refused("architectures", f"one of {', '.join(DEFAULTS)}", names, source)


def _head_dim(fields: Fields, num_heads: int) -> int:
    # A family whose default is a number takes no null.
    has_default = fields.defaults["head_dim"] is not None
    head_dim = fields.integer("head_dim") if has_default else fields.optional_integer("head_dim")
    if head_dim is None:
        hidden_size = fields.integer("hidden_size")
        if hidden_size % num_heads:
            multiple = f"a multiple of num_attention_heads={num_heads} (there is no head_dim)"
            raise refused("hidden_size", multiple, hidden_size, fields.source)
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        # Rotary embedding turns pairs.
        raise refused("head_dim", "an even number", head_dim, fields.source)
    most = min(MAX_HEAD_DIM, LARGEST // num_heads)
    return whole_number("head_dim", head_dim, fields.source, maximum=most)


def _layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window. A family slides where its defaults name a window."""
    if "sliding_window" not in fields.defaults:
        return (None,) * num_layers
    window = fields.optional_integer("sliding_window")
    if "use_sliding_window" in fields.defaults and not fields.flag("use_sliding_window"):
        window = None
    if "layer_types" not in fields.defaults:
        if fields.values.get("layer_types") is not None:
            wanted = "none (the layers of this architecture are alike)"
            raise refused("layer_types", wanted, fields.values["layer_types"], fields.source)
        return (window,) * num_layers
    types = _layer_types(fields, num_layers, window)
    return tuple(window if kind == SLIDING else None for kind in types)


def _layer_types(fields: Fields, num_layers: int, window: int | None) -> list[str]:
    types = fields.value("layer_types")
    first = fields.integer("max_window_layers", minimum=0)
    if types is None:
        slides = window is not None
        return [SLIDING if slides and i >= first else FULL for i in range(num_layers)]
    choices = (FULL,) if window is None else (FULL, SLIDING)
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or not all(kind in choices for kind in types):
        wanted = f"{num_layers} of {' or '.join(choices)} (sliding_window={window})"
        raise refused("layer_types", wanted, types, fields.source)
    return list(types)


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(name)
    if value is None:
        value = fields.defaults["dtype"]
    if not isinstance(value, str) or value not in CHECKPOINT_DTYPES:
        raise refused(name, " or ".join(CHECKPOINT_DTYPES), value, fields.source)
    return value


def _token_ids(value: object, source: Path | str) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and 0 <= token_id <= LARGEST for token_id in ids):
        raise refused("eos_token_id", "a token id or a list of them", value, source)
    return tuple(ids)


_SPELLINGS = ("num_experts", "num_local_experts")


@dataclass(frozen=True)
class Experts:
    """What the sparse layers of a model have in common.

    Invariant: `num_experts_per_tok` is at most `num_experts`; `is_sparse` has an entry for each
    layer, and at least one of them is set.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Of each expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to the sum 1."""
    is_sparse: tuple[bool, ...]
    """For each layer, whether it has experts; the others have one dense MLP."""


def read_experts(fields: Fields, num_layers: int) -> Experts | None:
    """Return the experts that the fields describe; None for a dense model.

    Raises:
        FieldError: names the field.
    """
    if "num_experts_per_tok" not in fields.defaults:
        return None
    is_sparse = _sparse_layers(fields, num_layers)
    num_experts = _num_experts(fields)
    num_per_token = fields.integer("num_experts_per_tok")
    if num_per_token > num_experts:
        wanted = f"at most the {num_experts} experts that there are"
        raise refused("num_experts_per_tok", wanted, num_per_token, fields.source)
    has_own_size = "moe_intermediate_size" in fields.defaults
    experts = Experts(
        num_experts=num_experts,
        num_experts_per_tok=num_per_token,
        intermediate_size=fields.integer(
            "moe_intermediate_size" if has_own_size else "intermediate_size"
        ),
        # Mixtral has no such field: it always scales.
        norm_topk_prob="norm_topk_prob" not in fields.defaults or fields.flag("norm_topk_prob"),
        is_sparse=is_sparse,
    )
    return experts if any(is_sparse) else None


def _num_experts(fields: Fields) -> int:
    default = next(name for name in _SPELLINGS if name in fields.defaults)
    named = [name for name in _SPELLINGS if name in fields.values] or [default]
    counts = [
        whole_number(
            name, fields.values.get(name, fields.defaults.get(name)), fields.source, 1, MAX_EXPERTS
        )
        for name in named
    ]
    if counts[-1] != counts[0]:
        raise refused(named[-1], f"{counts[0]} like {named[0]}", counts[-1], fields.source)
    return counts[0]


def _sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every `decoder_sparse_step`-th, but for those named."""
    if "decoder_sparse_step" not in fields.defaults:
        return (True,) * num_layers
    step = fields.integer("decoder_sparse_step")
    dense = fields.value("mlp_only_layers")
    dense = [] if dense is None else dense
    is_list = isinstance(dense, list)
    if not is_list or not all(type(layer) is int and layer >= 0 for layer in dense):
        wanted = "a list of layers' numbers from 0, or null"
        raise refused("mlp_only_layers", wanted, dense, fields.source)
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def fingerprint(checkpoint_dir: Path) -> bytes:
    """Return a digest of a checkpoint: equal for copies, another one for another model.

    It covers configuration, tokenizer and weights. Weights are sampled: two that were trained on
    from the same model differ in nearly all of their numbers; a change of a few is not noticed.
    """
    digest = hashlib.sha256()
    for path in sorted(checkpoint_dir.iterdir()):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            if size <= MAX_WHOLE_BYTES:
                digest.update(file.read())
                continue
            for i in range(NUM_SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
