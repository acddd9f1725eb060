"""TensorRT-LLM's and vLLM's spellings mean fields of `CompilationConfig`, or are refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from compile.config import CompilationConfig, CUDAGraphMode, DynamicShapes
from compile.errors import FieldError
from serve.arguments import parse_args
from serve.compilation import generation_sizes

NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH = CUDAGraphMode


def fields_of(given: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return the compilation fields that arguments stand for."""
    return parse_args({"compilation": given, **sections}).compilation


ON: dict[str, Any] = {"enable_piecewise_cuda_graph": True}
OFF: dict[str, Any] = {"enable_piecewise_cuda_graph": False}


@pytest.mark.feature("N05")
@pytest.mark.parametrize(
    ("sections", "level", "mode"),
    [
        ({"torch_compile_config": {}}, 3, DECODE_ONLY),
        ({"torch_compile_config": OFF}, 3, DECODE_ONLY),
        ({"torch_compile_config": ON}, 3, BOTH),
        ({"torch_compile_config": ON, "cuda_graph_config": {}}, 3, BOTH),
        ({"torch_compile_config": ON, "cuda_graph_config": None}, 3, PIECEWISE),
        ({"torch_compile_config": OFF, "cuda_graph_config": {}}, 3, DECODE_ONLY),
        ({"torch_compile_config": OFF, "cuda_graph_config": None}, 3, NONE),
        ({"torch_compile_config": None}, 0, NONE),
        ({"torch_compile_config": None, "cuda_graph_config": {}}, 0, DECODE_ONLY),
        ({"torch_compile_config": None, "cuda_graph_config": None}, 0, NONE),
        ({"cuda_graph_config": None}, None, NONE),
        ({"cuda_graph_config": {}}, None, None),
        ({}, None, None),
    ],
)
def test_the_two_sections_switch_level_and_mode(
    sections: dict[str, Any], level: int | None, mode: CUDAGraphMode | None
) -> None:
    fields = fields_of({}, **sections)
    assert (fields.get("level"), fields.get("cudagraph_mode")) == (level, mode)
    CompilationConfig(**fields)


@pytest.mark.feature("N05")
def test_every_field_of_the_sections_has_a_meaning() -> None:
    fields = fields_of(
        {},
        torch_compile_config={
            "enable_fullgraph": True,
            "enable_inductor": True,
            "enable_piecewise_cuda_graph": True,
            "capture_num_tokens": [128, 64, 64],
            "enable_userbuffers": False,
            "max_num_streams": 1,
        },
        cuda_graph_config={"batch_sizes": [3, 1], "max_batch_size": 3, "enable_padding": True},
    )
    assert fields == {
        "level": 3,
        "cudagraph_mode": BOTH,
        "use_inductor": True,
        "capture_num_tokens": (128, 64, 64),
        "cudagraph_capture_sizes": (3, 1),
        "enable_padding": True,
    }


@pytest.mark.feature("N05")
def test_defaults_are_those_of_the_sections() -> None:
    assert fields_of({}, torch_compile_config=ON, cuda_graph_config={}) == {
        "level": 3,
        "cudagraph_mode": BOTH,
        "use_inductor": False,
        "enable_padding": False,
        "cudagraph_capture_sizes": (*range(1, 33), 64, 128),
    }


@pytest.mark.parametrize(
    ("largest", "padding", "wanted"),
    [
        (128, True, (1, 2, 4, *range(8, 129, 8))),
        (128, False, (*range(1, 33), 64, 128)),
        (1024, True, (1, 2, 4, *range(8, 129, 8), 256, 512, 1024)),
        (700, False, (*range(1, 33), 64, 128, 256, 512, 700)),
        (20, True, (1, 2, 4, 8, 16, 20)),
        (3, False, (1, 2, 3)),
        (1, True, (1,)),
    ],
)
def test_sizes_up_to_a_largest_batch(largest: int, padding: bool, wanted: tuple[int, ...]) -> None:
    assert generation_sizes(largest, enable_padding=padding) == [*wanted]
    section = {"max_batch_size": largest, "enable_padding": padding}
    assert fields_of({}, cuda_graph_config=section)["cudagraph_capture_sizes"] == wanted


@pytest.mark.feature("N05")
@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"torch_compile_config": {"enable_fullgraph": False}},
            "torch_compile_config.enable_fullgraph: wanted true (a forward is always one graph), "
            "found False",
        ),
        (
            {"torch_compile_config": {"enable_userbuffers": True}},
            "torch_compile_config.enable_userbuffers: wanted false (user buffers are not built "
            "yet), found True",
        ),
        (
            {"torch_compile_config": {"max_num_streams": 2}},
            "torch_compile_config.max_num_streams: wanted 1 (several streams are not built yet), "
            "found 2",
        ),
        (
            {"torch_compile_config": {"max_num_streams": 0}},
            "torch_compile_config.max_num_streams: wanted a whole number of at least 1, found 0",
        ),
        (
            {"torch_compile_config": {"capture_num_tokens": [0]}},
            "torch_compile_config.capture_num_tokens: wanted a list of whole numbers from 1 to "
            "1048576, or null, found [0]",
        ),
        (
            {"torch_compile_config": {"colour": 1}},
            "torch_compile_config.colour: wanted one of enable_fullgraph, enable_inductor, "
            "enable_piecewise_cuda_graph, capture_num_tokens, enable_userbuffers, "
            "max_num_streams, found 1",
        ),
        (
            {"cuda_graph_config": True},
            "cuda_graph_config: wanted object | null, found True",
        ),
        (
            {"cuda_graph_config": {"batch_sizes": [1, 8], "max_batch_size": 16}},
            "cuda_graph_config.max_batch_size: wanted 8, the largest of "
            "cuda_graph_config.batch_sizes, found 16",
        ),
    ],
)
def test_what_a_section_cannot_hold_is_refused_by_name(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(FieldError) as error:
        fields_of({}, **sections)
    assert str(error.value) == line
    assert str(pickle.loads(pickle.dumps(error.value))) == line


@pytest.mark.feature("N05")
@pytest.mark.parametrize(
    ("field", "value", "sections", "alias"),
    [
        (
            "capture_num_tokens",
            [4],
            {"torch_compile_config": {"capture_num_tokens": [4]}},
            "torch_compile_config.capture_num_tokens",
        ),
        (
            "use_inductor",
            True,
            {"torch_compile_config": {"enable_inductor": True}},
            "torch_compile_config.enable_inductor",
        ),
        (
            "cudagraph_mode",
            "FULL",
            {"torch_compile_config": ON},
            "torch_compile_config.enable_piecewise_cuda_graph",
        ),
        ("level", 0, {"torch_compile_config": None}, "torch_compile_config"),
        (
            "enable_padding",
            True,
            {"cuda_graph_config": {"enable_padding": False}},
            "cuda_graph_config.enable_padding",
        ),
        (
            "cudagraph_capture_sizes",
            [4],
            {"cuda_graph_config": {"batch_sizes": [4]}},
            "cuda_graph_config.batch_sizes",
        ),
        (
            "cudagraph_capture_sizes",
            [4],
            {"cuda_graph_config": {"max_batch_size": 4}},
            "cuda_graph_config.max_batch_size",
        ),
    ],
)
def test_a_field_is_given_by_one_name(
    field: str, value: Any, sections: dict[str, Any], alias: str
) -> None:
    with pytest.raises(FieldError) as error:
        fields_of({field: value}, **sections)
    wanted = f"{alias}: wanted nothing where compilation.{field} is given, found 'both'"
    assert str(error.value) == wanted


@pytest.mark.feature("N05")
def test_defaults_of_a_section_give_way_to_the_field() -> None:
    given = {
        "level": 2,
        "use_inductor": True,
        "cudagraph_mode": FULL,
        "enable_padding": True,
        "cudagraph_capture_sizes": (4,),
    }
    assert fields_of(given, torch_compile_config={}, cuda_graph_config={}) == given


def test_text_means_what_json_means() -> None:
    key = "torch_compile_config"
    text = {f"{key}.enable_piecewise_cuda_graph": "True", f"{key}.capture_num_tokens": "[1, 2]"}
    fields = parse_args({"compilation.level": "3", **text}).compilation
    assert fields["cudagraph_mode"] is BOTH
    assert fields["capture_num_tokens"] == (1, 2)


def test_dynamic_shapes_may_be_given_as_vllm_does() -> None:
    given = {"dynamic_shapes_config": {"type": "backed", "evaluate_guards": "true"}}
    assert fields_of(given) == {"dynamic_shapes": DynamicShapes.BACKED, "evaluate_guards": True}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"dynamic_shapes_config": {"type": "backed"}, "dynamic_shapes": "backed"},
            "dynamic_shapes_config.type: wanted nothing where compilation.dynamic_shapes is given",
        ),
        (
            {"dynamic_shapes_config": {"kind": "backed"}},
            "dynamic_shapes_config.kind: wanted one of type, evaluate_guards, found 'backed'",
        ),
        (
            {"dynamic_shapes_config": "backed"},
            "dynamic_shapes_config: wanted an object with type, evaluate_guards, found 'backed'",
        ),
    ],
)
def test_other_dynamic_shapes_are_refused_by_name(given: dict[str, Any], line: str) -> None:
    with pytest.raises(FieldError) as error:
        fields_of(given)
    assert str(error.value).startswith(f"compilation.{line}")
