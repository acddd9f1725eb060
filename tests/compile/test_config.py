"""A compilation configuration is legal from the moment it exists, or it is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile.config import FIELDS, CompilationConfig, CompilationLevel, CUDAGraphMode, DynamicShapes
from compile.errors import FieldError

MODES = list(CUDAGraphMode)
NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH = MODES


@pytest.mark.feature("B06")
@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "is_pair", "has_full", "has_pieces", "largest"),
    [
        (NONE, NONE, NONE, False, False, False, NONE),
        (PIECEWISE, PIECEWISE, PIECEWISE, False, False, True, PIECEWISE),
        (FULL, FULL, FULL, False, True, False, FULL),
        (DECODE_ONLY, FULL, NONE, True, True, False, FULL),
        (BOTH, FULL, PIECEWISE, True, True, True, FULL),
    ],
)
def test_helpers_of_a_mode_follow_its_truth_table(
    mode: CUDAGraphMode,
    decode: CUDAGraphMode,
    mixed: CUDAGraphMode,
    is_pair: bool,
    has_full: bool,
    has_pieces: bool,
    largest: CUDAGraphMode,
) -> None:
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.separate_routine() is is_pair
    assert mode.has_full_cudagraphs() is has_full
    assert mode.requires_piecewise_compilation() is has_pieces
    assert mode.max_cudagraph_mode() is largest


@pytest.mark.feature("A06")
@pytest.mark.parametrize("mode", MODES)
def test_modes_with_pieces_need_level_0_or_3_and_a_splitting_op(mode: CUDAGraphMode) -> None:
    for level in (0, 3):
        assert CompilationConfig(level=level, cudagraph_mode=mode).graph_mode is mode
    refusals: list[tuple[dict[str, Any], str]] = [
        (
            {"level": level},
            f"cudagraph_mode: wanted NONE, FULL or FULL_DECODE_ONLY at level {level} "
            f"(piecewise graphs need level 0 or 3), found {mode.name!r}",
        )
        for level in (1, 2)
    ]
    wanted = f"wanted at least one op where cudagraph_mode is {mode.name}"
    for level in (0, 3):
        none = {"level": level, "splitting_ops": ()}
        refusals.append((none, f"splitting_ops: {wanted}, found []"))
    for fields, line in refusals:
        if mode not in (PIECEWISE, BOTH):
            assert CompilationConfig(cudagraph_mode=mode, **fields).graph_mode is mode
            continue
        with pytest.raises(FieldError) as error:
            CompilationConfig(cudagraph_mode=mode, **fields)
        assert str(error.value) == f"compilation.{line}"


DOUBLE = {"a.b": 1, "a": {"b": 2}}
"""One option, dotted and nested."""
BAD = {
    "level": (-1, 4, 99, "3", 1.0, True, None),
    "use_cudagraph": (1, "true", None),
    "cudagraph_capture_sizes": (8, [], [2**20 + 1], [0], [1.5], [True], "8", ["8"]),
    "cuda_graph_sizes": (512, [0], None, [10**12]),
    "cudagraph_mode": ("half", 2, [2, 0], ""),
    "splitting_ops": ("lockstep::attention", ["attention"], ["a::b::c"], [1]),
    "cudagraph_copy_inputs": (0,),
    "use_inductor": ("no",),
    "compile_sizes": (4, [0], ["capture_sizes"], [None]),
    "inductor_compile_config": (
        [],
        {"a": object()},
        {1: 2},
        {"a": float("nan")},
        {"a": {2: 1}},
        DOUBLE,
    ),
    "debug_dump_path": (None, 1),
    "cache_dir": (b"/tmp", False),
    "compiler": ("gcc", None, 1),
    "compile_ranges": (
        *([1, 8], [[1]], [[8, 1]], [[0, 4]], [[1, 8], [8, 16]], 4, [[1, 2, 3]]),
        *([[1, 8], [20, 30], pair] for pair in ([1, 1], [5, 9], [8, 8], [1, 20])),
    ),
    "compile_lazily": ("yes",),
    "dynamic_shapes": ("static", None),
    "evaluate_guards": (1,),
    "share_artifacts": ("no", 1),
    "compile_cache_save_format": ("zip", 0),
    "capture_num_tokens": ([], [0], [-4], 128),
    "enable_padding": (None,),
    "num_warmups_full": (-1, 1.0, True),
    "num_warmups_piecewise": (-1, "3"),
    "graph_pool": ("private",),
    "poison_graph_pool": ("no",),
    "reserve_graph_memory": ("auto", 1),
    "capture_logits": ("auto", 1),
    "sealed": (True, "off"),
    "serve_while_compiling": ("yes", None, 1),
    "passes": ("fuse", ["a b"], ["fuse", "fuse"], [1]),
    "max_num_streams": (0, 17, "2", True),
    "enable_userbuffers": (1, "true", None),
}


@pytest.mark.feature("A05", "A08", "F03")
def test_a_value_that_a_field_cannot_hold_is_refused_by_the_fields_name() -> None:
    assert list(BAD) == list(FIELDS)
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(FieldError) as error:
                CompilationConfig(**{name: value})
            assert (error.value.field, error.value.found) == (f"compilation.{name}", value)
            assert str(error.value).startswith(f"compilation.{name}: wanted {error.value.wanted}")


PIECES = {"level": 3, "cudagraph_mode": "PIECEWISE", "cudagraph_copy_inputs": True}


@pytest.mark.parametrize(
    ("fields", "changes", "line"),
    [
        (
            {"compile_lazily": True, "sealed": "warn"},
            {"sealed": "strict"},
            "compile_lazily: wanted false where sealed is strict (nothing compiles after ready), "
            "found True",
        ),
        (
            {"evaluate_guards": True, "dynamic_shapes": "backed"},
            {"dynamic_shapes": "unbacked"},
            "evaluate_guards: wanted false where dynamic_shapes is UNBACKED (it has no guards), "
            "found True",
        ),
        (
            {"serve_while_compiling": "off", "compile_lazily": True},
            {"serve_while_compiling": "on"},
            "serve_while_compiling: wanted auto or off where compile_lazily is true (it compiles "
            "in the rank), found 'on'",
        ),
        (
            {"serve_while_compiling": "on", "reserve_graph_memory": False},
            {"reserve_graph_memory": True},
            "serve_while_compiling: wanted auto or off where reserve_graph_memory is true (trials "
            "need what is compiled), found 'on'",
        ),
        (
            {"use_inductor": False, "compiler": "eager"},
            {"compiler": "inductor_standalone"},
            "compiler: wanted auto or eager where use_inductor is false, "
            "found 'inductor_standalone'",
        ),
        *(
            (
                fields,
                changes,
                "cudagraph_copy_inputs: wanted false where cudagraph_mode is not PIECEWISE at "
                "level 3, found True",
            )
            for fields, changes in (
                (PIECES, {"cudagraph_mode": "FULL_AND_PIECEWISE"}),
                ({**PIECES, "cudagraph_mode": None}, {"level": 2}),
            )
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused_and_their_neighbours_are_legal(
    fields: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    CompilationConfig(**fields)
    with pytest.raises(FieldError) as error:
        CompilationConfig(**{**fields, **changes})
    assert str(error.value) == f"compilation.{line}"


def test_what_means_the_same_is_equal_and_hashes_alike() -> None:
    listed = CompilationConfig(
        level=CompilationLevel.PIECEWISE,
        cudagraph_mode="full",  # type: ignore[arg-type]
        cuda_graph_sizes=[],  # type: ignore[arg-type]
        compile_sizes=[4, "cudagraph_capture_sizes"],  # type: ignore[arg-type]
        dynamic_shapes="Unbacked",  # type: ignore[arg-type]
        compile_ranges=[[9, 16], [1, 8]],  # type: ignore[arg-type]
        inductor_compile_config={"triton": {"cudagraphs": False}, "names": ["a"]},
        cache_dir="/cache",
    )
    exact = CompilationConfig(
        level=3,
        cudagraph_mode=CUDAGraphMode.FULL,
        cuda_graph_sizes=(512,),
        compile_sizes=(4, "cudagraph_capture_sizes"),
        dynamic_shapes=DynamicShapes.UNBACKED,
        compile_ranges=((1, 8), (9, 16)),
        inductor_compile_config={"triton.cudagraphs": False, "names": ("a",)},
        cache_dir="/cache",
    )
    assert listed == exact
    assert hash(listed) == hash(exact)
    assert hash(listed) != hash(dataclasses.replace(exact, inductor_compile_config={}))


def test_ops_may_be_spelled_as_torch_prints_them() -> None:
    given = ["lockstep.attention", "lockstep::moe", "aten.mm.default", "aten::mm.out"]
    assert CompilationConfig(splitting_ops=given).splitting_ops == (  # type: ignore[arg-type]
        "lockstep::attention",
        "lockstep::moe",
        "aten::mm.default",
        "aten::mm.out",
    )


SIZES = st.lists(st.integers(1, 4096), min_size=1, max_size=5)
PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just(0.5)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "level": st.just(3),
    "use_cudagraph": st.booleans(),
    "cudagraph_capture_sizes": st.none() | SIZES,
    "cuda_graph_sizes": SIZES,
    "cudagraph_mode": st.none() | st.sampled_from(MODES),
    "splitting_ops": st.none() | st.just(["lockstep::attention", "aten.mm.default"]),
    "cudagraph_copy_inputs": st.just(False),
    "use_inductor": st.booleans(),
    "compile_sizes": st.none() | st.lists(st.integers(1, 9) | st.just("cudagraph_capture_sizes")),
    "inductor_compile_config": st.dictionaries(st.sampled_from("abc"), PLAIN | st.lists(PLAIN)),
    "debug_dump_path": st.text(max_size=4),
    "cache_dir": st.text(max_size=4),
    "compiler": st.sampled_from(["auto", "eager"]),
    "compile_ranges": st.sampled_from([[], [[1, 1]], [[4, 9], [1, 2]]]),
    "compile_lazily": st.booleans(),
    "dynamic_shapes": st.sampled_from(DynamicShapes),
    "evaluate_guards": st.just(False),
    "share_artifacts": st.booleans(),
    "compile_cache_save_format": st.none() | st.sampled_from(["binary", "unpacked"]),
    "capture_num_tokens": st.none() | SIZES,
    "enable_padding": st.booleans(),
    "num_warmups_full": st.integers(0, 5),
    "num_warmups_piecewise": st.integers(0, 5),
    "graph_pool": st.sampled_from(["shared", "per_bucket"]),
    "poison_graph_pool": st.booleans(),
    "reserve_graph_memory": st.none() | st.booleans(),
    "capture_logits": st.none() | st.booleans(),
    "sealed": st.just("warn"),
    "serve_while_compiling": st.sampled_from(["auto", "off"]),
    "passes": st.none() | st.lists(st.sampled_from(["fuse", "reinplace"]), unique=True),
    "max_num_streams": st.integers(1, 16),
    "enable_userbuffers": st.booleans(),
}

CONFIGS = st.fixed_dictionaries(
    {"level": VALUES["level"]}, optional={name: VALUES[name] for name in FIELDS[1:]}
)


@given(CONFIGS)
def test_every_configuration_survives_json_pickling_and_copying(values: dict[str, Any]) -> None:
    assert list(VALUES) == list(FIELDS)
    config = CompilationConfig(**values)
    assert CompilationConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert dataclasses.replace(config) == config
