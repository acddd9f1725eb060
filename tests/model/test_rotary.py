"""Rotary embedding in every scaling, bit for bit as transformers computes it."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model.config import ModelConfig
from model.kernels.elementwise import rotate
from model.layers.rotary import RotaryEmbedding, inverse_frequencies
from model.rope import DynamicRope, RopeType, YarnRope

ROPE_TYPES = get_args(RopeType)
SCALINGS = [kind for kind in ROPE_TYPES if kind != "default"]


def draw_scaling(kind: str, rng: random.Random) -> dict[str, Any]:
    """Return random parameters of a kind; those that may be left out sometimes are."""
    values: dict[str, Any] = {
        "rope_type": kind,
        "factor": rng.choice([1.0, 2.0, 3.7, 8.0, 32.0]),
        "rope_theta": rng.choice([100.0, 10000.0, 500000.0, 1234567.0]),
    }
    if kind in ("llama3", "yarn") and rng.random() < 0.8:
        values["original_max_position_embeddings"] = rng.choice([16, 100, 2048, 8192])
    if kind == "llama3":
        low = rng.choice([0.5, 1.0, 2.0])
        values |= {"low_freq_factor": low, "high_freq_factor": low * rng.choice([1.5, 4.0])}
    optional = {
        "attention_factor": rng.choice([0.7, 1.5]),
        "beta_fast": rng.choice([0, 4.0, 32, 64.0]),
        "beta_slow": rng.choice([0.25, 1, 2.0]),
        "mscale": rng.choice([0, 0.707, 1.0]),
        "mscale_all_dim": rng.choice([0.5, 1.0]),
        "truncate": rng.choice([True, False]),
    }
    if kind == "yarn":
        values |= {key: value for key, value in optional.items() if rng.random() < 0.5}
        if rng.random() < 0.1:
            values["factor"] = None
    return values


def draw_fields(kind: str, seed: int) -> dict[str, Any]:
    """Return random config.json fields with a scaling, in one of the two spellings."""
    rng = random.Random(f"{kind} {seed}")
    scaling = draw_scaling(kind, rng)
    fields: dict[str, Any] = {
        "head_dim": rng.choice([4, 16, 20, 64, 128]),
        "max_position_embeddings": rng.choice([64, 4096, 131072]),
    }
    if rng.random() < 0.2 and kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = 48
    if rng.random() < 0.5:
        return fields | {"rope_parameters": scaling}
    scaling["type"] = scaling.pop("rope_type")
    return fields | {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}


def both(fields: dict[str, Any]) -> tuple[ModelConfig, transformers.LlamaConfig]:
    ours = ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"]} | fields, "config.json")
    return ours, transformers.LlamaConfig(**fields)


@pytest.mark.feature("S05")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_transformers(kind: str, seed: int) -> None:
    ours, theirs = both(draw_fields(kind, seed))
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    assert torch.equal(inverse_frequencies(ours.rope, ours.head_dim), inv_freq)
    if isinstance(ours.rope, YarnRope):
        assert ours.rope.attention_factor == attention_factor
    else:
        assert attention_factor == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_cosines_and_sines_are_transformers(kind: str, seed: int) -> None:
    ours, theirs = both(draw_fields(kind, seed))
    last = ours.max_position_embeddings if kind == "dynamic" else 200_000
    positions = torch.randint(0, last, (50,), generator=torch.Generator().manual_seed(seed))
    positions[0] = last - 1
    rope = RotaryEmbedding(ours.rope, ours.head_dim, device=torch.device("cpu"))
    cos, sin = rope(positions, torch.float32)
    wanted = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    for found, whole in zip((cos, sin), wanted, strict=True):
        assert torch.equal(found[:, 0], whole[0, :, : ours.head_dim // 2])


@pytest.mark.parametrize("seed", range(10))
def test_dynamic_angles_are_those_of_a_token_that_is_generated_there(seed: int) -> None:
    ours, theirs = both(draw_fields("dynamic", seed))
    assert isinstance(ours.rope, DynamicRope)
    length = ours.rope.original_len
    rope = RotaryEmbedding(ours.rope, ours.head_dim, device=torch.device("cpu"))
    positions = torch.arange(length - 2, length + 60)
    cos, sin = rope(positions, torch.float32)
    oracle = LlamaRotaryEmbedding(theirs)
    for i, position in enumerate(positions):
        wanted_cos, wanted_sin = oracle(torch.zeros(1), position[None, None])
        half = ours.head_dim // 2
        # One base at a time and many at once round alike but for the last bit of a power.
        torch.testing.assert_close(cos[i, 0], wanted_cos[0, 0, :half], atol=2e-5, rtol=0)
        torch.testing.assert_close(sin[i, 0], wanted_sin[0, 0, :half], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        ({"rope_type": "default"}, 100),
        ({"rope_type": "linear", "factor": 3.0}, 300),
        ({"rope_type": "dynamic", "factor": 2.5}, 250),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}, 100),
        ({"rope_type": "linear", "factor": 1e300}, 1 << 28),
    ],
)
def test_longest_context_counts_the_scaling_once(scaling: dict[str, Any], wanted: int) -> None:
    ours, _ = both({"max_position_embeddings": 100, "rope_parameters": scaling})
    assert ours.longest_context == wanted
    assert ours.max_prompt_len == (100 if scaling["rope_type"] == "dynamic" else None)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    angles = torch.randn(3, 1, 4, dtype=torch.float64)
    turned = rotate(x, angles.cos(), angles.sin())
    wanted = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat((wanted.real, wanted.imag), dim=-1))
