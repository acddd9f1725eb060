"""Every command of README and every example runs, each as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve.config import deploy_config

pytestmark = [pytest.mark.ray, pytest.mark.feature("Y05")]

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ENDPOINTS = (ROOT / "serve" / "docs" / "endpoints.md").read_text()
BIN = Path(sys.executable).parent
QUESTION = '{"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}'


def blocks(language: str, document: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document, re.DOTALL)


def block_with(language: str, text: str) -> str:
    [found] = [block for block in blocks(language) if text in block]
    return found


@pytest.fixture
def shell(server: Any, printed: Callable[..., str]) -> Callable[[str], str]:
    """Run a README command against the running application instead of port 8000."""

    def run(command: str) -> str:
        command = command.replace("localhost:8000", server.url.removeprefix("http://"))
        path = f"{BIN}:{os.environ['PATH']}"
        return printed("bash", "-euo", "pipefail", "-c", command, PATH=path)

    return run


def test_the_serve_command_is_the_one_that_the_tests_run(server: Any) -> None:
    command = block_with("bash", "serve run serve.app:deploy\n")
    assert command.strip().endswith("&& .venv/bin/serve run serve.app:deploy")
    assert server.process.args[1:] == ["run", "serve.app:deploy"]
    server.wait_until_ready()


def test_the_curl_commands(shell: Any) -> None:
    printed = shell(block_with("bash", "curl -s"))
    assert '"status":"ready"' in printed
    assert '"content":"42"' in printed


def test_the_client_snippet(server: Any, shell: Any, tmp_path: Path) -> None:
    [snippet] = blocks("python", ENDPOINTS)
    script = tmp_path / "snippet.py"
    script.write_text(snippet.replace("http://localhost:8000", server.url))
    assert shell(f"python {script}").strip() == "3 4 5 6 7 8 9"


@pytest.mark.feature("R05")
@pytest.mark.parametrize(
    "arguments",
    [
        "",
        " -O0 -cc.use_cudagraph=false",
        pytest.param(" config=examples/configs/bundled.yaml", marks=pytest.mark.feature("Q06")),
    ],
)
def test_the_offline_example(shell: Any, arguments: str) -> None:
    printed = shell(f"python examples/offline.py{arguments}")
    assert printed.splitlines()[-3:] == [
        "What is 12 + 30? -> 42",
        "Count from 3 to 9. -> 3 4 5 6 7 8 9",
        "What day comes after Monday? -> Tuesday",
    ]


@pytest.mark.feature("R09")
def test_the_example_of_structured_output(shell: Any) -> None:
    lines = shell("python examples/structured_output.py").splitlines()[-4:]
    patterns = (
        r'json: \{"name": ".{0,10}", "age": [0-9]+\} \(stop\)',
        r"regex: [0-9]{3}-[0-9]{4} \(stop\)",
        r"choice: (yes|no|perhaps) \(stop\)",
        r"grammar: [0-9]{1,2}(\+[0-9]{1,2})+\+?[0-9]* \((stop|length)\)",
    )
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.feature("R01")
def test_the_command_with_arguments_asks_for_two_decode_replicas() -> None:
    [line] = block_with("bash", "model=").strip().splitlines()
    command, *arguments = line.replace("/models/Llama-3.2-1B", "examples/tiny").split()[2:]
    assert command == "serve.app:deploy"
    config = deploy_config(dict(argument.split("=") for argument in arguments))
    assert config.api.served_model_name == "tiny"
    assert [pool.replicas for pool in config.pools] == [1, 2]


@pytest.mark.slow
@pytest.mark.feature("R01")
def test_the_yaml_file_starts_everything_from_nothing(
    start_serve: Any, tmp_path: Path, free_port: int
) -> None:
    """A cluster of its own, as on a fresh machine, with YAML arguments; ended by an interrupt."""
    config = yaml.safe_load((ROOT / "examples/configs/tiny.yaml").read_text())
    assert "serve run examples/configs/tiny.yaml" in README
    config["http_options"]["port"] = free_port
    file, log = tmp_path / "tiny.yaml", tmp_path / "log"
    file.write_text(yaml.safe_dump(config))
    app = start_serve([file], address="local", port=free_port, log=log)
    try:
        app.wait_until_ready(is_compiled=False)
        answer = httpx.post(f"{app.url}/v1/chat/completions", content=QUESTION, timeout=600)
        assert '"content":"42"' in answer.text
    finally:
        app.process.send_signal(signal.SIGINT)
        assert app.process.wait(timeout=600) == 0, log.read_text()
