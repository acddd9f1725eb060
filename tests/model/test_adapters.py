"""LoRA adapters: what is read of them, what they add, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import LINEAR, matrices_of, write_adapter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compile.errors import FieldError
from model.adapters import ModelAdapters, load_adapters, traced_layout
from model.config import fingerprint
from model.kernels.adapters import add_adapters
from model.layers.linear import Linear
from model.lora_config import LoraConfig

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SECOND = FIRST.replace("lora_A", "lora_B")
Made = tuple[Path, Path, Any]


@pytest.fixture
def made(make_checkpoint: Callable[..., Any], tmp_path: Path) -> Made:
    """A checkpoint, an adapter of all its linear layers, and transformers' model of it."""
    path, model = make_checkpoint()
    write_adapter(tmp_path / "a", matrices_of(model, LINEAR, {}, 4, 1), r=4, lora_alpha=8)
    return path, tmp_path / "a", model


def with_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def configured(path: Path, **fields: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.feature("S10")
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"use_dora": True}, "use_dora: wanted False or None, found True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: wanted None or [], found ['lm_head']"),
        ({"bias": "all"}, "bias: wanted 'none', found 'all'"),
        ({"lora_bias": True}, "lora_bias: wanted False"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: wanted None"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters: wanted None or []"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: wanted True or False or None or 'gau"),
        ({"peft_type": "LOHA"}, "peft_type: wanted LORA, found 'LOHA'"),
        ({"r": 513}, "r: wanted a rank from 1 to 512, found 513"),
        ({"r": 0}, "r: wanted a rank from 1 to 512, found 0"),
        ({"rank_pattern": {"q_proj": 600}}, "rank_pattern: wanted a rank from 1 to 512, found 600"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: wanted regular expressions, found '('"),
        ({"lora_alpha": "much"}, "lora_alpha: wanted float, found 'much'"),
        ({"target_modules": ["lm_head"]}, "target_modules: wanted linear layers of attention and"),
        ({"target_modules": ["embed_tokens"]}, "target_modules: wanted linear layers of attention"),
        ({"r": 5}, f"tensor {FIRST}: wanted shape (5, 48), found (4, 48)"),
        ({"lora_alpha": 1e40}, f"tensor {SECOND}: wanted finite numbers that float32 holds, scal"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_an_adapter_may_not_be_is_refused_by_name(
    made: Made, load: Callable[..., Any], fields: dict[str, Any], error: str
) -> None:
    path, adapter, _ = made
    configured(adapter, **fields)
    model, _ = load(path)
    with pytest.raises(FieldError, match=f"^{re.escape(error)}.* in {adapter}/adapter_"):
        load_adapters(model, [str(adapter)])


def _half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[SECOND]


def _layer(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[FIRST], tensors[SECOND]


def _other(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.ones(1)


def _expert(tensors: dict[str, torch.Tensor]) -> None:
    for name in (FIRST, SECOND):
        tensors[name.replace("self_attn.q_proj", "mlp.experts.0.up_proj")] = tensors.pop(name)


def _shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[SECOND] = tensors[SECOND][1:].contiguous()


def _dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST] = tensors[FIRST].int()


def _infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST][1, 2] = math.inf


def _empty(tensors: dict[str, torch.Tensor]) -> None:
    tensors.clear()


@pytest.mark.feature("S10")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_half, f"tensor {SECOND}: wanted beside the other half, found none"),
        (_layer, "module model.layers.0.self_attn.q_proj: wanted lora_A and lora_B of each module"),
        (_other, "tensor base_model.model.lm_head.weight: wanted only base_model.model.NAME.lora_"),
        (_expert, "tensor base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight: wa"),
        (_shape, f"tensor {SECOND}: wanted shape (48, 4), found (47, 4)"),
        (_dtype, f"tensor {FIRST}: wanted one of F64, F32, F16, BF16, found 'I32'"),
        (_infinite, f"tensor {FIRST}: wanted finite numbers"),
        (_empty, "adapter_model.safetensors: wanted tensors of an adapter, found none"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    made: Made,
    load: Callable[..., Any],
    change: Callable[[dict[str, torch.Tensor]], None],
    error: str,
) -> None:
    path, adapter, _ = made
    with_tensors(adapter, change)
    model, _ = load(path)
    with pytest.raises(FieldError, match=f"^{re.escape(error)}.* in {adapter}"):
        load_adapters(model, [str(adapter)])


def test_broken_and_missing_files_are_refused(made: Made, load: Callable[..., Any]) -> None:
    path, adapter, _ = made
    model, _ = load(path)
    (adapter / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(FieldError, match=r"^adapter_model.safetensors: wanted a whole safetensors"):
        load_adapters(model, [str(adapter)])
    with pytest.raises(FieldError, match=r"^adapter_config.json: wanted a readable file, found"):
        load_adapters(model, [str(adapter / "none")])


def test_a_pattern_is_of_a_module_or_of_its_end_behind_a_dot(tmp_path: Path) -> None:
    """The first that fits counts, as in PEFT; a scale by the square root goes by the same rank."""
    ranks = {"q_proj": 16, r"layers\.1\.self_attn\.k_proj": 9}
    alphas = {r".*\.1\..*": 6, "k_proj": 3}
    write_adapter(tmp_path / "a", {}, r=4, lora_alpha=8)
    configured(tmp_path / "a", rank_pattern=ranks, alpha_pattern=alphas)
    config = LoraConfig.from_dir(tmp_path / "a")
    name = "model.layers.{}.self_attn.{}"
    found = [
        (config.rank_of(module), config.scale_of(module))
        for module in (
            name.format(layer, kind) for layer in (0, 1) for kind in ("q_proj", "k_proj")
        )
    ]
    assert found == [(16, 8 / 16), (4, 3 / 4), (16, 6 / 16), (9, 6 / 9)]
    assert config.rank_of("model.layers.0.self_attn.eq_proj") == 4
    configured(tmp_path / "a", use_rslora=True)
    config = LoraConfig.from_dir(tmp_path / "a")
    assert config.scale_of(name.format(1, "k_proj")) == 6 / 3


def test_a_regular_expression_leaves_it_to_the_tensors_which_layers_there_are(
    made: Made, load: Callable[..., Any]
) -> None:
    path, adapter, _ = made
    with_tensors(adapter, _layer)
    for fields in (
        {"target_modules": r".*_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    ):
        configured(adapter, **fields)
        model, _ = load(path)
        load_adapters(model, [str(adapter)])
        assert all(layer.self_attn.qkv_proj.lora_a is not None for layer in model.model.layers)


def test_without_adapters_a_model_is_as_it_was(made: Made, load: Callable[..., Any]) -> None:
    path, adapter, _ = made
    model, _ = load(path)
    load_adapters(model, [])
    assert traced_layout([]) == ""
    assert all(getattr(module, "lora_a", None) is None for module in model.modules())
    assert traced_layout([str(adapter)]).startswith("(1, 4, ['model.layers.0.mlp.down_proj', ")


# --- slots that are reserved ---------------------------------------------------------------------


def read(slots: ModelAdapters, slot: int, path: Path, wanted: bytes | None = None) -> None:
    for _ in slots.reading(slot, str(path), wanted or fingerprint(path)):
        pass


def linear_layers(model: Any) -> list[Linear]:
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    return [layer for layer in layers if layer.is_quantizable]


def of_slot(model: Any, slot: int) -> list[torch.Tensor]:
    """Return copies of what all layers have in a slot."""
    layers = linear_layers(model)
    return [m[slot].clone() for layer in layers for m in (layer.lora_a, layer.lora_b)]


@pytest.mark.feature("S10")
def test_a_slot_that_was_used_holds_what_a_new_one_would(
    made: Made, load: Callable[..., Any], tmp_path: Path
) -> None:
    """Also where the second adapter has fewer modules, and narrower ones."""
    path, _, oracle = made
    wide = tmp_path / "wide"
    write_adapter(wide, matrices_of(oracle, LINEAR, {}, 6, 2), r=6, lora_alpha=8)
    narrow = tmp_path / "narrow"
    write_adapter(narrow, matrices_of(oracle, ("v_proj", "o_proj"), {}, 2, 3), r=2, lora_alpha=8)
    model, _ = load(path)
    slots = load_adapters(model, [], 3, 6)
    for module in linear_layers(model):
        assert module.lora_a.shape[0] == module.lora_b.shape[0] == 3 and not module.lora_a.any()
    places = [layer.lora_a.data_ptr() for layer in linear_layers(model)]
    read(slots, 0, wide)
    read(slots, 0, narrow)
    read(slots, 2, narrow)
    for reused, new, between in zip(*(of_slot(model, slot) for slot in (0, 2, 1)), strict=True):
        assert torch.equal(reused, new) and not between.any()
    assert any(values.any() for values in of_slot(model, 0))
    assert [layer.lora_a.data_ptr() for layer in linear_layers(model)] == places


@pytest.mark.feature("S10")
def test_reserved_slots_keep_what_was_there_from_the_start(
    made: Made, load: Callable[..., Any], tmp_path: Path
) -> None:
    path, adapter, oracle = made
    few = tmp_path / "few"
    write_adapter(few, matrices_of(oracle, ("q_proj",), {}, 2, 3), r=2, lora_alpha=8)
    alone, _ = load(path)
    load_adapters(alone, [str(few)])
    assert sum(layer.lora_a is not None for layer in linear_layers(alone)) == 2, "as it needs"
    model, _ = load(path)
    slots = load_adapters(model, [str(few)], 2, 3)
    before = of_slot(model, 0)
    with pytest.raises(FieldError, match=r"^module .*: wanted a rank of at most 3 \(max_lora_rank"):
        read(slots, 1, adapter)
    write_adapter(tmp_path / "b", matrices_of(oracle, LINEAR, {}, 3, 1), r=3, lora_alpha=8)
    read(slots, 1, tmp_path / "b")
    for was, found in zip(before, of_slot(model, 0), strict=True):
        assert torch.equal(was, found)
    own = [layer for layer in linear_layers(model) if layer.lora_a[0].any()]
    assert len(own) == 2 and all(layer.lora_a[1].any() for layer in linear_layers(model))


@pytest.mark.feature("S10")
@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda path: configured(path, r=9, rank_pattern={".*": 4}), ": wanted the files that it "),
        (lambda path: configured(path, rank_pattern={"o_proj": 7}), r"module .*o_proj: wanted a r"),
        (lambda path: configured(path, use_dora=True), "use_dora: wanted False or None, found "),
        (lambda path: with_tensors(path, _expert), r"tensor .*experts.0.up_proj.*: wanted linear"),
        (lambda path: with_tensors(path, _shape), r"tensor .*q_proj.lora_B.weight: wanted shape "),
        (lambda path: with_tensors(path, _dtype), r"tensor .*q_proj.lora_A.weight: wanted one of"),
        (
            lambda path: (path / "adapter_model.safetensors").unlink(),
            r"adapter_model.safetensors: ",
        ),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b"no"), "adapter_model.saf"),
    ],
    ids=["changed", "wide", "dora", "experts", "shape", "dtype", "gone", "broken"],
)
def test_nothing_is_written_of_files_that_do_not_fit(
    made: Made, load: Callable[..., Any], spoil: Callable[[Path], Any], error: str
) -> None:
    path, adapter, _ = made
    model, _ = load(path)
    slots = load_adapters(model, [], 1, 6)
    first = fingerprint(adapter)
    read(slots, 0, adapter)
    before = of_slot(model, 0)
    spoil(adapter)
    wanted = first if "files that" in error else None
    with pytest.raises(FieldError, match=rf"{error}.* in .*{adapter}"):
        read(slots, 0, adapter, wanted)
    for was, found in zip(before, of_slot(model, 0), strict=True):
        assert torch.equal(was, found)


def test_a_number_that_is_not_finite_never_reaches_a_slot(
    made: Made, load: Callable[..., Any]
) -> None:
    """Of an adapter that is refused nothing is left in a slot."""
    path, adapter, _ = made
    model, _ = load(path)
    slots = load_adapters(model, [], 2, 4)
    with_tensors(adapter, lambda tensors: tensors[SECOND].fill_(math.inf))
    with pytest.raises(FieldError, match=r"^tensor .*q_proj.lora_B.weight: wanted finite numbers"):
        read(slots, 1, adapter)
    assert all(values.isfinite().all() for values in of_slot(model, 1))


def test_what_is_traced_depends_on_the_room_and_not_on_what_fills_it(made: Made) -> None:
    adapter = str(made[1])
    reserved = traced_layout([], 2, 8)
    assert reserved == traced_layout([adapter], 2, 8) == "(2, 8, 'all')"
    assert traced_layout([adapter], 2, 3) == "(2, 4, 'all')", "as wide as the widest"
    assert traced_layout([adapter], 1, 8) == traced_layout([adapter], 0, 8)
    assert len({reserved, traced_layout([], 3, 8), traced_layout([], 2, 9)}) == 3


@given(data=st.data(), seed=st.integers(0, 999))
def test_what_is_added_is_the_sum_by_definition(data: Any, seed: int) -> None:
    """Values of other adapters' tokens, however large, are none of a token's own."""
    numbers = st.integers(1, 5)
    num_adapters, rank, inputs = (data.draw(numbers) for _ in range(3))
    sizes = data.draw(st.lists(numbers, min_size=1, max_size=3))
    of_token = data.draw(st.lists(st.integers(0, num_adapters), max_size=9))
    rng = torch.Generator().manual_seed(seed)
    out, x, a, b = (
        torch.randn(shape, generator=rng, dtype=torch.float64)
        for shape in (
            (len(of_token), sum(sizes)),
            (len(of_token), inputs),
            (num_adapters, len(sizes) * rank, inputs),
            (num_adapters, rank, sum(sizes)),
        )
    )
    unused = sorted({*range(1, num_adapters + 1)} - {*of_token})
    a[[adapter - 1 for adapter in unused]] = 1e308  # whose products are infinite
    wanted = out.clone()
    for token, adapter in enumerate(of_token):
        start = 0
        for part, size in enumerate(sizes if adapter else []):
            low = a[adapter - 1, part * rank : (part + 1) * rank] @ x[token]
            of_part = slice(start, start + size)
            wanted[token, of_part] += low @ b[adapter - 1, :, of_part]
            start += size
    add_adapters(out, x, a, b, sizes, torch.tensor(of_token, dtype=torch.int32))
    torch.testing.assert_close(out, wanted)
