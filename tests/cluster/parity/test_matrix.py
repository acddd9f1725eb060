"""However a model is split, compiled, replayed and batched, it generates what transformers does.

Each row is a model, a way to run it and a load; one function runs and judges any of them. Graphs
are captured on poisoned memory and the seal is strict: a step that compiles, captures or reads what
a graph let go of fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from parity_oracle import SHAPES, SLOW_SHAPES, SPARSE, features_of
from parity_rows import LOADS, Row

from compile.config import CUDAGraphMode
from model.quantization import WeightFormat

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE

COMPILED = (
    "six heads",
    "mistral window 13 wide heads",
    "qwen2 tied",
    "qwen3 window in every other layer",
    "mixtral tied eight experts",
    "qwen3moe many experts",
    "deepseek3 groups",
)
"""One of each family."""
SLOW_COMPILED = {"mistral window 13 wide heads", "qwen2 tied", "mixtral tied eight experts"}
"""Left out by default."""
BOTH_ATTENTIONS = {"six heads", "deepseek3 groups"}
"""What of these stands for all where only attention matters."""
SLOW_COMPILERS = {"deepseek3 groups"}
"""Left out above level 0."""
TRACED = {
    "mistral window 13 wide heads",  # whose window is the attention's alone: pieces are Llama's
    "qwen3 window in every other layer",  # whose norms of heads are Qwen3 MoE's, too
    "mixtral tied eight experts",  # which two data-parallel ranks compile, below
}
"""Run at level 3 as they are traced: Inductor compiles their like."""
FP8 = {"six heads", "mistral window 13 wide heads"}
"""One of each kind of cache: whole, and of a window."""
MODES = [
    (0, NONE, "A01 A09 B01"),
    (0, FULL, "B03 Q02"),
    (0, PIECEWISE, "X03"),
    (0, BOTH, "X03"),
    (1, NONE, "A02"),
    (2, NONE, "A03"),
    (2, DECODE_ONLY, ""),
    (3, NONE, "A04"),
    (3, PIECEWISE, "B02"),
    (3, DECODE_ONLY, "B04"),
    (3, FULL, "B03 Q02"),
    (3, BOTH, "B05 B07 N02"),
]
# What is not split is compiled for one family: that takes four times as long as pieces do. What
# level 0 replays in mode FULL for every family, level 3 does for one.
OF_EVERY_FAMILY = {
    (0, FULL),
    (0, PIECEWISE),
    (3, NONE),
    (3, PIECEWISE),
    (3, DECODE_ONLY),
    (3, BOTH),
}

TENSOR_PARALLEL = [
    ("one kv head", 2),
    ("llama3 rope", 2),
    ("mistral window 13 wide heads", 2),
    ("qwen2 tied", 2),  # with biases, and an odd vocabulary
    ("qwen3 wide heads", 2),  # tied, with one KV head
    ("qwen3 window in every other layer", 4),  # two of which hold the same KV head
]
SAMPLED_BY_SEVERAL = {"one kv head", "qwen2 tied", "qwen3 window in every other layer"}
"""Whose leaders draw and tell logprobs of what all ranks compute: one has an odd vocabulary, and
one four ranks."""
# With those above and the slow ones at least six of each family on two ranks; on one rank all of
# them are run.
MORE_TENSOR_PARALLEL = [
    "mistral window 7",
    "qwen2 yarn rope with mscale",
    "qwen3 tied linear rope",
    "mixtral window 11 wide heads",
    "qwen3moe many experts",  # 9 on each, and a KV head on both
    "deepseek3 groups",  # whose latents are on both
]
SLOW_TENSOR_PARALLEL = [
    "wide heads",
    "tied",
    "odd vocabulary",
    "linear rope",
    "mistral window 11 two kv heads",
    "mistral window 20 tied",
    "mistral window 16",
    "mistral wide heads linear rope",
    "qwen2 wide heads",
    "qwen2 eight heads",
    "qwen2 window in the last layers",
    "qwen2 window in all layers",
    "qwen3 eight heads",
    "qwen3 odd vocabulary",
    "qwen3 yarn rope without truncation",
    "qwen3 window in every other layer",
    "deepseek2 tied groups",
]
"""Together they take minutes."""

POOLS = ["one kv head", "six heads", "wide heads", "tied", "odd vocabulary", "biases"]
POOLS += ["mistral window 7", "qwen2 window in the last layers", "qwen3 wide heads"]


def case(row: Row, features: str = "", is_slow: bool = False) -> Any:
    """Return a row with its marks: the features of its model, of its load and of its own."""
    ids = [*features_of(row.shape), *LOADS[row.load].features.split(), *features.split()]
    if row.shape.startswith(SPARSE) and row.tp * row.dp > 1:
        ids.append("P15")
    marks = [pytest.mark.feature(*dict.fromkeys(ids))]
    return pytest.param(row, id=row.id, marks=[*marks, *[pytest.mark.slow] * is_slow])


def one_rank() -> Iterator[Any]:
    """Every shape of each family, however its requests come.

    Chunks of 23 arrive too, and begin and end anywhere in a block. Of a slow shape all ways at
    once, and its logits: another one that has what is special about it is run in each way.
    """
    for load in list(LOADS)[:7]:
        for shape in SHAPES:
            is_in_others = load in ("arriving", "chunks of 16") and shape not in COMPILED
            if shape not in SLOW_SHAPES and not is_in_others:
                yield case(Row(shape, load))
    for shape in SHAPES:
        if shape in SLOW_SHAPES:
            yield case(Row(shape, "logprobs"), is_slow=True)
            if shape not in dict(TENSOR_PARALLEL):
                yield case(Row(shape, "everything"), is_slow=True)
    yield case(Row("mistral window 13 wide heads", "long prompt"))
    yield case(Row("mistral window 7", "two heads"))


def compiled() -> Iterator[Any]:
    for level, mode, features in MODES:
        for shape in COMPILED if (level, mode) in OF_EVERY_FAMILY else COMPILED[:1]:
            compiler = "eager" if level == 3 and shape in TRACED else "auto"
            row = Row(shape, "run down", level=level, mode=mode, compiler=compiler)
            is_slow = shape in SLOW_COMPILED or (shape in SLOW_COMPILERS and level > 0)
            yield case(row, features, is_slow)
    yield case(Row("qwen2 tied", "at random", level=3, mode=BOTH), is_slow=True)


def tensor_parallel() -> Iterator[Any]:
    for shape, size in TENSOR_PARALLEL:
        yield case(Row(shape, "everything"))
        yield case(Row(shape, "everything", size))
        for load in ("seeded", "logprobs") if shape in SAMPLED_BY_SEVERAL else ():
            yield case(Row(shape, load, size))
    for shape in MORE_TENSOR_PARALLEL:
        yield case(Row(shape, "everything", 2))
    for shape in SLOW_TENSOR_PARALLEL:
        yield case(Row(shape, "everything", 2), is_slow=True)
    yield case(Row("one kv head", "everything", 2, level=3, mode=BOTH), "G01", True)
    yield case(Row("one kv head", "everything", 2, mode=BOTH), "X03")


def data_parallel() -> Iterator[Any]:
    odd, experts = "odd vocabulary", "mixtral tied eight experts"
    yield case(Row(odd, "uneven", 1, 2, mode=DECODE_ONLY))
    yield case(Row(odd, "uneven", 1, 2, mode=FULL), "B03")
    yield case(Row("one kv head", "uneven", 2, 2, mode=DECODE_ONLY), is_slow=True)
    yield case(Row(experts, "uneven", 1, 2, mode=DECODE_ONLY))
    yield case(Row(experts, "uneven", 2, 2, mode=DECODE_ONLY), is_slow=True)
    yield case(Row(experts, "uneven", 1, 2, mode=PIECEWISE), "X03")
    yield case(Row("deepseek3 groups", "uneven", 2, 2, mode=DECODE_ONLY), is_slow=True)
    for shape, load in ((odd, "uneven"), (odd, "seeded"), (experts, "uneven")):
        row = Row(shape, load, 1, 2, level=3, mode=BOTH, compiler="inductor")
        yield case(row, "A04 B05", is_slow=True)


def pools() -> Iterator[Any]:
    for kv in ("shm", "tcp"):
        for shape in POOLS:
            yield case(Row(shape, "pools", kv=kv))
        yield case(Row("six heads", "roomy pools", kv=kv))
    for shape, kv in (("one kv head", "shm"), ("wide heads", "tcp"), ("tied", "shm")):
        yield case(Row(shape, "pools", 2, kv=kv))
    yield case(Row("deepseek3 groups", "pools", kv="shm"))
    yield case(Row("deepseek2 whole queries", "pools", 2, kv="tcp"), is_slow=True)
    yield case(Row("tied", "seeded", kv="shm"))
    yield case(Row("tied", "cut", kv="shm"))
    yield case(Row("tied", "cut early", 2, kv="tcp"))
    yield case(Row("six heads", "few", kv="shm", loses=0))
    yield case(Row("tied", "few", 2, kv="shm", loses=1))


def overlapped() -> Iterator[Any]:
    """Steps are planned ahead of their tokens: one shape of each family, and each kind of group."""
    for shape in COMPILED:
        yield case(Row(shape, "everything", overlap=True), "T04")
    for load in ("arriving", "chunks of 23", "prefix", "tiny pool", "logprobs", "seeded"):
        yield case(Row("six heads", load, overlap=True), "T04")
    yield case(Row("mistral window 7", "tiny pool", overlap=True), "T04")
    yield case(Row("six heads", "run down", mode=FULL, overlap=True), "T04")
    traced = Row("six heads", "run down", level=3, mode=BOTH, compiler="eager", overlap=True)
    yield case(traced, "T04", True)
    for shape, load in (("one kv head", "everything"), ("qwen2 tied", "seeded")):
        yield case(Row(shape, load, 2, overlap=True), "T04")
    yield case(Row("llama3 rope", "logprobs", 2, overlap=True), "T04")
    odd, experts = "odd vocabulary", "mixtral tied eight experts"
    yield case(Row(odd, "uneven", 1, 2, mode=DECODE_ONLY, overlap=True), "T04")
    yield case(Row(experts, "uneven", 2, 2, mode=DECODE_ONLY, overlap=True), "T04")
    yield case(Row("wide heads", "pools", kv="tcp", overlap=True), "T04")
    yield case(Row("mistral window 7", "pools", kv="shm", overlap=True), "T04")
    yield case(Row("tied", "pools", 2, kv="shm", overlap=True), "T04")
    yield case(Row("tied", "cut", kv="shm", overlap=True), "T04")
    yield case(Row("tied", "cut early", 2, kv="tcp", overlap=True), "T04")
    yield case(Row("tied", "few", 2, kv="shm", loses=1, overlap=True), "T04")


def scored() -> Iterator[Any]:
    """Decode steps find their tokens in a graph of their own, for whatever is done with them."""
    for load in ("run down", "everything", "seeded", "logprobs", "seeded chunks"):
        yield case(Row("six heads", load, mode=DECODE_ONLY, scores=True), "D02 E10")
    for load in ("run down", "seeded"):
        yield case(Row("tied", load, mode=DECODE_ONLY, overlap=True, scores=True), "D02 E10 T04")
    odd = "odd vocabulary"
    yield case(Row(odd, "everything", 2, mode=DECODE_ONLY, scores=True), "D02 E10")
    yield case(Row(odd, "uneven", 2, 2, mode=DECODE_ONLY, overlap=True, scores=True), "D02 E10")


def drafting() -> Iterator[Any]:
    """Several tokens of a sequence are checked in a step: tokens are those of one at a time."""
    for shape in COMPILED:
        yield case(Row(shape, "drafted", drafts=3), "", shape not in BOTH_ATTENTIONS)
    for load in ("everything", "tiny pool", "logprobs", "seeded"):
        yield case(Row("six heads", load, drafts=2), "T05", load in ("everything", "logprobs"))
    yield case(Row("mistral window 7", "tiny pool", drafts=4), "T05")
    yield case(Row("six heads", "drafted", mode=DECODE_ONLY, drafts=2), "C07")
    yield case(Row("tied", "drafted", mode=FULL, drafts=3, scores=True), "C07", True)
    traced = Row("six heads", "drafted", level=3, mode=BOTH, compiler="eager", drafts=2)
    yield case(traced, "C07", True)
    yield case(Row("qwen2 tied", "drafted", 2, mode=DECODE_ONLY, drafts=2), "C07")
    odd, experts = "odd vocabulary", "mixtral tied eight experts"
    yield case(Row(odd, "drafted", 1, 2, mode=DECODE_ONLY, drafts=2), "C07")
    yield case(Row(experts, "drafted", 2, 2, mode=DECODE_ONLY, drafts=2), "C07", True)
    yield case(Row("tied", "repeating", kv="shm", drafts=3))
    yield case(Row("tied", "repeating", 2, kv="tcp", drafts=3), "", True)


def predicting() -> Iterator[Any]:
    """Drafts are those of a layer behind the model's, whose KV is cached beside that of others."""
    yield predicted(Row("", "drafted", drafts=1))
    yield predicted(Row("", "everything", drafts=2))
    yield predicted(Row("", "seeded", drafts=3))
    yield predicted(Row("", "prefix", drafts=1), is_slow=True)
    yield predicted(Row("", "logprobs", drafts=6), is_slow=True)
    yield predicted(Row("", "drafted", mode=DECODE_ONLY, drafts=1), is_slow=True)
    yield predicted(Row("", "drafted", mode=FULL, drafts=2, scores=True))
    yield predicted(Row("", "drafted", mode=PIECEWISE, drafts=1), is_slow=True)
    yield predicted(Row("", "drafted", level=3, mode=BOTH, compiler="eager", drafts=1))
    yield predicted(Row("", "drafted", 2, mode=DECODE_ONLY, drafts=2))
    yield predicted(Row("", "drafted", 1, 2, mode=DECODE_ONLY, drafts=3))
    yield predicted(Row("", "uneven", 2, 2, mode=DECODE_ONLY, drafts=1), is_slow=True)
    yield predicted(Row("", "repeating", kv="shm", drafts=2))
    yield predicted(Row("", "repeating", 2, kv="tcp", drafts=1), is_slow=True)


def predicted(row: Row, *, is_slow: bool = False) -> Any:
    return case(replace(row, shape="deepseek3 mtp", has_mtp=True), "T05 D04", is_slow)


def fp8_kv() -> Iterator[Any]:
    """A cache of one byte a number, however it is filled, found again, handed over and replayed."""
    for shape in COMPILED[:-1]:  # latents are never FP8
        yield fp8(Row(shape, "everything"), is_slow=shape not in FP8)
    yield fp8(Row("mistral window 7", "tiny pool"))
    yield fp8(Row("six heads", "run down", mode=FULL))
    yield fp8(Row("six heads", "run down", level=3, mode=BOTH, compiler="eager"))
    yield fp8(Row("one kv head", "everything", 2), is_slow=True)
    yield fp8(Row("one kv head", "everything", 2, mode=BOTH, overlap=True))
    yield fp8(Row("six heads", "pools", kv="shm"))
    yield fp8(Row("mistral window 7", "pools", kv="tcp", overlap=True))
    yield fp8(Row("tied", "few", 2, kv="shm", loses=1), is_slow=True)


def fp8(row: Row, *, is_slow: bool = False) -> Any:
    return case(replace(row, has_fp8_kv=True), "S09", is_slow)


def adapters() -> Iterator[Any]:
    """Sequences of two adapters and of none are in one step: each has the tokens of a model whose
    weights have its adapter merged."""
    for shape in COMPILED:
        yield adapted(Row(shape, "everything"), shape not in BOTH_ATTENTIONS)
    yield adapted(Row("biases", "everything", overlap=True))
    yield adapted(Row("six heads", "tiny pool"), True)
    yield adapted(Row("six heads", "run down", mode=FULL))
    yield adapted(Row("six heads", "run down", level=3, mode=BOTH, compiler="eager"))
    yield adapted(Row("qwen2 tied", "drafted", drafts=3), True)
    yield adapted(Row("one kv head", "everything", 2))
    yield adapted(Row("one kv head", "everything", 2, level=3, mode=BOTH), True)
    yield adapted(Row("deepseek3 groups", "everything", 2), True)
    yield adapted(Row("mixtral tied eight experts", "uneven", 1, 2, mode=DECODE_ONLY), True)
    yield adapted(Row("six heads", "pools", kv="shm"))
    yield adapted(Row("tied", "few", 2, kv="tcp", loses=1), True)
    yield loaded(Row("six heads", "run down", mode=FULL))
    yield loaded(Row("six heads", "run down", level=3, mode=BOTH), True)
    yield loaded(Row("biases", "everything", overlap=True), True)
    yield loaded(Row("one kv head", "everything", 2))
    yield loaded(Row("one kv head", "everything", 2, level=3, mode=BOTH), True)
    yield loaded(Row("deepseek3 groups", "everything", 2), True)
    yield loaded(Row("qwen2 tied", "tiny pool", held="int8"), True)


def loaded(row: Row, is_slow: bool = False) -> Any:
    return adapted(replace(row, loads_adapters=True), is_slow)


def adapted(row: Row, is_slow: bool = False) -> Any:
    return case(replace(row, has_adapters=True), "S10", is_slow)


def integers() -> Iterator[Any]:
    """Linear layers hold integers, FP8 or FP4: tokens are those of a model with the numbers they
    stand for."""
    yield held("fp8", Row("six heads", "run down", mode=FULL))
    yield held("fp8", Row("one kv head", "few", 2, mode=DECODE_ONLY), True)
    yield held("fp8", Row("mixtral tied eight experts", "run down", 1, 2), True)
    yield held("w8a8", Row("six heads", "run down", mode=FULL))
    yield held("w8a8", Row("one kv head", "few", 2, mode=DECODE_ONLY), True)
    yield held("w8a8", Row("mixtral tied eight experts", "run down", 1, 2), True)
    yield held("nvfp4", Row("whole blocks of 16", "run down", mode=FULL))
    yield held("nvfp4", Row("whole blocks of 16", "few", 2, mode=DECODE_ONLY), True)
    for shape in COMPILED:
        yield held("int8", Row(shape, "everything"), shape in SLOW_COMPILED)
        yield held("int4", Row(shape, "run down", mode=FULL), shape not in BOTH_ATTENTIONS)
    for shape in ("mistral window 13 wide heads", "qwen2 tied"):
        yield held("int4", Row(shape, "few"))
    for kind in ("int8", "int4"):
        traced = Row("six heads", "run down", level=3, mode=BOTH)
        yield held(kind, replace(traced, compiler="eager"), kind == "int8")
        compiled = Row("qwen2 tied", "run down", 2, level=3, mode=BOTH)
        yield held(kind, compiled, True)
        yield held(kind, replace(compiled, compiler="eager"), kind == "int4")
        yield held(kind, Row("one kv head", "few", 2, mode=DECODE_ONLY), kind == "int8")
        yield held(kind, Row("deepseek3 groups", "few", 2), True)
        yield held(kind, Row("mixtral tied eight experts", "run down", 1, 2), True)
    yield held("int4", Row("six heads", "few", kv="shm"))
    yield held("int8", Row("six heads", "run down", has_adapters=True, mode=FULL))
    yield held("int4", Row("one kv head", "few", 2, has_adapters=True), True)


def held(kind: WeightFormat, row: Row, is_slow: bool = False) -> Any:
    return case(replace(row, held=kind), "S08", is_slow)


ROWS = [
    *one_rank(),
    *compiled(),
    *tensor_parallel(),
    *data_parallel(),
    *pools(),
    *overlapped(),
    *scored(),
    *drafting(),
    *predicting(),
    *fp8_kv(),
    *adapters(),
    *integers(),
]


@pytest.mark.parametrize("row", ROWS)
def test_row(row: Row, judge: Callable[[Row], None]) -> None:
    judge(row)
