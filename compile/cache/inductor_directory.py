"""Inductor's own directory, and what is changed about Inductor while it works for the cache.

1. Everything that Inductor and Triton write lies below one directory, which all ranks share.
2. The files that a piece needs (generated Python, machine code) are noted when they are loaded, so
   that they can travel inside the piece's artifact.
3. Whether the processor's vector instructions can be used is probed once and the answer is kept,
   because a probe costs a second and a C++ build.
4. Loading builds no header, because a header only helps to build code, and all of it is there.
5. What a GPU's kernels are tuned to is kept here: what is found while a piece compiles travels
   inside its artifact, what is found when it runs is written here, and loading looks for both.

Private names of Inductor are replaced for as long as `InductorDirectory.entered` lasts.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import pprint
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from compile.cache.artifacts import CorruptFileError, read_checked, write_atomic, write_checked
from compile.cache.inductor_private import (
    CHECK_BUILD,
    HEURISTICS,
    LOAD_LIBRARY,
    LOAD_MODULE,
    PRECOMPILE_HEADER,
    RECHECK_TUNING,
    cleared_caches,
    private,
    replaced,
)

DIRECTORY = "inductor"
"""Next to the directory of artifacts."""
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": ".", "TRITON_CACHE_DIR": "triton"}
"""Where Inductor and Triton look, and the place below the directory for each."""
PROBES = "vector_isa.txt"
TUNED = "*/*.best_config"
"""Where Inductor writes what a kernel was tuned to."""

logger = logging.getLogger(__name__)

_entered = threading.RLock()
"""Environment and replaced names belong to the whole process."""
_answers: dict[str, bool] = {}
"""Which vector instructions this process found that it can use."""


class InductorDirectory:
    """A directory for Inductor. Invariant: losing its content costs builds and nothing else."""

    def __init__(self, directory: Path, probes: Path | None = None) -> None:
        self.directory = directory
        self.probes = probes or directory / PROBES

    @contextmanager
    def entered(self, *, is_loading: bool) -> Iterator[list[Path]]:
        """Let Inductor work here; yield a list that grows by each file it loads."""
        loaded: list[Path] = []
        with _entered, ExitStack() as stack:
            stack.enter_context(_environment(self.directory))
            stack.enter_context(cleared_caches())
            stack.enter_context(_noted_files(loaded))
            stack.enter_context(_remembered_probes(self.probes))
            if is_loading:
                stack.enter_context(
                    replaced(PRECOMPILE_HEADER, lambda _: lambda *args, **kwargs: None)
                )
                stack.enter_context(_kept_tuning(self.directory))
            yield loaded

    def collect(self, loaded: list[Path]) -> dict[str, bytes]:
        """Return loaded files, and all tuned configurations, by their place below the directory."""
        files = {}
        for path in [*loaded, *sorted(self.directory.glob(TUNED))]:
            if path.is_relative_to(self.directory):
                files[path.relative_to(self.directory).as_posix()] = path.read_bytes()
        return files

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Put files where they were when they were collected, unless they are still there."""
        for name, content in files.items():
            path = self.directory / name
            if not path.is_file() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, content)


@contextmanager
def _environment(directory: Path) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update({name: str(directory / below) for name, below in VARIABLES.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _noted_files(loaded: list[Path]) -> Iterator[None]:
    """Append the path of each library and each generated module that is loaded inside."""

    def noting(place: int) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
                loaded.append(Path(args[place]))
                return original.__func__(cls, *args, **kwargs)

            return classmethod(load)

        return make

    # Their arguments are (path, ...) and (key, path, ...).
    with replaced(LOAD_LIBRARY, noting(0)), replaced(LOAD_MODULE, noting(1)):
        yield


@contextmanager
def _kept_tuning(directory: Path) -> Iterator[None]:
    """Let loaded kernels look for their tuned configurations below `directory` and save them there:
    they still name the directory in which they were compiled."""

    def recheck(original: Callable[..., None]) -> Callable[..., None]:
        def recheck_autotune_cache(self: Any, *args: Any, **kwargs: Any) -> None:
            _rebind(self, directory)
            original(self, *args, **kwargs)

        return recheck_autotune_cache

    with replaced(RECHECK_TUNING, recheck):
        yield


def _rebind(kernel: Any, directory: Path) -> None:
    """Make a loaded kernel keep its tuned configuration below `directory`."""
    if kernel.filename is None:
        return
    path = Path(kernel.filename)
    kernel.filename = str(directory / path.parent.name / path.name)
    check = private(HEURISTICS, "check_autotune_cache")
    configs = [result.config for result in kernel.compile_results]
    _, tuned, _ = check(configs, kernel.filename, kernel.inductor_meta)

    def save(*args: Any, **kwargs: Any) -> None:
        with suppress(OSError):  # a read-only directory: the next start tunes again
            tuned.save(*args, **kwargs)

    kernel.save_cache_hook = tuned and save


@contextmanager
def _remembered_probes(path: Path) -> Iterator[None]:
    """Answer from `path` what was probed before: processor and compiler are in the key."""
    known = _read_probes(path)
    _answers.update(known)

    def remembered(original: Callable[..., bool]) -> Callable[..., bool]:
        def check_build(self: Any, code: str) -> bool:
            flags = getattr(self, "_arch_flags", "")
            name = f"{self} {hashlib.sha256(f'{flags} {code}'.encode()).hexdigest()[:16]}"
            if name not in _answers:
                _answers[name] = bool(original(self, code))
            return _answers[name]

        return check_build

    with replaced(CHECK_BUILD, remembered):
        yield
    if known != _answers:
        with suppress(OSError):  # a read-only directory: the next start probes again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_checked(path, pprint.pformat(_answers))


def _read_probes(path: Path) -> dict[str, bool]:
    try:
        return dict(ast.literal_eval(read_checked(path)))
    except FileNotFoundError:
        return {}
    except (CorruptFileError, OSError, ValueError, SyntaxError) as error:
        logger.warning("vector instructions are probed again: %s", error)
        return {}
