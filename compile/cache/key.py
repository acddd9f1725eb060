"""The key of compiled code: a list of named facts, each of which decides what is generated. A fact
that is left out makes two different programs share code; one too many (a port, a rank, a path, the
sizes that are captured) makes every start a cold one."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from compile.config import KEYED_FIELDS
from compile.environment import codegen_variables, cxx
from compile.machine import processor
from compile.passes.manager import PassManager
from compile.scope import CompileScope

TRACED_FILES = "traced files"
MAIN_MODULES = ("__main__", "__mp_main__")
"""The next process has others."""
HASH_DIGITS = 16


def key_factors(scope: CompileScope, compiler: str, compiler_hash: str) -> dict[str, str]:
    """Return what decides the code that is generated in `scope`, except for traced files."""
    factors = {
        "lockstep": OWN_SOURCES,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": python(),
        "processor": processor(),
        "c++ compiler": compiler_version(),
        # Of code for a CPU alone: ranks on two nodes of GPUs may have other numbers of them.
        "threads": "" if scope.key_factors.get("device_type") == "cuda" else _threads(),
        "device": device(),
        "compiler": compiler,
        "compiler state": compiler_hash,
    }
    factors |= codegen_variables()
    keyed = {name: getattr(scope.config, name) for name in KEYED_FIELDS}
    factors |= {f"compilation.{name}": _spelled(value) for name, value in keyed.items()}
    factors["compilation.passes"] += f" {PassManager.from_config(scope.config).uuid()}"
    if twice := sorted(factors.keys() & scope.key_factors.keys()):
        raise ValueError(f"key_factors: wanted names of their own, found {', '.join(twice)}")
    return factors | dict(scope.key_factors)


def _threads() -> str:
    return str(torch.get_num_threads())


def _spelled(value: Any) -> str:
    """Spell a value equally in every process; an object's address would be new in each."""
    if isinstance(value, Enum):
        return str(value.name)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_spelled(value[key])}" for key in sorted(value))
    return f"[{', '.join(map(_spelled, value))}]"


def sources_hash(directory: Path) -> str:
    """Return a hash of all Python files below `directory`, with their names in it."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        name = path.relative_to(directory).as_posix()
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()


OWN_SOURCES = sources_hash(Path(__file__).parents[1])
"""Of this package when it was imported: a file that is changed later does not run here."""


def traced_names(paths: Iterable[str]) -> list[str]:
    """Return names of readable traced files that hold elsewhere too: modules, else paths."""
    modules: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        if (path := getattr(module, "__file__", None)) and name not in MAIN_MODULES:
            modules.setdefault(path, name)
    readable = [path for path in paths if _content_hash(path) is not None]
    return sorted({modules.get(path, path) for path in readable})


def traced_factor(names: Sequence[str]) -> str:
    """Return names and contents of traced files as they are now, one a line."""
    return "\n".join(f"{name} {_content_hash(_find(name)) or 'missing'}" for name in sorted(names))


def _find(name: str) -> str:
    """Return the file of a module, loaded or not; a path is returned as it is."""
    if name.endswith(".py"):
        return name
    if module := sys.modules.get(name):
        return getattr(module, "__file__", None) or ""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return ""
    return (spec.origin if spec else None) or ""


def _content_hash(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None


def hash_factors(factors: Mapping[str, str]) -> str:
    """Return the name of the directory for code that these factors decide."""
    text = "\0".join(f"{name}\0{factors[name]}" for name in sorted(factors))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the factors whose values are not the same, with the old value and the new one."""
    names = [*new, *(name for name in old if name not in new)]
    pairs = {name: (old.get(name, "(absent)"), new.get(name, "(absent)")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def describe(name: str, old: str, new: str) -> str:
    """Say in one line how a factor changed; of long values only the words that did."""
    if name == TRACED_FILES:
        return f"{name}: {_changed_files(old, new)}"
    if max(len(old), len(new)) > 80:
        before, after = old.split(), new.split()
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
        gone = [" ".join(before[i:j]) for _, i, j, _, _ in changes if i < j]
        come = [" ".join(after[i:j]) for _, _, _, i, j in changes if i < j]
        old, new = (" ... ".join(words) or "(nothing)" for words in (gone, come))
    return f"{name}: {old} -> {new}"


def _changed_files(old: str, new: str) -> str:
    before = dict(line.split(" ", 1) for line in old.splitlines() if " " in line)
    after = dict(line.split(" ", 1) for line in new.splitlines() if " " in line)
    said = dict.fromkeys(before.keys() & after.keys(), "changed")
    said |= dict.fromkeys(before.keys() - after.keys(), "no longer traced")
    said |= dict.fromkeys(after.keys() - before.keys(), "newly traced")
    return ", ".join(f"{name} {said[name]}" for name in sorted(differing(before, after)))


VERSION_TIMEOUT_S = 30.0
"""A compiler answers in milliseconds; one that hangs is treated as missing."""


def compiler_version() -> str:
    """Return what the C++ compiler calls itself; `none` if there is none."""
    compiler = shutil.which(cxx())
    if compiler is None:
        return "none"
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    return (done.stdout.splitlines() or ["none"])[0]


def device() -> str:
    """Return the compute capability and name of this process's CUDA device; `cpu` without one."""
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"cuda {torch.version.cuda} sm_{major}{minor} {torch.cuda.get_device_name()}"


def python() -> str:
    """Return the interpreter's ABI and the kind of machine: extensions are built for both."""
    return f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}"
