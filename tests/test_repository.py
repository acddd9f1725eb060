"""What holds for the repository as a whole: its top level, dependencies, imports and commands."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("serve", "cluster", "model", "compile")
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", *PACKAGES, "tests", "examples"}
TEST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/pytest"

RUNTIME = {
    "torch",
    "triton",
    "ray[serve]",
    "transformers",
    "safetensors",
    "msgspec",
    "pyzmq",
    "numpy",
    "llguidance",
}
IMPORTED_AS = {"ray[serve]": "ray", "pyzmq": "zmq"}
# Modules that the packages may import because a runtime dependency brings them.
BROUGHT_BY = {
    "click": "ray",
    "fastapi": "ray",
    "starlette": "ray",
    "uvicorn": "ray",
    "prometheus_client": "ray",
    "yaml": "ray",
    "jinja2": "torch",
    "tokenizers": "transformers",
    "tqdm": "transformers",
}
# Modules of the extras: their absence is an error where they are used, never at import.
OPTIONAL = {"nixl", "pynvml", "psutil", "tabulate", "opentelemetry"}


def requirement_name(requirement: str) -> str:
    """Return the name with its extras, without versions and markers."""
    match = re.match(r"[\w.-]+(\[[\w,]+\])?", requirement)
    assert match is not None
    return match.group()


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def top_level() -> set[str]:
    """Return the tracked names; of an unpacked archive, the names that are no build product."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return {name.split("/")[0] for name in listed.stdout.split("\0") if name}
    built = {"build", "dist", "venv", "__pycache__", "PKG-INFO"}
    return {path.name for path in ROOT.iterdir() if path.name not in built}


# --- layout ---------------------------------------------------------------------------------


@pytest.mark.feature("Y04")
def test_the_top_level_is_exactly_what_it_should_be() -> None:
    assert {name for name in top_level() if not name.startswith(".")} == TOP_LEVEL


def test_no_folder_of_tests_is_a_package() -> None:
    # tests/model/__init__.py would shadow the package model.
    assert [relative(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_every_python_file_starts_with_a_docstring() -> None:
    files = python_files(*PACKAGES, "tests", "examples")
    without = [relative(f) for f in files if not ast.get_docstring(ast.parse(f.read_bytes()))]
    assert without == []


# --- dependencies ---------------------------------------------------------------------------


@pytest.mark.feature("Y01")
def test_runtime_dependencies_are_exactly_the_chosen_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {requirement_name(line) for line in project["dependencies"]} == RUNTIME


def imported_modules(path: Path) -> set[tuple[str, bool]]:
    """Return the outer names that a file imports, and whether it does so while it is imported."""
    tree = ast.parse(path.read_bytes())
    inner = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        found |= {(name.split(".")[0], node not in inner) for name in names}
    return found


@pytest.mark.feature("Y01")
def test_the_packages_import_nothing_that_is_not_declared() -> None:
    declared = {IMPORTED_AS.get(name, name) for name in RUNTIME} | set(BROUGHT_BY)
    known = declared | set(PACKAGES) | set(sys.stdlib_module_names)
    undeclared = [
        f"{relative(path)}: {module}"
        for path in python_files(*PACKAGES)
        for module, at_import in sorted(imported_modules(path))
        if module not in known and (at_import or module not in OPTIONAL)
    ]
    assert undeclared == []


def test_borrowed_modules_really_come_with_their_owner() -> None:
    for module, owner in BROUGHT_BY.items():
        requirements = importlib.metadata.requires(owner) or []
        names = {requirement_name(line).split("[")[0].lower() for line in requirements}
        assert {"yaml": "pyyaml"}.get(module, module) in names


# --- imports --------------------------------------------------------------------------------


def test_the_engine_starts_without_ray_and_transformers() -> None:
    # Each costs a rank seconds, and a bare GPU machine has neither.
    modules = "cluster.engine.engine", "cluster.rank.runner"
    code = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules))"
    loaded = set(run_python(code).split())
    assert set(modules) <= loaded
    assert loaded.isdisjoint({"ray", "transformers", "tokenizers", "starlette", "fastapi", "serve"})


def test_a_machine_without_grammars_ray_and_http_generates_and_refuses_a_grammar() -> None:
    code = """
import sys
for name in ("llguidance", "ray", "starlette", "prometheus_client"):
    sys.modules[name] = None  # an import of it fails
from dataclasses import replace
import msgspec
from cluster.config import CacheConfig, EngineConfig
from cluster.wire.messages import GenerateRequest, Grammar, Sampling, Submit
from cluster.group.context import RankContext
from cluster.rank.leader import assemble_engine
from cluster.rank.runner import ModelRunner
config = EngineConfig("examples/tiny", max_model_len=32, cache=CacheConfig(num_kv_blocks=4))
config = replace(config, compilation=replace(config.compilation, level=0))
runner = ModelRunner(RankContext(config))
engine = assemble_engine(config, runner)
plain = Sampling(0.0, 0, 1.0, 0.0, 0, 3, (1,), -1, -1, None, None)
constrained = msgspec.structs.replace(plain, grammar=Grammar("start: /a/", (1,)))
for name, sampling in (("plain", plain), ("constrained", constrained)):
    engine.submit(Submit(GenerateRequest(name, [5, 6, 7], [], sampling, b""), None))
while engine.has_unfinished:
    for out in engine.step():
        print(out.request_id, len(out.token_ids), out.error)
runner.close()
print("dynamo", "torch._dynamo" in sys.modules)
"""
    lines = run_python(code).splitlines()
    # It takes a rank a second, and at level 0 nothing is traced.
    assert lines[-1] == "dynamo False"
    assert [line.split()[:2] for line in lines if line.startswith("plain")] == [["plain", "1"]] * 3
    refused = [line for line in lines if line.startswith("constrained")]
    assert refused == [
        "constrained 0 grammar: wanted none on an engine that compiles none, found one"
    ]


def test_the_application_builder_keeps_its_annotations_evaluated() -> None:
    # Ray Serve reads the builder's annotation; as a string it silently hands over a raw dict.
    tree = ast.parse((ROOT / "serve" / "app.py").read_bytes())
    futures = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    assert futures == []


def test_nobody_imports_compile_bare() -> None:
    # It would hide the builtin of that name.
    bare = [
        relative(path)
        for path in python_files(*PACKAGES, "tests", "examples")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Import) and any(a.name == "compile" for a in node.names)
    ]
    assert bare == []


def test_import_rules_hold() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


# --- commands -------------------------------------------------------------------------------


def ci_run(root: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / ".ci" / "run"), "--print-command"]
    return subprocess.run(command, capture_output=True, text=True)


def test_continuous_integration_runs_the_command_of_the_readme() -> None:
    printed = ci_run(ROOT)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout == TEST_COMMAND + "\n"


@pytest.mark.parametrize(
    ("readme", "found"),
    [
        (f"```sh\n{TEST_COMMAND}\n```\n", "found no such block"),
        (f"<!-- test-command -->\nSome text.\n```sh\n{TEST_COMMAND}\n```\n", "no such block"),
        ("<!-- test-command -->\n```\npytest\n```\n", "found: pytest"),
        ("<!-- test-command -->\n```\na\nb\n```\n", "of one line"),
    ],
    ids=["no-marker", "text-between", "other-command", "two-lines"],
)
def test_a_readme_without_the_command_is_a_clear_error(
    tmp_path: Path, readme: str, found: str
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "README.md").write_text(readme, encoding="utf-8")
    done = ci_run(tmp_path)
    assert done.returncode == 1
    assert "README.md: wanted" in done.stderr and found in done.stderr


LISTS = {
    *("all_gather", "all_gather_coalesced", "all_gather_object", "all_to_all", "allgather"),
    *("allgather_coalesced", "alltoall", "broadcast_object_list", "gather", "gather_object"),
    *("reduce_scatter", "scatter", "scatter_object_list"),
}
"""torch's collectives that take a list of tensors, or pickles: they copy each tensor once more."""


def called_on_torch(node: ast.Call) -> str:
    """Return the name of a method of torch.distributed or of a process group that this calls."""
    if not isinstance(node.func, ast.Attribute):
        return ""
    owner = ast.unparse(node.func.value)
    is_torchs = re.search(r"(^|[._])(dist|c10d|distributed|group|backend|pg)$", owner)
    return node.func.attr if is_torchs else ""


def index_is_missing(node: ast.Call) -> bool:
    """Return whether a call asks for a CUDA device and does not say which."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    given = [*node.args] if called in ("device", "to") else []
    given += [each.value for each in node.keywords if each.arg == "device"]
    values = [each.value for each in given if isinstance(each, ast.Constant)]
    return called == "cuda" or ("cuda" in values and len(given) == 1)


def calls_in(text: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


@pytest.fixture(scope="module")
def product_calls() -> list[tuple[str, ast.Call]]:
    """All calls in files of the packages that name torch, each with its place."""
    return [
        (f"{relative(path)}:{call.lineno}", call)
        for path in python_files(*PACKAGES)
        if "torch" in (text := path.read_text())
        for call in calls_in(text)
    ]


@pytest.mark.feature("K08")
def test_no_collective_takes_a_list(product_calls: list[tuple[str, ast.Call]]) -> None:
    for each in ("dist.gather(x, y)", "self.group.allgather(a, b)", "c10d.scatter(x, [])"):
        assert {called_on_torch(call) for call in calls_in(each)} & LISTS
    assert not any(map(called_on_torch, calls_in("near.gather(x); t.gather(1, i)")))
    used = {called_on_torch(call) for _, call in product_calls}
    assert {"_allgather_base", "_reduce_scatter_base", "all_to_all_single"} <= used
    assert [place for place, call in product_calls if called_on_torch(call) in LISTS] == []


@pytest.mark.feature("P19")
def test_no_device_is_a_gpu_without_an_index(product_calls: list[tuple[str, ast.Call]]) -> None:
    for each in ("torch.device('cuda')", "torch.empty(3, device='cuda')", "x.to('cuda')"):
        assert any(map(index_is_missing, calls_in(each)))
    assert not any(map(index_is_missing, calls_in("torch.device('cuda', 0)")))
    assert [place for place, call in product_calls if index_is_missing(call)] == []
