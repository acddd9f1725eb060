"""`ModelConfig`: what a checkpoint's `config.json` says about its model, checked when it is read.

The file's fields are declared here once, with their bounds; the values of those that it leaves out
are the architecture's (`model.families`). How many experts there are is read in each spelling:
`num_experts`, as published Qwen3-MoE files have it, Mixtral's `num_local_experts`, and DeepSeek's
`n_routed_experts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from compile.errors import FieldError
from model.families import FAMILIES, Family
from model.fields import Source, convert, says, words_for
from model.files import read_json, refused
from model.quantization import Quantization, read_quantization
from model.rope import (
    LARGEST,
    DynamicRope,
    Positive,
    Rope,
    RopeParameters,
    Size,
    WholeHead,
    longest_context,
    read_rope,
    score_factor,
)

MAX_LAYERS = 1024
"""A damaged number must not build layers for minutes; published models have at most 126."""
MAX_HEAD_DIM = 1 << 16
MAX_EXPERTS = 1024
"""A damaged number must not describe tensors for minutes; published models have at most 512."""
MAX_WHOLE_BYTES = 16 << 20
"""Files up to here are read whole."""
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096
"""Of each larger one, from its first byte to its last."""
SUFFIXES = (".json", ".jinja", ".safetensors")

CheckpointDtype = Literal["float32", "bfloat16", "float16"]
LayerType = Literal["full_attention", "sliding_attention"]
_TOKENS, _LAYERS = says("a token id or a list of them"), says("a list of layers' numbers, or null")
_TokenId = Annotated[int, Meta(ge=0, le=LARGEST), _TOKENS]
_EndTokens = Annotated[_TokenId | list[_TokenId] | None, _TOKENS]
_Layers = Annotated[list[Annotated[int, Meta(ge=0), _LAYERS]] | None, _LAYERS]
_Parameters = Annotated[RopeParameters | None, says("an object or null")]
_EveryLayer = Annotated[int, Meta(ge=1, le=1), says("1 (every layer behind the dense ones)")]


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that a model has as its `config.json` has them."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)] = field(name="num_hidden_layers")
    num_heads: Size = field(name="num_attention_heads")
    rms_norm_eps: Positive
    max_position_embeddings: Size
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["silu"]
    bos_token_id: Annotated[int, Meta(ge=0, le=LARGEST)] | None
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)] = 0
    """Layers that a checkpoint may hold behind the model's, to predict further tokens. One can be
    used for drafts."""


class _File(_Kept, frozen=True, kw_only=True):
    """A `config.json`. Fields that a family does not have are ignored."""

    num_key_value_heads: Size | None
    head_dim: Size | None
    eos_token_id: _EndTokens
    dtype: CheckpointDtype | None = None
    torch_dtype: CheckpointDtype | None = None
    quantization_config: Annotated[dict[str, Any] | None, says("an object or null")] = None
    # Rotary positions.
    rope_theta: Positive
    rope_parameters: _Parameters = None
    rope_scaling: _Parameters = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: WholeHead | None = None
    # Sliding windows.
    sliding_window: Size | None = None
    use_sliding_window: bool = True
    max_window_layers: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    layer_types: list[LayerType] | None = None
    # Experts.
    num_experts: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] = 1
    num_local_experts: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] = 1
    num_experts_per_tok: Size = 1
    moe_intermediate_size: Size | UnsetType = UNSET
    norm_topk_prob: bool = True
    decoder_sparse_step: Size = 1
    mlp_only_layers: _Layers = None
    # Experts in groups, and those that every token goes through.
    n_routed_experts: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] = 1
    n_shared_experts: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] = 1
    n_group: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] | None = None
    topk_group: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] | None = None
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] | None = None
    scoring_func: Literal["softmax", "sigmoid"] | None = None
    routed_scaling_factor: Positive = 1.0
    first_k_dense_replace: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    moe_layer_freq: _EveryLayer | None = None
    # Latent attention.
    q_lora_rank: Size | None = None
    kv_lora_rank: Size = 1
    qk_nope_head_dim: Size = 1
    qk_rope_head_dim: Size = 1
    v_head_dim: Size = 1
    rope_interleave: bool = True


class _Generation(msgspec.Struct):
    eos_token_id: _EndTokens = None


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PARTICULAR = {name for family in FAMILIES.values() for name in family.defaults}
_COMMON = set(_File.__struct_encode_fields__) - _PARTICULAR


@dataclass(frozen=True)
class Experts:
    """What the sparse layers of a model have in common. Invariant: `num_experts_per_tok` is at most
    `num_experts`, and at least one layer of `is_sparse` is set."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to the sum 1."""
    is_sparse: tuple[bool, ...]
    """For each layer, whether it has experts; the others have one dense MLP."""
    shared_size: int = 0
    """Intermediate size of an MLP that every token goes through beside its experts; 0: none."""
    has_sigmoid_scores: bool = False
    """Scores are sigmoids, to which each expert's bias is added where it is chosen, and a group is
    as good as its two best together; else scores are a softmax, and a group is as good as its
    best."""
    num_groups: int = 1
    """Of equally many experts, neighbours. Invariant: a token's experts fit into its groups."""
    num_groups_per_tok: int = 1
    scaling: float = 1.0
    """Of the weights, in the end."""
    has_float32_router: bool = False
    """Tokens are scored in float32, whatever the model's dtype is."""


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2; DeepSeek-AI, 2024)."""

    q_rank: int | None
    """Of the latent that queries are made of; None: they are made of the hidden state."""
    kv_rank: int
    nope_dim: int
    """Of a head's query and key: the part without positions. `head_dim` is that with them."""
    rope_dim: int
    v_dim: int
    is_interleaved: bool
    """The pairs that are rotated are neighbours; else they are half of `rope_dim` apart."""
    scale: float
    """Of scores, the factor of the scaling of positions included."""


class ModelConfig(_Kept, frozen=True, kw_only=True):
    """A decoder-only model's shape and constants. Invariant: all sizes are positive, `head_dim` is
    even, `num_heads` is a multiple of `num_kv_heads`, and `architecture` has a family."""

    architecture: str
    num_kv_heads: int
    head_dim: int
    rope: Rope
    layer_windows: tuple[int | None, ...]
    """Each layer's sliding window: a token attends to so many, itself the last; None: to all."""
    experts: Experts | None
    latent: Latent | None
    """Sizes of attention where keys and values are made of latents; None: they are projected."""
    dtype: CheckpointDtype
    """Of the plain tensors in the checkpoint."""
    quantization: Quantization | None
    """How linear weights are stored; None where they are plain tensors too."""
    has_fp8_kv: bool = False
    """Whether the checkpoint is made for a KV cache of FP8."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence; empty where the checkpoint names none."""

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
    def attention_width(self) -> int:
        """Numbers of a token's widest tensor in attention, all heads together."""
        if self.latent is None:
            return self.num_heads * self.head_dim
        latent = self.latent
        head = max(latent.nope_dim + max(latent.rope_dim, latent.v_dim), latent.kv_rank)
        return self.num_heads * (head + latent.rope_dim)

    def tensor_parallel_sizes(self, data_parallel_size: int = 1) -> list[int]:
        """Return how many ranks can hold the model together, with so many of them that do."""
        kv_heads = self.num_kv_heads
        is_dense = self.experts is None or not all(self.experts.is_sparse)
        num_split = self.intermediate_size if is_dense else 0
        num_experts = 0 if self.experts is None else self.experts.num_experts
        num_shared = 0 if self.experts is None else self.experts.shared_size
        return [
            n
            for n in range(1, self.num_heads + 1)
            if self.num_heads % n == num_split % n == num_shared % n == 0
            and num_experts % (n * data_parallel_size) == 0
            and (kv_heads % n == 0 or n % kv_heads == 0)
        ]

    @classmethod
    def from_dir(cls, path: Path | str) -> ModelConfig:
        """Read `config.json` and, where there is one, `generation_config.json` of a checkpoint; a
        FieldError if one is missing, is not JSON or holds what cannot be used."""
        directory = Path(path)
        config_path = directory / "config.json"
        generation_path = directory / "generation_config.json"
        eos = None
        if generation_path.exists():
            with _named(generation_path):
                generation = convert(read_json(generation_path), _Generation, Source.PYTHON)
            eos = generation.eos_token_id
        return cls.from_dict(read_json(config_path), config_path, eos_token_id=eos)

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        source: Path | str,
        *,
        eos_token_id: int | list[int] | None = None,
    ) -> ModelConfig:
        """Return the configuration that a parsed `config.json` describes; `source` is the file, for
        messages, and `eos_token_id` beats that of `values`."""
        with _named(source):
            architecture = _architecture(values.get("architectures"))
            family = FAMILIES[architecture]
            defaults = family.defaults
            given = {n: v for n, v in values.items() if n in defaults or n in _COMMON}
            file = convert({**defaults, **given}, _File, Source.PYTHON)
            num_kv_heads = file.num_key_value_heads or file.num_heads
            if file.num_heads % num_kv_heads:
                divisor = f"a divisor of num_attention_heads={file.num_heads}"
                raise FieldError("num_key_value_heads", divisor, num_kv_heads)
            latent = _latent(file, num_kv_heads) if family.has_latent_attention else None
            head_dim = _head_dim(file, defaults) if latent is None else latent.rope_dim
            rope = _rope(file, head_dim)
            eos = file.eos_token_id if eos_token_id is None else eos_token_id
            quantization, has_fp8_kv = None, False
            if file.quantization_config is not None:
                quantization, has_fp8_kv = read_quantization(file.quantization_config)
            return cls(
                **{name: getattr(file, name) for name in _Kept.__struct_fields__},
                architecture=architecture,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rope=rope,
                layer_windows=_layer_windows(file, defaults, values.get("layer_types")),
                experts=None if family.expert_names is None else _experts(file, family, given),
                latent=latent,
                dtype=file.dtype or file.torch_dtype or "float32",
                quantization=quantization,
                has_fp8_kv=has_fp8_kv,
                eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
            )


@contextmanager
def _named(source: Path | str) -> Iterator[None]:
    try:
        yield
    except FieldError as error:
        raise refused(error.field, error.wanted, error.found, source) from error
    except UnicodeEncodeError as error:  # JSON may hold half of a surrogate pair
        raise refused("text", "Unicode", error.object, source) from error


def _architecture(names: object) -> str:
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name in FAMILIES:
                return name
    raise FieldError("architectures", f"one of {', '.join(FAMILIES)}", names)


def _head_dim(file: _File, defaults: Mapping[str, Any]) -> int:
    head_dim = file.head_dim
    if head_dim is None and defaults["head_dim"] is not None:
        raise FieldError("head_dim", words_for(Size), None)
    if head_dim is None:
        if file.hidden_size % file.num_heads:
            multiple = f"a multiple of num_attention_heads={file.num_heads} (there is no head_dim)"
            raise FieldError("hidden_size", multiple, file.hidden_size)
        head_dim = file.hidden_size // file.num_heads
    if head_dim % 2:
        # Rotary embedding rotates pairs.
        raise FieldError("head_dim", "an even number", head_dim)
    if head_dim > (most := min(MAX_HEAD_DIM, LARGEST // file.num_heads)):
        raise FieldError("head_dim", f"an integer of at most {most}", head_dim)
    return head_dim


def _rope_parameters(file: _File) -> tuple[RopeParameters, str]:
    """Return what a file says of positions, in its spelling, and what it calls that."""
    is_older = file.rope_scaling not in (None, RopeParameters())
    given = (file.rope_scaling if is_older else file.rope_parameters) or RopeParameters()
    return given, "rope_scaling" if is_older else "rope_parameters"


def _rope(file: _File, head_dim: int) -> Rope:
    given, name = _rope_parameters(file)
    return read_rope(
        given,
        name,
        theta=file.rope_theta,
        max_position_embeddings=file.max_position_embeddings,
        original_len=file.original_max_position_embeddings,
        head_dim=head_dim,
    )


def _latent(file: _File, num_kv_heads: int) -> Latent:
    if num_kv_heads != file.num_heads:
        wanted = f"num_attention_heads={file.num_heads} (all heads have one latent)"
        raise FieldError("num_key_value_heads", wanted, num_kv_heads)
    nope, rope_dim = file.qk_nope_head_dim, file.qk_rope_head_dim
    if rope_dim % 2:
        raise FieldError("qk_rope_head_dim", "an even number", rope_dim)
    most = min(MAX_HEAD_DIM, LARGEST // (2 * file.num_heads))
    for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"):
        if (size := getattr(file, name)) > most:
            raise FieldError(name, f"an integer of at most {most}", size)
    given, _ = _rope_parameters(file)
    return Latent(
        q_rank=file.q_lora_rank,
        kv_rank=file.kv_lora_rank,
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=file.v_head_dim,
        is_interleaved=file.rope_interleave,
        scale=(nope + rope_dim) ** -0.5 * score_factor(given, _rope(file, rope_dim)),
    )


def _layer_windows(
    file: _File, defaults: Mapping[str, Any], given_types: object
) -> tuple[int | None, ...]:
    window, types = file.sliding_window if file.use_sliding_window else None, file.layer_types
    if "sliding_window" in defaults and "layer_types" not in defaults and given_types is not None:
        wanted = "none (the layers of this architecture are alike)"
        raise FieldError("layer_types", wanted, given_types)
    if types is None:
        return tuple(
            window if i >= file.max_window_layers else None for i in range(file.num_layers)
        )
    choices = get_args(LayerType) if window else ("full_attention",)
    if len(types) != file.num_layers or not set(types) <= set(choices):
        wanted = f"{file.num_layers} of {' or '.join(choices)} (sliding_window={window})"
        raise FieldError("layer_types", wanted, types)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _experts(file: _File, family: Family, given: Mapping[str, Any]) -> Experts | None:
    """Return the experts of a sparse family's model; None where no layer has some."""
    known = [name for name in _EXPERT_COUNTS if name in family.defaults]
    first, *others = [name for name in known if name in given] or known
    num_experts: int = getattr(file, first)
    for other in others:
        if getattr(file, other) != num_experts:
            wanted = f"{num_experts} like {first}"
            raise FieldError(other, wanted, getattr(file, other))
    if file.num_experts_per_tok > num_experts:
        wanted = f"at most the {num_experts} experts that there are"
        raise FieldError("num_experts_per_tok", wanted, file.num_experts_per_tok)
    dense, step = file.mlp_only_layers or [], file.decoder_sparse_step
    first_sparse = file.first_k_dense_replace
    is_sparse = tuple(
        i >= first_sparse and i not in dense and (i + 1) % step == 0 for i in range(file.num_layers)
    )
    experts = Experts(
        num_experts=num_experts,
        num_experts_per_tok=file.num_experts_per_tok,
        intermediate_size=file.moe_intermediate_size or file.intermediate_size,
        norm_topk_prob=file.norm_topk_prob,
        is_sparse=is_sparse,
    )
    if family.grouped_scores is not None:
        experts = _grouped(file, family.grouped_scores, experts)
    return experts if any(is_sparse) else None


def _grouped(file: _File, scores: str, experts: Experts) -> Experts:
    """Return experts that are chosen as DeepSeek's families do, and the shared ones."""
    is_sigmoid = scores == "sigmoid"
    methods = ("noaux_tc", None) if is_sigmoid else ("greedy", "group_limited_greedy")
    if file.topk_method not in methods:
        wanted = " or ".join(method for method in methods if method)
        raise FieldError("topk_method", wanted, file.topk_method)
    if file.scoring_func not in (scores, None):
        raise FieldError("scoring_func", scores, file.scoring_func)
    num_groups = chosen = 1
    if file.topk_method != "greedy":
        num_groups, chosen = _groups(file, experts.num_experts, 2 if is_sigmoid else 1)
    room = experts.num_experts // num_groups * chosen
    if experts.num_experts_per_tok > room:
        wanted = f"at most the {room} experts of {chosen} groups"
        raise FieldError("num_experts_per_tok", wanted, experts.num_experts_per_tok)
    return replace(
        experts,
        # A softmax is never normalised again, whatever the file says.
        norm_topk_prob=is_sigmoid and experts.norm_topk_prob,
        shared_size=experts.intermediate_size * file.n_shared_experts,
        has_sigmoid_scores=is_sigmoid,
        num_groups=num_groups,
        num_groups_per_tok=chosen,
        scaling=file.routed_scaling_factor,
        has_float32_router=True,
    )


def _groups(file: _File, num_experts: int, least: int) -> tuple[int, int]:
    """Return how many groups of at least so many experts there are, and how many a token has."""
    num_groups, chosen = file.n_group, file.topk_group
    if num_groups is None or num_experts % num_groups or num_experts // num_groups < least:
        wanted = f"a divisor of n_routed_experts={num_experts}"
        wanted += f" that leaves {least} or more to a group" if least > 1 else ""
        raise FieldError("n_group", wanted, num_groups)
    if chosen is None or chosen > num_groups:
        raise FieldError("topk_group", f"at most n_group={num_groups}", chosen)
    return num_groups, chosen


KV_AXES = ("layers", "kv", "block", "heads", "dim")
"""Of a block, outermost first; keys, then values."""


def fingerprint(checkpoint_dir: Path) -> bytes:
    """Return a digest of a checkpoint's configuration, tokenizer and weights: equal for copies.
    Weights are sampled: a change of a few numbers is not noticed."""
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
