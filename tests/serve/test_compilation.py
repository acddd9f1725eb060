"""Compilation fields as arguments: how they are spelled, and what they become in each pool."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import EngineConfig, SpeculationConfig
from compile.config import (
    FIELDS,
    KEYED_FIELDS,
    WANTED,
    CompilationConfig,
    CUDAGraphMode,
    DynamicShapes,
)
from compile.errors import FieldError
from compile.resolve import StepLimits
from serve.arguments import parse_args
from serve.config import deploy_config, offline_pool
from serve.llm import LLM

NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH = CUDAGraphMode
COMPILES, GRAPHS = "torch_compile_config", "cuda_graph_config"
ON: dict[str, Any] = {"enable_piecewise_cuda_graph": True}
OFF: dict[str, Any] = {"enable_piecewise_cuda_graph": False}
SIZES = (1, 2, 4, 8, 16, 32, 48, 64)
CPU_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
NGRAM = {"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": "3"}

OTHER: dict[str, Any] = {
    "level": 0,
    "use_cudagraph": False,
    "cudagraph_capture_sizes": [2, 4],
    "cuda_graph_sizes": [24],
    "cudagraph_mode": "NONE",
    "splitting_ops": ["lockstep::rms_norm"],
    "cudagraph_copy_inputs": False,
    "use_inductor": False,
    "compile_sizes": [1, 2],
    "inductor_compile_config": {"max_autotune": True, "triton.cudagraphs": False},
    "debug_dump_path": "/dump",
    "cache_dir": "/cache",
    "compiler": "eager",
    "compile_ranges": [[1, 8]],
    "compile_lazily": True,
    "dynamic_shapes": "BACKED",
    "evaluate_guards": True,
    "share_artifacts": False,
    "compile_cache_save_format": "unpacked",
    "capture_num_tokens": [4, 8],
    "enable_padding": False,
    "num_warmups_full": 2,
    "num_warmups_piecewise": 4,
    "graph_pool": "per_bucket",
    "poison_graph_pool": True,
    "reserve_graph_memory": True,
    "capture_logits": True,
    "sealed": "warn",
    "serve_while_compiling": "off",
    "passes": ["fuse_add_rms_norm"],
    "max_num_streams": 1,
    "enable_userbuffers": False,
}
"""Every field as YAML has it, none of them at its default where another value is run already."""


def engine_of(raw: dict[str, Any]) -> EngineConfig:
    """Return that of an engine without a server."""
    return offline_pool(raw).engine


def fields_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the compilation fields that arguments stand for."""
    return parse_args(raw).compilation


def pools(**raw: Any) -> list[CompilationConfig]:
    """Return what a prefill and a decode pool run, or a mixed one."""
    return [pool.engine.compilation for pool in deploy_config(raw).pools]


# Spellings.


@pytest.mark.feature("A08")
def test_every_field_reaches_the_engine_from_text_and_from_yaml() -> None:
    assert list(OTHER) == list(FIELDS)
    text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in OTHER.items()}
    by_text = engine_of({f"compilation.{name}": value for name, value in text.items()})
    by_alias = engine_of({f"cc.{name}": value for name, value in text.items()})
    by_yaml = engine_of({"compilation": yaml.safe_load(yaml.safe_dump(OTHER))})
    assert by_text == by_alias == by_yaml
    found = by_text.compilation.to_dict()
    # Batch sizes are resolved to an ascending list.
    assert {name: found[name] for name in FIELDS} == OTHER
    assert found["graph_bs"] == [2, 4]


@pytest.mark.feature("Q01")
def test_levels_objects_json_and_configurations_mean_the_same() -> None:
    wanted = {"level": 2, "compile_sizes": (1,), "sealed": "strict"}
    for raw in (
        {"compilation": {"level": 2, "compile_sizes": [1], "sealed": "strict"}},
        {"O": "2", "cc.compile_sizes": "[1]", "cc.sealed": "strict"},
        {"cc": '{"level": 2, "compile_sizes": [1]}', "compilation.sealed": "strict"},
    ):
        assert fields_of(raw) == wanted
    for given in (2, "2", {"level": 2}, '{"level": 2, "dynamic_shapes_config": {}}'):
        assert fields_of({"compilation_config": given}) == {"level": 2}
    shapes = DynamicShapes.UNBACKED
    config = CompilationConfig(level=3, cudagraph_capture_sizes=(1, 2), dynamic_shapes=shapes)
    for built in (config, replace(config, graph_bs=(1,))):
        assert CompilationConfig(**fields_of({"compilation": built})) == config
    # A configuration says its level, a bare one that nothing is compiled.
    assert engine_of({"compilation": CompilationConfig()}).compilation.level == 0


@pytest.mark.feature("Q01")
def test_objects_are_merged_in_depth() -> None:
    raw = {
        "cc.inductor_compile_config.max_autotune": "true",
        "cc": {"inductor_compile_config": {"triton": {"cudagraphs": False}}, "level": 2},
    }
    options = {"max_autotune": True, "triton.cudagraphs": False}
    assert fields_of(raw) == {"inductor_compile_config": options, "level": 2}


def test_paths_members_and_words_that_yaml_reads_as_booleans_are_understood() -> None:
    given = {"cache_dir": Path("/cache"), "serve_while_compiling": False, "cudagraph_mode": FULL}
    assert fields_of({"compilation": given}) == {
        "level": 3,
        "cache_dir": "/cache",
        "serve_while_compiling": "off",
        "cudagraph_mode": FULL,
    }


@pytest.mark.feature("A08")
def test_a_value_of_another_type_is_refused_in_the_words_of_its_field() -> None:
    for name in FIELDS:
        with pytest.raises(FieldError) as error:
            parse_args({"compilation": {name: [None]}})
        assert (error.value.field, error.value.wanted) == (f"compilation.{name}", WANTED[name])


KNOWN = f"one of {', '.join(FIELDS)}"
LEVEL, SHAPES = "compilation.level: wanted ", "compilation.dynamic_shapes"
OPTIONS = "compilation.inductor_compile_config: wanted "


@pytest.mark.feature("A08", "Q01")
@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"O": "7"}, LEVEL + "a level from 0 to 3, found 7"),
        ({"cc.colour": "red"}, f"compilation.colour: wanted {KNOWN}, found 'red'"),
        ({"cc.graph_bs": "[1]"}, f"compilation.graph_bs: wanted {KNOWN}, found [1]"),
        ({"cc.level": "2", "O": "2"}, LEVEL + "one value, found 'it twice'"),
        ({"O": 3, "cc": CompilationConfig()}, LEVEL + "one value, found"),
        (
            {"cc.dynamic_shapes": "backed", "cc.dynamic_shapes_config.type": "backed"},
            SHAPES + ": wanted one value, found 'it twice'",
        ),
        (
            {"cc.dynamic_shapes_config.kind": "backed"},
            SHAPES + "_config.kind: wanted one of type, evaluate_guards, ",
        ),
        (
            {"cc.inductor_compile_config": {"a": float("nan")}},
            OPTIONS + "an object of plain values",
        ),
        (
            {"O": "1", "cc.cudagraph_mode": "PIECEWISE"},
            "compilation.cudagraph_mode: wanted NONE, FULL or FULL_DECODE_ONLY at level 1",
        ),
        (
            {"cc.cudagraph_capture_sizes": "[65]"},
            "compilation.cudagraph_capture_sizes: wanted a size of at most 64 (decoding sequences",
        ),
        (
            {"cc.num_warmups_full": "0", "device": "cuda"},
            "compilation.num_warmups_full: wanted at least 1 with device=cuda, found 0",
        ),
        (
            {"cc.splitting_ops": '["lockstep::rms_norm", "lockstep::nothing"]'},
            "compilation.splitting_ops: wanted names of registered ops such as lockstep::unified_",
        ),
        (
            {"cc.inductor_compile_config": '{"max_autotune": true, "nonsense": 1}'},
            OPTIONS + "an option of torch._inductor, such as ",
        ),
        ({"compilation": "three"}, "compilation: wanted object, found 'three'"),
        (
            {"speculative_config": '{"method": "medusa", "num_speculative_tokens": 2}'},
            "speculative_config.method: wanted ngram, mtp or deepseek_mtp, found 'medusa'",
        ),
        (
            {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 1}'},
            "speculative_config.method: wanted ngram for a model without one layer that predicts a "
            "token more (num_nextn_predict_layers=0), found 'mtp'",
        ),
        (
            {"speculative_config": {"method": "ngram"}},
            "speculative_config.num_speculative_tokens: wanted ",
        ),
        (
            {**NGRAM, "speculative_config.num_speculative_tokens": 65},
            "speculative_config.num_speculative_tokens: wanted 1 to 64, found 65",
        ),
        (
            {**NGRAM, "speculative_config.prompt_lookup_min": "6"},
            "speculative_config.prompt_lookup_min: wanted at most prompt_lookup_max (5), found 6",
        ),
        (
            {**NGRAM, "speculative_config.model": "small"},
            "speculative_config.model: wanted one of ",
        ),
        (
            {**NGRAM, "overlap": "on", "pools": "mixed"},
            "overlap: wanted auto or off with speculative_config ",
        ),
    ],
)
def test_a_bad_field_is_one_line(raw: dict[str, Any], line: str) -> None:
    for build in (deploy_config, offline_pool):
        with pytest.raises(FieldError) as caught:
            build(raw)
        assert str(caught.value).startswith(line)


def test_llm_checks_its_configuration_before_it_loads_anything() -> None:
    with pytest.raises(FieldError, match=r"^compilation\.level: wanted a level from 0 to 3"):
        LLM("/no/such/model", compilation_config=7)


@pytest.mark.feature("T05")
def test_pools_that_decode_draft_and_capture_graphs_for_it() -> None:
    prefill, decode = deploy_config({**NGRAM, "decode.max_num_seqs": 9, "max_num_seqs": 64}).pools
    assert (prefill.engine.speculation, prefill.engine.query_len) == (None, 1)
    assert decode.engine.speculation == SpeculationConfig(3)
    assert decode.engine.step_limits == StepLimits(9, 512, 4)
    # 100 sequences of 4 tokens are more than fit into a step of 256.
    few = deploy_config({**NGRAM, "max_num_seqs": 100, "max_num_batched_tokens": 256})
    assert max(few.pools[1].engine.compilation.graph_bs) == 64


@pytest.mark.feature("N04")
@pytest.mark.parametrize("name", ["mtp_eagle_one_model", "eagle3_one_model"])
def test_speculation_with_two_model_engines_is_refused_by_the_field(name: str) -> None:
    for value in (False, "false", "False"):
        with pytest.raises(FieldError) as error:
            deploy_config({**NGRAM, f"speculative_config.{name}": value, "O": "3"})
        assert str(error.value) == (
            f"speculative_config.{name}: wanted true (two model engines cannot be compiled as one "
            "forward), found False"
        )


@pytest.mark.feature("N04")
def test_a_multimodal_checkpoint_is_refused_by_its_architecture(tmp_path: Path) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FieldError, match=r"^model: .*architectures: .*LlavaForConditional"):
        deploy_config({"model": str(tmp_path), "O": "3"})


# TensorRT-LLM's sections.


@pytest.mark.feature("N05")
@pytest.mark.parametrize(
    ("sections", "level", "mode"),
    [
        ({COMPILES: {}}, 3, DECODE_ONLY),
        ({COMPILES: OFF}, 3, DECODE_ONLY),
        ({COMPILES: ON}, 3, BOTH),
        ({COMPILES: ON, GRAPHS: {}}, 3, BOTH),
        ({COMPILES: ON, GRAPHS: None}, 3, PIECEWISE),
        ({COMPILES: OFF, GRAPHS: {}}, 3, DECODE_ONLY),
        ({COMPILES: OFF, GRAPHS: None}, 3, NONE),
        ({COMPILES: None}, 0, NONE),
        ({COMPILES: "null"}, 0, NONE),
        ({COMPILES: None, GRAPHS: {}}, 0, DECODE_ONLY),
        ({COMPILES: None, GRAPHS: None}, 0, NONE),
        ({GRAPHS: None}, 3, NONE),
        ({GRAPHS: {}}, 3, None),
    ],
)
def test_the_two_sections_switch_level_and_mode(
    sections: dict[str, Any], level: int, mode: CUDAGraphMode | None
) -> None:
    fields = fields_of(sections)
    assert (fields["level"], fields.get("cudagraph_mode")) == (level, mode)


STATED: list[tuple[str, str, Any, str, Any]] = [
    (COMPILES, "enable_inductor", True, "use_inductor", True),
    (COMPILES, "enable_piecewise_cuda_graph", True, "cudagraph_mode", BOTH),
    (COMPILES, "capture_num_tokens", [128, 64, 64], "capture_num_tokens", (128, 64, 64)),
    (GRAPHS, "batch_sizes", [3, 1], "cudagraph_capture_sizes", (3, 1)),
    (GRAPHS, "max_batch_size", 3, "cudagraph_capture_sizes", (1, 2, 3)),
    (GRAPHS, "enable_padding", True, "enable_padding", True),
]


@pytest.mark.feature("N05")
@pytest.mark.parametrize(("section", "key", "value", "name", "wanted"), STATED)
def test_a_section_states_a_field_which_may_have_no_other_name(
    section: str, key: str, value: Any, name: str, wanted: Any
) -> None:
    text = {f"{section}.{key}": json.dumps(value)}
    assert fields_of({section: {key: value}}) == fields_of(text)
    assert fields_of(text)[name] == wanted
    with pytest.raises(FieldError) as error:
        parse_args({**text, f"cc.{name}": json.dumps(OTHER[name])})
    told = f"wanted nothing where compilation.{name} is given, found 'both'"
    assert str(error.value) == f"{section}.{key}: {told}"


@pytest.mark.feature("N05")
def test_defaults_of_the_sections_hold_where_the_field_is_not_given() -> None:
    sections: dict[str, Any] = {COMPILES: {}, GRAPHS: {}}
    assert fields_of(sections) == {
        "level": 3,
        "cudagraph_mode": DECODE_ONLY,
        "use_inductor": False,
        "enable_padding": False,
        "cudagraph_capture_sizes": (*range(1, 33), 64, 128),
    }
    stated = {"enable_userbuffers": True, "max_num_streams": 2}
    found = fields_of({COMPILES: stated})
    assert {name: found[name] for name in stated} == stated
    given = {
        "level": 2,
        "use_inductor": True,
        "cudagraph_mode": FULL,
        "enable_padding": True,
        "cudagraph_capture_sizes": (4,),
    }
    assert fields_of({"compilation": given, **sections}) == given


@pytest.mark.parametrize(
    ("largest", "padding", "wanted"),
    [
        (128, True, (1, 2, 4, *range(8, 129, 8))),
        (128, False, (*range(1, 33), 64, 128)),
        (1024, True, (1, 2, 4, *range(8, 129, 8), 256, 512, 1024)),
        (700, False, (*range(1, 33), 64, 128, 256, 512, 700)),
        (20, True, (1, 2, 4, 8, 16, 20)),
        (1, True, (1,)),
    ],
)
def test_sizes_up_to_a_largest_batch(largest: int, padding: bool, wanted: tuple[int, ...]) -> None:
    section = {"max_batch_size": largest, "enable_padding": padding}
    assert fields_of({GRAPHS: section})["cudagraph_capture_sizes"] == wanted


@pytest.mark.feature("N05")
@pytest.mark.parametrize(
    ("section", "given", "line"),
    [
        (
            COMPILES,
            {"enable_fullgraph": False},
            ".enable_fullgraph: wanted true (a forward is always one graph), found False",
        ),
        (
            COMPILES,
            {"enable_userbuffers": "on"},
            ".enable_userbuffers: wanted bool, found 'on'",
        ),
        (
            COMPILES,
            {"max_num_streams": 0},
            ".max_num_streams: wanted a whole number from 1 to 16, found 0",
        ),
        (
            COMPILES,
            {"capture_num_tokens": [0]},
            ".capture_num_tokens: wanted a list of whole numbers from 1 to 1048576, or null, "
            "found [0]",
        ),
        (COMPILES, {"colour": 1}, ".colour: wanted one of enable_fullgraph, enable_inductor, "),
        (GRAPHS, True, ": wanted object | null, found True"),
        (
            GRAPHS,
            {"batch_sizes": [1, 8], "max_batch_size": 16},
            ".max_batch_size: wanted 8, the largest of cuda_graph_config.batch_sizes, found 16",
        ),
    ],
)
def test_what_a_section_cannot_hold_is_refused_by_name(section: str, given: Any, line: str) -> None:
    with pytest.raises(FieldError) as error:
        parse_args({section: given})
    assert str(error.value).startswith(section + line)


# What ranks run.


@pytest.mark.feature("A10", "Q02")
def test_a_pool_has_the_mode_that_fits_its_steps() -> None:
    num_tokens = (1, 2, 4, 8, 16, 32, 64, 128, *range(256, 2049, 256))
    modes = {"pd": [PIECEWISE, DECODE_ONLY], "mixed": [BOTH]}
    for name, wanted in modes.items():
        found = pools(pools=name, device="cuda")
        assert [config.cudagraph_mode for config in found] == wanted
        for config in found:
            assert (config.level, config.graph_bs) == (3, SIZES)
            assert config.capture_num_tokens == num_tokens
            assert (config.num_warmups_full, config.num_warmups_piecewise) == (1, 3)
        for asked in CUDAGraphMode:
            raw = {"pools": name, "device": "cuda", "cc.cudagraph_mode": asked.name}
            assert {config.cudagraph_mode for config in pools(**raw)} == {asked}
        for level in (0, 1, 2):
            for config in pools(pools=name, device="cuda", O=level):
                assert (config.level, config.cudagraph_mode) == (level, NONE)
    assert engine_of({}).compilation.level == 3


@pytest.mark.feature("N03", "C05")
def test_a_cpu_captures_more_sizes_of_few_tokens_and_warms_none_up_unless_asked_to() -> None:
    for found in pools(device="cpu"):
        assert (found.capture_num_tokens, found.graph_bs) == (CPU_SIZES, CPU_SIZES)
        assert (found.num_warmups_full, found.num_warmups_piecewise) == (0, 0)
    for found in pools(device="cpu", **{"cc.cuda_graph_sizes": [48]}):
        assert found.graph_bs == (1, 2, 4, 8, 16, 32, 48)
    asked = {"cc.capture_num_tokens": [8, 512], "cc.num_warmups_piecewise": 2}
    for found in pools(device="cpu", **asked):
        assert found.capture_num_tokens == (8, 512)
        assert (found.num_warmups_full, found.num_warmups_piecewise) == (0, 2)


@pytest.mark.feature("X06")
def test_pools_serve_while_they_compile_and_an_engine_in_process_does_not() -> None:
    asked = yaml.safe_load("compilation: {serve_while_compiling: on}")
    for raw, wanted in (({}, "on"), (asked, "on"), ({"cc.serve_while_compiling": "off"}, "off")):
        assert {each.serve_while_compiling for each in pools(**raw, device="cpu")} == {wanted}
    assert engine_of({"device": "cpu"}).compilation.serve_while_compiling == "off"
    with pytest.raises(FieldError, match=r"^compilation\.serve_while_compiling: wanted auto or of"):
        engine_of({**asked, "device": "cpu"})


@pytest.mark.feature("A09")
@pytest.mark.parametrize(
    "raw", [{"O": "3", "cc.cudagraph_mode": "FULL_AND_PIECEWISE"}, {COMPILES: ON}]
)
def test_enforce_eager_wins_over_level_and_mode(raw: dict[str, Any]) -> None:
    for config in pools(**raw, enforce_eager="true"):
        assert (config.level, config.cudagraph_mode) == (0, NONE)


@pytest.mark.feature("X08")
def test_fields_that_change_generated_code_change_what_decides_tokens() -> None:
    """What ranks must agree on is more, all of what they are told."""
    default = deploy_config({})
    for name, value in {**OTHER, "sealed": "strict", "cudagraph_copy_inputs": True}.items():
        if name in ("max_num_streams", "enable_userbuffers"):
            continue  # a CPU has one stream, and user buffers need pieces without Inductor
        found = deploy_config({"compilation": {name: value}})
        changes_code = name in (*KEYED_FIELDS, "compiler")
        assert (found.numerics_hash != default.numerics_hash) == changes_code, name
        assert (found.config_hash != default.config_hash) == (found.pools != default.pools), name


@pytest.mark.feature("E01", "F07")
def test_only_a_start_that_names_ops_or_options_imports_torch_for_them(printed: Any) -> None:
    """`serve run` is a second faster at every other start, and 180 MB smaller."""
    builds = "import sys, json; from serve.config import deploy_config; "
    builds += "deploy_config(json.loads(sys.argv[1])); print('torch' in sys.modules)"
    for raw, wanted in (
        ({}, "False"),
        ({"cc.inductor_compile_config.max_autotune": "true"}, "True"),
    ):
        given = json.dumps({"device": "cpu", **raw})
        assert printed(sys.executable, "-c", builds, given).strip() == wanted
