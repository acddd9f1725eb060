"""Compilation fields as arguments: what they are called, what they become in each pool."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import SchedulerConfig
from compile.config import FIELDS, WANTED, CompilationConfig, CUDAGraphMode, DynamicShapes
from compile.errors import FieldError
from serve.arguments import parse_args
from serve.compilation import requested, resolved
from serve.config import deploy_config, engine_config
from serve.llm import LLM

NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH = CUDAGraphMode

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
}
"""Every field as YAML has it, none of them at its default where another value is run already."""


def as_text(value: Any) -> str:
    """Return a value as `key=value` has it."""
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.feature("A08")
def test_every_field_reaches_the_engine_from_text_and_from_yaml() -> None:
    assert list(OTHER) == list(FIELDS)
    by_text = engine_config(
        {f"compilation.{name}": as_text(value) for name, value in OTHER.items()}
    )
    by_alias = engine_config({f"cc.{name}": as_text(value) for name, value in OTHER.items()})
    by_yaml = engine_config({"compilation": yaml.safe_load(yaml.safe_dump(OTHER))})
    assert by_text == by_alias == by_yaml
    found = by_text.compilation.to_dict()
    # Batch sizes are resolved to an ascending list.
    assert {name: found[name] for name in FIELDS} == OTHER
    assert found["graph_bs"] == [2, 4]


@pytest.mark.feature("Q01")
def test_aliases_and_json_mean_the_same() -> None:
    wanted = parse_args({"compilation": {"level": 3, "compile_sizes": [1], "sealed": "strict"}})
    for raw in (
        {"O": "3", "cc.compile_sizes": "[1]", "cc.sealed": "strict"},
        {"cc": '{"level": 3, "compile_sizes": [1]}', "compilation.sealed": "strict"},
        {"compilation_config": {"level": 3, "compile_sizes": [1], "sealed": "strict"}},
    ):
        assert parse_args(raw) == wanted
    assert wanted.compilation == {"level": 3, "compile_sizes": (1,), "sealed": "strict"}


@pytest.mark.feature("Q01")
def test_objects_are_merged_in_depth_and_a_value_twice_is_an_error() -> None:
    raw = {
        "cc.inductor_compile_config.max_autotune": "true",
        "cc": {"inductor_compile_config": {"triton": {"cudagraphs": False}}, "level": 2},
    }
    assert parse_args(raw).compilation == {
        "inductor_compile_config": {"max_autotune": True, "triton.cudagraphs": False},
        "level": 2,
    }
    with pytest.raises(FieldError, match=r"^compilation\.level: wanted one value, found"):
        parse_args({**raw, "O": "2"})


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"O": "7"}, "compilation.level: wanted a level from 0 to 3, found 7"),
        ({"cc.cudagraph_mode": "half"}, "compilation.cudagraph_mode: wanted one of NONE, PIECEW"),
        (
            {"O": "0", "cc.cudagraph_mode": "PIECEWISE"},
            "compilation.cudagraph_mode: wanted NONE, FULL or FULL_DECODE_ONLY at level 0",
        ),
        (
            {"cc.sealed": "strict", "cc.compile_lazily": "true"},
            "compilation.compile_lazily: wanted false where sealed is strict",
        ),
        (
            {"cc.serve_while_compiling": "on", "cc.compile_lazily": "true"},
            "compilation.serve_while_compiling: wanted auto or off where compile_lazily is true",
        ),
        (
            {"cc.serve_while_compiling": "later"},
            "compilation.serve_while_compiling: wanted one of auto, on, off, found 'later'",
        ),
        ({"cc.compile_ranges": "[[1, 8], [8, 9]]"}, "compilation.compile_ranges: wanted a list of"),
        ({"cc.capture_num_tokens": "[0]"}, "compilation.capture_num_tokens: wanted a list of"),
        (
            {"cc.splitting_ops": '["lockstep::rms_norm", "lockstep::nothing"]'},
            "compilation.splitting_ops: wanted names of registered ops such as lockstep::unified_",
        ),
        (
            {"cc.inductor_compile_config": '{"max_autotune": true, "nonsense": 1}'},
            "compilation.inductor_compile_config: wanted an option of torch._inductor, such as ",
        ),
        ({"compilation": "three"}, "compilation: wanted object, found 'three'"),
        ({"enforce_eager": "perhaps"}, "enforce_eager: wanted bool, found 'perhaps'"),
        (
            {"speculative_config": {"decoding_type": "MTP"}},
            "speculative_config: wanted nothing (speculation is not built yet), found {'dec",
        ),
    ],
)
def test_a_bad_argument_is_one_line(raw: dict[str, Any], line: str) -> None:
    for build in (deploy_config, engine_config):
        with pytest.raises(FieldError) as caught:
            build(raw)
        assert str(caught.value).startswith(line)
        assert "\n" not in str(caught.value)


@pytest.mark.feature("A08")
def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    for name, value in (("colour", "red"), ("graph_bs", [1])):
        with pytest.raises(FieldError) as error:
            parse_args({"compilation": {"level": 1, name: value}})
        wanted = f"compilation.{name}: wanted one of {', '.join(FIELDS)}, found {value!r}"
        assert str(error.value) == wanted


@pytest.mark.feature("A08")
@pytest.mark.parametrize(
    "given",
    [
        {"use_cudagraph": "maybe"},
        {"cudagraph_capture_sizes": ["few"]},
        {"compile_sizes": [None]},
        {"compile_ranges": [[1]]},
        {"num_warmups_full": "1.5"},
        {"debug_dump_path": 1},
        {"dynamic_shapes": None},
        {"inductor_compile_config": {"a": float("nan")}},
    ],
)
def test_a_value_of_another_type_is_refused_in_the_words_of_its_field(
    given: dict[str, Any],
) -> None:
    [name] = given
    with pytest.raises(FieldError) as error:
        parse_args({"compilation": given})
    assert (error.value.field, error.value.wanted) == (f"compilation.{name}", WANTED[name])


def test_a_path_and_words_that_yaml_reads_as_booleans_are_understood() -> None:
    given = {"cache_dir": Path("/cache"), "serve_while_compiling": False}
    fields = parse_args({"compilation": given}).compilation
    assert fields == {"cache_dir": "/cache", "serve_while_compiling": "off"}


@pytest.mark.feature("E01", "F07")
def test_only_a_start_that_names_ops_or_options_imports_torch_for_them() -> None:
    """`serve run` is a second faster at every other start, and 180 MB smaller."""
    builds = "import sys, json; from serve.config import deploy_config; "
    builds += "deploy_config(json.loads(sys.argv[1])); print('torch' in sys.modules)"
    for raw, wanted in (
        ({}, "False"),
        ({"cc.inductor_compile_config.max_autotune": "true"}, "True"),
    ):
        given = json.dumps({"device": "cpu", **raw})
        done = subprocess.run([sys.executable, "-c", builds, given], capture_output=True, text=True)
        assert done.stdout.strip() == wanted, done.stderr


@pytest.mark.feature("X06")
def test_pools_serve_while_they_compile_and_an_engine_in_process_does_not() -> None:
    for raw, wanted in (({}, "on"), ({"cc.serve_while_compiling": "off"}, "off")):
        pools = deploy_config({**raw, "device": "cpu"}).pools
        assert {pool.engine.compilation.serve_while_compiling for pool in pools} == {wanted}
    assert engine_config({"device": "cpu"}).compilation.serve_while_compiling == "off"
    by_yaml = yaml.safe_load("compilation: {serve_while_compiling: on}")
    assert deploy_config({**by_yaml, "device": "cpu"}).pools[0].engine.compilation == (
        deploy_config({"device": "cpu"}).pools[0].engine.compilation
    )
    with pytest.raises(FieldError, match=r"^compilation\.serve_while_compiling: wanted auto or of"):
        engine_config({**by_yaml, "device": "cpu"})


@pytest.mark.feature("N04")
@pytest.mark.parametrize("name", ["mtp_eagle_one_model", "eagle3_one_model"])
def test_speculation_with_two_model_engines_is_refused_by_the_field(name: str) -> None:
    for value in (False, "false", "False"):
        with pytest.raises(FieldError) as error:
            deploy_config({f"speculative_config.{name}": value, "O": "3"})
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


# What ranks run.

SCHEDULER = SchedulerConfig(64, 2048)


@pytest.mark.feature("A10")
def test_servers_and_llm_default_to_level_3() -> None:
    assert requested(parse_args({}).compilation).level == 3
    assert requested(parse_args({"O": "1"}).compilation).level == 1
    assert requested({}).cudagraph_mode is None


@pytest.mark.feature("Q02")
@pytest.mark.parametrize(
    ("pool", "mode"), [("prefill", PIECEWISE), ("decode", DECODE_ONLY), ("mixed", BOTH)]
)
def test_a_pool_has_the_mode_that_fits_its_steps(pool: str, mode: CUDAGraphMode) -> None:
    found = resolved({}, SCHEDULER, pool, enforce_eager=False, device="cuda")
    assert (found.level, found.cudagraph_mode) == (3, mode)
    assert found.graph_bs == (1, 2, 4, 8, 16, 32, 48, 64)
    assert found.capture_num_tokens == (1, 2, 4, 8, 16, 32, 64, 128, *range(256, 2049, 256))
    for asked in CUDAGraphMode:
        fields = parse_args({"cc.cudagraph_mode": asked.name}).compilation
        found = resolved(fields, SCHEDULER, pool, enforce_eager=False, device="cuda")
        assert found.cudagraph_mode is asked
    for level in (0, 1, 2):
        found = resolved({"level": level}, SCHEDULER, pool, enforce_eager=False, device="cuda")
        assert (found.level, found.cudagraph_mode) == (level, NONE)


@pytest.mark.feature("N03", "C05")
def test_a_cpu_captures_pieces_of_few_tokens_and_warms_none_up_unless_asked_to() -> None:
    found = resolved({}, SCHEDULER, "prefill", enforce_eager=False, device="cpu")
    assert found.capture_num_tokens == (1, 2, 4, 8, 16, 32, 64)
    assert (found.num_warmups_full, found.num_warmups_piecewise) == (0, 0)
    assert found.graph_bs == (1, 2, 4, 8, 16, 32, 48, 64)
    asked = {"capture_num_tokens": (8, 512), "num_warmups_piecewise": 2}
    found = resolved(asked, SCHEDULER, "prefill", enforce_eager=False, device="cpu")
    assert found.capture_num_tokens == (8, 512)
    assert (found.num_warmups_full, found.num_warmups_piecewise) == (0, 2)
    found = resolved({}, SCHEDULER, "prefill", enforce_eager=False, device="cuda")
    assert (found.num_warmups_full, found.num_warmups_piecewise) == (1, 3)


def test_no_size_left_is_an_error_before_anything_starts() -> None:
    with pytest.raises(FieldError, match=r"^compilation\.cudagraph_capture_sizes: wanted a size"):
        resolved(
            {"cudagraph_capture_sizes": (65,)},
            SCHEDULER,
            "decode",
            enforce_eager=False,
            device="cuda",
        )


@pytest.mark.parametrize(
    "raw",
    [
        {"O": "3", "cc.cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"torch_compile_config": {"enable_piecewise_cuda_graph": True}},
    ],
)
def test_enforce_eager_wins_over_level_and_mode(raw: dict[str, Any]) -> None:
    for pool in deploy_config({**raw, "enforce_eager": "true"}).pools:
        config = pool.engine.compilation
        assert (config.level, config.cudagraph_mode) == (0, NONE)
    assert engine_config({**raw, "enforce_eager": True}).compilation.level == 0


@pytest.mark.feature("N05")
def test_sections_of_another_engines_yaml_are_understood(tmp_path: Path) -> None:
    (tmp_path / "extra.yaml").write_text(
        """
cuda_graph_config:
  enable_padding: true
  max_batch_size: 16
torch_compile_config:
  capture_num_tokens: [64, 8]
  enable_userbuffers: false
  enable_piecewise_cuda_graph: true
"""
    )
    args = parse_args(yaml.safe_load((tmp_path / "extra.yaml").read_text()))
    found = resolved(args.compilation, SCHEDULER, "mixed", enforce_eager=False, device="cuda")
    assert (found.level, found.cudagraph_mode) == (3, BOTH)
    assert (found.graph_bs, found.capture_num_tokens) == ((1, 2, 4, 8, 16), (8, 64))
    assert (found.enable_padding, found.use_inductor) == (True, False)
    assert parse_args({"torch_compile_config": "null"}).compilation["level"] == 0


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("level",)])
def test_every_field_but_paths_changes_what_processes_agree_on(name: str) -> None:
    """A field at its default is compared as well, so nobody may leave it out."""
    value = {"sealed": "strict", "cudagraph_copy_inputs": True}.get(name, OTHER[name])
    raw: dict[str, Any] = {"compilation": {name: value}}
    is_local = name in ("cache_dir", "debug_dump_path")
    assert (deploy_config(raw).config_hash == deploy_config({}).config_hash) == is_local


def test_levels_that_differ_are_noticed() -> None:
    hashes = {deploy_config(raw).config_hash for raw in ({}, {"O": "0"}, {"enforce_eager": "true"})}
    assert len(hashes) == 3
    again = deploy_config({"compilation": {"level": 0}})
    assert again.config_hash == deploy_config({"O": "0"}).config_hash


@pytest.mark.feature("Q01")
def test_a_level_fields_and_a_configuration_are_taken_alike() -> None:
    for given in (2, "2", {"level": 2}, '{"level": 2}'):
        assert parse_args({"compilation_config": given}).compilation == {"level": 2}
    config = CompilationConfig(
        level=3, cudagraph_capture_sizes=(1, 2), dynamic_shapes=DynamicShapes.UNBACKED
    )
    for built in (config, replace(config, graph_bs=(1,))):
        assert CompilationConfig(**parse_args({"compilation": built}).compilation) == config
    # A configuration says its level, a bare one that nothing is compiled.
    assert engine_config({"compilation": CompilationConfig()}).compilation.level == 0
    with pytest.raises(FieldError, match=r"^compilation\.level: wanted one value"):
        parse_args({"compilation": config, "O": 3})


def test_llm_checks_its_configuration_before_it_loads_anything() -> None:
    for given in (7, {"level": 7}, '{"level": 7}'):
        with pytest.raises(FieldError, match=r"^compilation\.level: wanted a level from 0 to 3"):
            LLM("/no/such/model", compilation_config=given)
