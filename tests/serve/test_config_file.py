"""`config=FILE`: one file of arguments for a server and for an engine in process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile.config import CompilationConfig
from compile.errors import FieldError
from serve.config import deploy_config, engine_config

ROOT = Path(__file__).resolve().parents[2]

FILE = """
max_num_seqs: 8
kv_memory: 64MiB
lockstep: on
decode:
  replicas: 2
  num_cpus: 0.5
compilation_config:
  level: 2
  cudagraph_capture_sizes: [1, 2, 4]
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "arguments.yaml"
    path.write_text(FILE)
    return path


@pytest.mark.feature("Q05")
def test_a_file_means_what_its_arguments_mean(config_file: Path) -> None:
    text = {
        "max_num_seqs": "8",
        "kv_memory": "64MiB",
        "decode.replicas": "2",
        "decode.num_cpus": "0.5",
        "cc.level": "2",
        "cc.cudagraph_capture_sizes": "[1, 2, 4]",
    }
    assert deploy_config({"config": str(config_file)}) == deploy_config(text)
    beside = {"config": str(config_file), "max_model_len": "512", "decode.routing": "round_robin"}
    more = {**text, "max_model_len": "512", "decode.routing": "round_robin"}
    assert deploy_config(beside) == deploy_config(more)


@pytest.mark.feature("Q05")
@pytest.mark.parametrize(
    ("text", "beside", "line"),
    [
        ("colour: red", {}, "colour: wanted one of model, "),
        ("decode: {colour: red}", {}, "decode.colour: wanted one of replicas, "),
        ("compilation: {colour: 1}", {}, "compilation.colour: wanted one of level, "),
        ("decode: {replicas: many}", {}, "decode.replicas: wanted int, found 'many'"),
        ("decode: 2", {}, "decode: wanted object, found 2"),
        (
            "block_size: 8\nblock_size: 8",
            {},
            "block_size: wanted one value, found 'it twice",
        ),
        ("kv:\n  lease_s: 1\n  lease_s: 1", {}, "kv.lease_s: wanted one value, found 'it twice"),
        ("decode: {replicas: 2}\ndecode.replicas: 2", {}, "decode.replicas: wanted one value"),
        ("block_size: 8", {"block_size": "8"}, "block_size: wanted one value, found 'it twice'"),
        ("decode: {replicas: 2}", {"decode.replicas": "2"}, "decode.replicas: wanted one value"),
        ("compilation_config: {level: 1}", {"O": "1"}, "compilation.level: wanted one value"),
        ("api_keys: [sesame, 7]", {}, "api_keys[1]: wanted str, found 'what is not repeated here'"),
        ("config: other.yaml", {}, "config: wanted a file that names no other"),
        ("- model", {}, "config: wanted a YAML file of keys and values, found "),
        ("model", {}, "config: wanted a YAML file of keys and values, found "),
        ("kv: [", {}, "config: wanted a YAML file, found "),
        ("? [kv]\n: 1", {}, "config: wanted keys that are text, found "),
        ("kv: &kv {lease_s: *kv}", {}, "kv.lease_s: wanted a value that does not contain itself"),
        (b"model: \xff", {}, "config: wanted a YAML file, found "),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(
    tmp_path: Path, text: str | bytes, beside: dict[str, Any], line: str
) -> None:
    path = tmp_path / "arguments.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FieldError) as caught:
        deploy_config({"config": str(path), **beside})
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert "sesame" not in str(caught.value)


@pytest.mark.feature("Q05")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(FieldError, match="config: wanted a YAML file, found '/"):
            deploy_config({"config": str(path)})


@pytest.mark.ray
@pytest.mark.feature("Q05")
def test_a_bad_file_ends_the_start_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "arguments.yaml"
    path.write_text("decode:\n  replicas: many\n")
    serve = Path(sys.executable).with_name("serve")
    done = subprocess.run(
        [serve, "run", "serve.app:deploy", f"config={path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "decode.replicas: wanted int, found 'many'"


@pytest.mark.feature("Q06")
def test_a_server_and_an_engine_in_process_read_one_file(tmp_path: Path) -> None:
    """The same compilation, written as YAML, object, dict, JSON and dotted keys."""
    fields = {"level": 2, "use_cudagraph": True, "cudagraph_capture_sizes": [1, 2]}
    path = tmp_path / "arguments.yaml"
    path.write_text(f"max_num_seqs: 8\npools: mixed\ncompilation_config: {json.dumps(fields)}\n")
    served = deploy_config({"config": str(path)}).pools[0].engine
    in_process = engine_config({"config": str(path)})
    # A server may answer while it compiles, with a thread for each of its ranks.
    early = replace(served.compilation, serve_while_compiling="off")
    assert replace(served, compilation=early, threads=in_process.threads) == in_process
    assert in_process.compilation.level == 2
    ways: list[Any] = [fields, json.dumps(fields), CompilationConfig(**fields)]
    for way in ways:
        given = {"max_num_seqs": 8, "pools": "mixed", "compilation_config": way}
        assert engine_config(given) == in_process
        assert deploy_config(given).pools[0].engine == served
    dotted = {f"cc.{name}": json.dumps(value) for name, value in fields.items()}
    assert engine_config({"max_num_seqs": "8", **dotted}) == in_process


def test_an_engine_in_process_ignores_no_pool(config_file: Path) -> None:
    with pytest.raises(FieldError, match="decode: wanted nothing where pools=mixed"):
        engine_config({"config": str(config_file)})
    with pytest.raises(FieldError, match=r"mixed\.replicas: wanted 1 for an engine in process"):
        engine_config({"mixed.replicas": 2})


@pytest.mark.feature("Q06")
def test_the_offline_example_takes_the_file_of_a_server() -> None:
    command = [sys.executable, "examples/offline.py", "config=examples/configs/bundled.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "What is 12 + 30? -> 42"
