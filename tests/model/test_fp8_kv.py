"""An FP8 KV cache: a checkpoint's scales, and a model that computes with what the cache holds."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_cache import Fp8Cache
from quantizer import KV_SCHEME
from safetensors.torch import load_file, save_file

from compile.errors import FieldError
from model.config import ModelConfig
from model.kernels.paged_attention import FP8
from model.parallel import Shard
from model.weights import load_model

pytestmark = pytest.mark.feature("S09")

Tensors = dict[str, torch.Tensor]
SCALES = {0: (0.25, 0.011), 1: (0.031, 3.0)}
"""Of keys and of values, by layer: some cut off what is large, some leave a few coarse steps."""
NUM_KV_HEADS = 2
SPELLINGS = {
    "vLLM's": ("self_attn.k_scale", "self_attn.v_scale"),
    "of projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "of attention": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "of projections' outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "of the fused projection": ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
}


@pytest.fixture
def copy(make_checkpoint: Any, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the small checkpoint with other tensors or configuration."""

    def copy(add: Tensors, **config: Any) -> Path:
        source, _ = make_checkpoint(**config.pop("shape", {}))
        path = tmp_path / "checkpoint"
        shutil.copytree(source, path)
        weights = path / "model.safetensors"
        save_file(load_file(weights) | add, weights, metadata={"format": "pt"})
        values = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(values | config))
        return path

    return copy


def scales(spelling: str = "vLLM's", shape: tuple[int, ...] = ()) -> Tensors:
    """Return tensors of all layers' scales."""
    names = SPELLINGS[spelling]
    return {
        f"model.layers.{layer}.{name}": torch.full(shape, value)
        for layer, values in SCALES.items()
        for name, value in zip(names, values, strict=True)
    }


def scales_by_head(shape: tuple[int, ...] = (-1,)) -> Tensors:
    """Return tensors of all layers' scales, each head's twice as large as the last one's."""
    heads = 2.0 ** torch.arange(NUM_KV_HEADS)
    return {name: (value * heads).view(shape) for name, value in scales().items()}


def load(path: Path, *, has_fp8_kv: bool = True, shard: Shard | None = None) -> Any:
    given: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    return load_model(path, has_fp8_kv=has_fp8_kv, shard=shard or Shard(), **given)[0]


def scales_of(model: Any) -> list[list[list[float]]]:
    """Return by layer those of keys and of values, by head."""
    return [layer.kv_scales.tolist() for layer in model.attention_layers().values()]


def of_all_heads(values: Sequence[float], num_heads: int = 2) -> list[Any]:
    return [pytest.approx([value] * num_heads) for value in values]


def refusal(path: Path) -> str:
    with pytest.raises(FieldError) as caught:
        load(path)
    return str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_are_read_in_every_spelling(
    spelling: str, shape: tuple[int, ...], copy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = scales_of(load(copy(scales(spelling, shape))))
    assert found == [of_all_heads(each) for each in SCALES.values()]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1, 1)])
def test_each_rank_reads_the_scales_of_its_heads(
    shape: tuple[int, ...], ranks: int, copy: Any
) -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": NUM_KV_HEADS, "head_dim": 10}
    path = copy(scales_by_head(shape), shape=config)
    for rank in range(ranks):
        count = max(NUM_KV_HEADS // ranks, 1)
        first = rank * NUM_KV_HEADS // ranks
        own = [2.0**head for head in range(first, first + count)]
        for layer, values in zip(
            scales_of(load(path, shard=Shard(rank, ranks))), SCALES.values(), strict=True
        ):
            wanted = [pytest.approx([value * times for times in own]) for value in values]
            assert layer == wanted


def test_without_scales_they_are_1_and_one_line_says_so(
    copy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    q_scale = {"model.layers.0.self_attn.q_scale": torch.tensor(0.5)}
    assert scales_of(load(copy(q_scale))) == [of_all_heads([1.0, 1.0])] * 2
    [record] = [record for record in caplog.records if "FP8 KV" in record.message]
    assert record.levelno == logging.WARNING and "found none; 1 in their place" in record.message


def test_scales_are_passed_over_with_one_line_where_kv_is_not_fp8(
    copy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    broken = {name: torch.full((2,), torch.nan) for name in scales()}
    model = load(copy(broken), has_fp8_kv=False)
    assert [layer.kv_scales for layer in model.attention_layers().values()] == [None] * 2
    assert len([r for r in caplog.records if "FP8 KV are passed over" in r.message]) == 1


K_SCALE = "model.layers.1.self_attn.k_scale"
DAMAGES: list[tuple[dict[str, torch.Tensor | None], str, str]] = [
    ({K_SCALE: None}, K_SCALE, "wanted in the checkpoint, found none"),
    ({K_SCALE: torch.ones(3)}, K_SCALE, "wanted one number, or one for each of 2 KV heads, found"),
    ({K_SCALE: torch.tensor([1.0, -2])}, K_SCALE, "wanted numbers above 0, found -2.0"),
    ({K_SCALE: torch.tensor(1)}, K_SCALE, "wanted one of F64, F32, F16, BF16, found 'I64'"),
    ({K_SCALE: torch.tensor(0.0)}, K_SCALE, "wanted a number above 0, found 0.0"),
    ({K_SCALE: torch.tensor(-1.0)}, K_SCALE, "wanted a number above 0, found -1.0"),
    ({K_SCALE: torch.tensor(torch.nan)}, K_SCALE, "wanted a number above 0, found nan"),
    ({K_SCALE: torch.tensor(torch.inf)}, K_SCALE, "wanted a number above 0, found inf"),
    (
        {"model.layers.2.self_attn.k_scale": torch.tensor(1.0)},
        "model.layers.2.self_attn.k_scale",
        "wanted one scale for the keys of a layer and one for its values, found another",
    ),
    (
        {"model.layers.1.self_attn.k_proj.k_scale": torch.tensor(1.0)},
        "model.layers.1.self_attn.k_",
        "wanted one scale for the keys of a layer and one for its values, found another",
    ),
]


@pytest.mark.parametrize(("change", "name", "message"), DAMAGES)
def test_scales_that_cannot_be_used_are_refused_by_name(
    change: dict[str, torch.Tensor | None], name: str, message: str, copy: Any
) -> None:
    tensors = {n: t for n, t in (scales() | change).items() if t is not None}
    found = refusal(copy(tensors))
    assert found.startswith(f"tensor {name}") and message in found
    assert re.search(r" in .*checkpoint", found)


def test_a_zero_point_beside_scales_is_refused(copy: Any) -> None:
    name = "model.layers.0.self_attn.k_zero_point"
    assert "only tensors of LlamaForCausalLM" in refusal(copy({name: torch.tensor(1.0)}))


@pytest.mark.parametrize(("weights", "strategy"), [({}, "tensor"), (None, "attn_head")])
def test_a_scheme_for_kv_alone_leaves_weights_plain(weights: Any, strategy: str, copy: Any) -> None:
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": weights}
    scheme = {**KV_SCHEME, "strategy": strategy}
    path = copy(scales(), quantization_config={**config, "kv_cache_scheme": scheme})
    found = ModelConfig.from_dir(path)
    assert found.has_fp8_kv and found.quantization is None
    assert scales_of(load(path))[1] == of_all_heads(SCALES[1])


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "window": ("Mistral", {"sliding_window": 9}),
    "head norms": ("Qwen3", {"head_dim": 20}),
    "experts": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}


@pytest.mark.parametrize("kind", ["without scales", "scales", "scales by head"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_transformers_on_a_cache_of_what_e4m3_holds(
    shape: str, kind: str, make_checkpoint: Any, paged: Any, tmp_path: Path
) -> None:
    """Chunks of prompts and decodes beside one another, in blocks that others have used."""
    family, fields = SHAPES[shape]
    source, reference = make_checkpoint(family=family, **fields)
    path = tmp_path / "checkpoint"
    shutil.copytree(source, path)
    of_cache: Any = None
    if kind != "without scales":
        stored = scales() if kind == "scales" else scales_by_head()
        weights = path / "model.safetensors"
        save_file(load_file(weights) | stored, weights, metadata={"format": "pt"})
        of_all = [scale.view(-1, 1, 1) for scale in stored.values()]
        of_cache = dict(enumerate(zip(of_all[::2], of_all[1::2], strict=True)))
    runner = paged(load(path), dtype=FP8)
    assert runner.pool.dtype == FP8
    prompts = {name: torch.randint(0, 509, (n,)) for name, n in (("a", 37), ("b", 11), ("c", 20))}
    splits = {"a": [13, 1, 20, 1, 1, 1], "b": [8, 1, 0, 1, 1], "c": [0, 0, 18, 1, 1]}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    for i in range(6):
        parts = {name: sizes[i] for name, sizes in splits.items() if i < len(sizes) and sizes[i]}
        chunks = {}
        for name, size in parts.items():
            start = sum(splits[name][:i])
            chunks[name] = prompts[name][start : start + size]
        for name, logits in runner.step(chunks, num_padding_tokens=2).items():
            if name in found:
                found[name].append(logits)
    assert not runner.pool[0].view(torch.uint8).any(), "the scratch block is not zero"
    for name, prompt in prompts.items():
        cache = Fp8Cache(of_cache)
        with torch.inference_mode():
            wanted = reference(prompt[None], None, None, cache).logits[0]
            plain = reference(prompt[None]).logits[0]
        # Another order of summation may tip a number over to the next one, which few logits show.
        error, effect = (torch.cat(found[name]) - wanted).abs(), (plain - wanted).abs()
        assert error.mean() < 0.01 * effect.mean()
        assert effect.max() > 0.02, "the cache changes nothing"
