"""The dashed forms of vLLM mean what dotted keys and JSON mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compile.config import CUDAGraphMode
from compile.errors import FieldError
from serve.arguments import parse_args, split_dashed


def split_arguments(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return compilation fields as they are kept, and all other arguments."""
    fields, others = split_dashed(arguments)
    return parse_args(fields).compilation, others


@pytest.mark.feature("Q01")
@pytest.mark.parametrize("arguments", [["-O3"], ["-O", "3"], ["-O=3"], ["-cc.level=3"]])
def test_a_level_has_a_short_form(arguments: list[str]) -> None:
    assert split_arguments(arguments) == ({"level": 3}, [])


@pytest.mark.feature("Q01")
def test_dashed_forms_and_json_are_merged_in_depth() -> None:
    options = {"inductor_compile_config": {"max_autotune": True}, "cudagraph_mode": "FULL"}
    fields, others = split_arguments(
        [
            "model",
            "-O2",
            "-cc",
            json.dumps(options),
            "-cc.inductor_compile_config.triton.cudagraphs=false",
            "--max-num-seqs=8",
            "--compilation-config.compile_sizes=[1, 2]",
            "--compilation_config",
            '{"dynamic_shapes_config": {"type": "unbacked"}}',
            "-cc.dynamic_shapes_config.evaluate_guards=false",
            "-cc.cache_dir=/a=b",
            "--port",
            "1",
        ]
    )
    assert {**fields, "dynamic_shapes": fields["dynamic_shapes"].name} == {
        "level": 2,
        "inductor_compile_config": {"max_autotune": True, "triton.cudagraphs": False},
        "cudagraph_mode": CUDAGraphMode.FULL,
        "compile_sizes": (1, 2),
        "dynamic_shapes": "UNBACKED",
        "evaluate_guards": False,
        "cache_dir": "/a=b",
    }
    assert others == ["model", "--max-num-seqs=8", "--port", "1"]


@pytest.mark.feature("Q01")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-O9"], "compilation.level: wanted a level from 0 to 3, found 9"),
        (["-O"], "-O: wanted a value, found 'the end of the line'"),
        (["-cc.colour=1"], "compilation.colour: wanted one of level, "),
        (["-cc.level=1", "-O1"], "compilation.level: wanted one value, found 'it twice'"),
        (["-cc", '{"level": 1}', "-O1"], "compilation.level: wanted one value, found 'it twice'"),
        (["-cc", "three"], "compilation: wanted object, found 'three'"),
        (["-cc.level"], "-cc.level: wanted a value, found 'the end of the line'"),
        (["-cc.level=1", "-cc.level.x=1"], "compilation.level.x: wanted level to have fields"),
        (["-cc.level.x=1", "-cc.level=1"], "compilation.level: wanted one value"),
        (["-cc.use_cudagraph=maybe"], "compilation.use_cudagraph: wanted true or false, found"),
    ],
)
def test_a_bad_form_is_one_line(arguments: list[str], line: str) -> None:
    with pytest.raises(FieldError) as error:
        split_arguments(arguments)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("rest", [["-Ofast"], ["-c", "x"], ["--", "-O3"], ["-ccx=1"], []])
def test_other_arguments_are_left_alone(rest: list[str]) -> None:
    found: tuple[dict[str, Any], list[str]] = split_arguments(rest)
    assert found == ({}, rest)
