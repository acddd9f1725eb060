"""Packed weights multiply like plain ones and are invisible to a traced graph."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from model.kernels.cpu import native
from model.kernels.cpu import packed_linear as module
from model.kernels.cpu.packed_linear import PackedWeight, can_pack, packed_linear, packed_rows
from model.layers.linear import Linear, MergedColumnParallelLinear, VocabParallelEmbedding
from model.parallel import Placement
from model.weights import load_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, 64), (96, 48), (509, 48), (100, 37), (1, 8), (1152, 896), (256, 768)]


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _needs_packing(request: pytest.FixtureRequest) -> None:
    """Skip a test of a dtype that is not packed here: to know that, kernels are built."""
    callspec = getattr(request.node, "callspec", None)
    dtype = callspec.params.get("dtype") if callspec else None
    if dtype is not None and not can_pack(dtype, CPU):
        pytest.skip(f"neither oneDNN nor the kernels pack {dtype} here")


@pytest.fixture(params=["ours", "oneDNN"])
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who packs, whatever this processor's rule is."""
    dtype = request.node.callspec.params.get("dtype", torch.float32)
    choose(request.param, dtype, monkeypatch)
    return str(request.param)


def choose(packer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    is_ours = packer == "ours"
    if is_ours and native.native_function("packed_linear", dtype) is None:
        pytest.skip("needs a C++ compiler")
    if not is_ours and (refusal := module._refusal(dtype)) is not None:
        pytest.skip(refusal)
    monkeypatch.setattr(module, "_is_ours", lambda _: is_ours)


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Asks anew, before and after, who packs."""
    cached = (module._packs, module._is_ours, module._refusal)
    for each in cached:
        each.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for each in cached:
        each.cache_clear()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_equal_to_rounding(found: torch.Tensor, x: torch.Tensor, *weights: Any) -> None:
    """Compare with the product in float64, in units of the sum's magnitude."""
    weight, bias = (None if t is None else t.double() for t in weights)
    wanted = F.linear(x.double(), weight, bias)
    size = F.linear(x.double().abs(), weight.abs(), None if bias is None else bias.abs())
    error = ((found.double() - wanted).abs() / size).max()
    assert error < (1e-6 if found.dtype == torch.float32 else 2**-8), error


@pytest.mark.usefixtures("packer")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("shape", SHAPES)
def test_product_equals_the_plain_one(
    shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    packed = PackedWeight(weight)
    x = torch.randn(rows, shape[1]).to(dtype)
    for b in (None, bias):
        found = packed_linear(x, packed.handle, b, shape[0])
        assert found.dtype == dtype
        assert_equal_to_rounding(found, x, weight, b)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Fewer columns than threads; blocks of inputs and a rest; groups of columns and a rest.
@pytest.mark.parametrize("shape", [(5, 1), (100, 37), (33, 515), (16, 768), (509, 300)])
def test_every_number_of_rows_multiplies_as_each_row_alone(
    shape: tuple[int, int], dtype: torch.dtype, threads: int, packer: str
) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    # Read past its inputs, a row yields NaN.
    wide = torch.full((600, shape[1] + 3), torch.nan).to(dtype)
    every = wide[:, : shape[1]].copy_(torch.randn(600, shape[1]))
    packed = PackedWeight(weight)
    torch.set_num_threads(threads)
    try:
        for b in (None, bias):
            alone = [packed_linear(row, packed.handle, b, shape[0]) for row in every.split(1)]
            wanted = torch.cat(alone)
            assert_equal_to_rounding(wanted, every, weight, b)
            most = module._entry(packed.handle).kernel_rows
            assert packer == "oneDNN" or most >= 600
            for rows in [n for n in (*range(71), 95, 96, 97, 98, 193, 600) if n <= most]:
                found = packed_linear(every[:rows], packed.handle, b, shape[0])
                assert torch.equal(found, wanted[:rows]), rows
        columns = every[:9].T.contiguous().T
        assert columns.stride(1) != 1 or shape[1] == 1
        if most >= 9:
            assert torch.equal(packed_linear(columns, packed.handle, b, shape[0]), wanted[:9])
    finally:
        torch.set_num_threads(1)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_of_which_every_other_row_is_skipped_is_packed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose("ours", dtype, monkeypatch)
    wide = torch.randn(74, 61).to(dtype)
    for weight in (wide[::2, :37], wide[:37].T):
        packed = PackedWeight(weight)
        x = torch.randn(3, weight.shape[1]).to(dtype)
        found = packed_linear(x, packed.handle, None, weight.shape[0])
        assert_equal_to_rounding(found, x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_are_the_kernels(
    dtype: torch.dtype, packer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.native_function("packed_linear", dtype) is None:
        pytest.skip("needs a C++ compiler")
    names: list[str] = []

    def counted(name: str, dtype: torch.dtype) -> Any:
        names.append(name)
        return native.native_function(name, dtype)

    packed = PackedWeight(torch.randn(96, 64).to(dtype))
    monkeypatch.setattr(module, "native_function", counted)
    packed_linear(torch.randn(1, 64).to(dtype), packed.handle, None, 96)
    assert names == ["packed_linear"]
    packed_linear(torch.randn(module.KERNEL_ROWS + 1, 64).to(dtype), packed.handle, None, 96)
    assert len(names) == (2 if packer == "ours" else 1)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [*SHAPES, (2063, 130)])
def test_a_transposed_weight_multiplies_like_a_plain_one(
    shape: tuple[int, int], threads: int
) -> None:
    """What oneDNN makes of bfloat16 on CPUs that cannot multiply it; here on any."""
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    packed, x, out = weight.T.contiguous(), torch.randn(1, shape[1]).bfloat16(), bias[None].clone()
    assert module._is_transposed(packed, weight)
    tiles = packed.view(1, shape[1], shape[0], 1)
    kernel = native.native_function("packed_linear", torch.bfloat16)
    assert kernel is not None
    for b in (None, bias):
        bias_pointer = None if b is None else b.data_ptr()
        sizes = module._sizes(tiles, weight.shape)
        pointers = (x.data_ptr(), tiles.data_ptr(), bias_pointer, out.data_ptr())
        kernel(*pointers, sizes, 1, shape[1], threads)
        assert_equal_to_rounding(out, x, weight, b)
    assert not module._is_transposed(packed, weight + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_one_row_rounds_ties_to_even(dtype: torch.dtype) -> None:
    # 1 + 1/256 and 1 + 3/256 lie halfway between two numbers of bfloat16.
    packed = PackedWeight(torch.ones(32, 2).bfloat16())
    for x, wanted in (([1.0, 1 / 256], 1.0), ([1 + 1 / 128, 1 / 256], 1 + 1 / 64)):
        found = packed_linear(torch.tensor([x]).bfloat16(), packed.handle, None, 32)
        assert found.float().tolist() == [[wanted] * 32]


@pytest.mark.usefixtures("packer")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 1])
def test_rows_and_the_whole_come_back_bit_by_bit(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = PackedWeight(weight)
    assert packed.has_rows
    rows = torch.randint(shape[0], (9,))
    assert torch.equal(packed_rows(rows, packed.handle, shape[1], dtype), weight[rows])
    ones = torch.eye(shape[1], dtype=dtype)
    assert torch.equal(packed_linear(ones, packed.handle, None, shape[0]).T, weight)


def test_tiles_are_believed_only_where_every_element_is_in_its_place() -> None:
    weight = torch.randn(128, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    assert module._tiles_of(packed, weight) is not None
    weight[127, 63] += 1
    assert module._tiles_of(packed, weight) is None


def test_an_entry_goes_with_its_owner() -> None:
    packed = PackedWeight(torch.randn(32, 32))
    index = int(packed.handle)
    assert index in module._table
    del packed
    gc.collect()
    assert index not in module._table


# --- layers -----------------------------------------------------------------------------------


def layer() -> MergedColumnParallelLinear:
    """A loaded layer with random weights."""
    place = Placement(torch.float32, CPU)
    made = MergedColumnParallelLinear(48, 96, ("up_proj",), place, bias=True)
    for name in ("weight", "bias"):
        made.allocate(name).normal_()
        made.loaded(name)
    return made


def refuse(*_: Any) -> None:
    raise RuntimeError("mkldnn: not on this machine\nmore")


def test_what_nobody_packs_stays_plain(
    rule: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rule.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    rule.setattr(module, "native_function", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        made = layer()
    [record] = caplog.records
    assert record.getMessage() == "weights of torch.float32 stay plain: mkldnn: not on this machine"
    assert made.handle is None
    x = torch.randn(2, 48)
    assert torch.equal(made(x), F.linear(x, made.weight, made.bias))


@needs_compiler
@pytest.mark.parametrize("capability", ["AVX2", "AVX512", "DEFAULT"])
@pytest.mark.parametrize("refuses", [True, False])
def test_the_processor_and_what_onednn_refuses_decide_who_packs(
    refuses: bool, capability: str, rule: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rule.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if refuses:
        rule.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    with caplog.at_level(logging.WARNING):
        made = layer()
    assert not caplog.records
    assert made.handle is not None
    is_onednn = module._entry(made.handle).packed is not None
    assert is_onednn == (not refuses and capability != "AVX2")
    x = torch.randn(2, 48)
    torch.testing.assert_close(made(x), F.linear(x, made.product(torch.eye(48), None).T, made.bias))


# --- whole models -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_product_of_a_model_is_packed(
    tied: bool, dtype: torch.dtype, make_checkpoint: Any
) -> None:
    path, reference = make_checkpoint(tie_word_embeddings=tied)
    model, _ = load_model(path, dtype=dtype, device="cpu")
    products = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    plain = [name for name, m in products.items() if not m.weight.is_meta]
    # An embedding that scores nothing is read by rows alone.
    assert plain == ([] if tied else ["model.embed_tokens"])
    found = model.model.embed_tokens(torch.tensor([0, 508, 7]))
    assert torch.equal(found, reference.model.embed_tokens.weight[[0, 508, 7]].to(dtype))


def test_a_tied_head_whose_rows_cannot_be_read_stays_plain(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose("oneDNN", torch.float32, monkeypatch)
    monkeypatch.setattr(module, "TILE_OUTPUTS", ())
    model, _ = load_model(
        make_checkpoint(tie_word_embeddings=True)[0], dtype=torch.float32, device="cpu"
    )
    assert isinstance(model.lm_head, VocabParallelEmbedding)
    assert model.lm_head.handle is None
    assert model.model.layers[0].mlp.down_proj.handle is not None


@pytest.mark.parametrize("off", ["packing", "kernels", "our packing"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_gives_the_same_logits_without(
    off: str, tied: bool, make_checkpoint: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Path = make_checkpoint(tie_word_embeddings=tied)[0]
    ids = torch.randint(509, (24,))

    def logits() -> torch.Tensor:
        model, _ = load_model(path, dtype=torch.float32, device="cpu")
        runner = paged(model)
        steps = [runner.step({"a": part})["a"] for part in (ids[:20], *ids[20:].split(1))]
        return torch.cat(steps)

    wanted = logits()
    if off == "packing":
        monkeypatch.setattr("model.layers.linear.can_pack", lambda *_: False)
    else:
        choose("oneDNN", torch.float32, monkeypatch)
    if off == "kernels":
        monkeypatch.setattr(module, "native_function", lambda *_: None)
        monkeypatch.setattr(native, "run", lambda *_, **__: False)
    torch.testing.assert_close(logits(), wanted, atol=1e-4, rtol=1e-4)
    assert can_pack(torch.float32, CPU)
