"""The experts of a sparse model as a configuration describes them.

These are numbers only, checked when they are read. How many experts there are is read in either
spelling: `num_experts` is what published Qwen3-MoE files say, and `num_local_experts` what
Mixtral's do and what transformers 5 writes for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.fields import Fields, ModelError, whole_number

MAX_EXPERTS = 1024
"""A damaged number must not describe tensors for minutes; published models have at most 512."""
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
        ModelError: names the field.
    """
    if "num_experts_per_tok" not in fields.defaults:
        return None
    is_sparse = _sparse_layers(fields, num_layers)
    num_experts = _num_experts(fields)
    num_per_token = fields.integer("num_experts_per_tok")
    if num_per_token > num_experts:
        wanted = f"at most the {num_experts} experts that there are"
        raise ModelError.of("num_experts_per_tok", wanted, num_per_token, fields.source)
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
        raise ModelError.of(named[-1], f"{counts[0]} like {named[0]}", counts[-1], fields.source)
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
        raise ModelError.of("mlp_only_layers", wanted, dense, fields.source)
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
