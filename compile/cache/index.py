"""Where compiled forwards lie on disk, and how a start finds its own.

    <root>/forwards/<hash>_<prefix>.json           which files this forward goes through
    <root>/<hash>/cache_key_factors.json           what the hash was made of
    <root>/<hash>/artifacts/<sha256>               compiled pieces, shared by ranks and prefixes
    <root>/<hash>/inductor/                        Inductor's own files, shared likewise
    <root>/<hash>/locks/                           one for each piece that is being compiled
    <root>/<hash>/rank_<tp>_<dp>/<prefix>/         one forward of one rank: index.py and what it
                                                   leaves for people to read

Nothing in there names its own place, so all of it may be moved, copied or built into an image. What
cannot be read is logged with its reason and compiled again.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import logging
import pprint
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from compile.cache.artifacts import (
    OUTPUT_CODE,
    ArtifactError,
    ArtifactStore,
    CorruptFileError,
    read_checked,
    unpack,
    write_atomic,
    write_checked,
)
from compile.cache.inductor import make_compiler
from compile.cache.inductor_directory import DIRECTORY
from compile.cache.key import (
    TRACED_FILES,
    describe,
    differing,
    hash_factors,
    key_factors,
    traced_factor,
    traced_names,
)
from compile.counters import COLD, cache_misses, counter
from compile.environment import compile_cache_save_format, is_compile_cache_disabled, root_directory
from compile.file_lock import file_lock
from compile.machine import PrivateDirectoryError, make_private
from compile.scope import CompileScope, Shape

VERSION = 1
"""Of the layout; an index of another one is not read."""
INDEX = "index.py"
FACTORS = "cache_key_factors.json"
FORWARDS = "forwards"
ARTIFACTS = "artifacts"
LINK = f"../../{ARTIFACTS}/"
"""From a forward's directory to an artifact."""
LOCKS = "locks"
UNPACKED = "pieces"

MAX_FORWARDS = 4
"""Sets of traced files that a key is remembered with: a code base has few such variants."""
COMPILE_WAIT_S = 600.0
"""How long to wait for a process that compiles the same piece: longer than autotuning takes."""
INDEX_WAIT_S = 30.0
"""How long to wait for a process that writes an index, which takes milliseconds."""

logger = logging.getLogger(__name__)

IndexKey = tuple[Shape, int, str]
"""What a piece was compiled for, its place among the pieces, and by which compiler."""


@dataclass
class Index:
    """One forward of one rank. Paths are relative to the index's directory."""

    entries: dict[IndexKey, dict[str, str]] = field(default_factory=dict)
    """For each piece the key of what it computes and the path of its artifact."""
    plans: dict[str, str] = field(default_factory=dict)
    """For each set of sizes the path of the forward's plan."""

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read an index; one that is missing or unusable is empty."""
        try:
            found = ast.literal_eval(read_checked(path))
            if found["version"] != VERSION:
                raise ValueError(f"wanted version {VERSION}, found {found['version']}")
            return cls(found["entries"], found["plans"])
        except FileNotFoundError:
            return cls()
        except (CorruptFileError, OSError, ValueError, SyntaxError, TypeError, KeyError) as error:
            logger.warning("compile cache: index is not used: %s", error)
            return cls()

    def write(self, path: Path) -> None:
        plans = dict(sorted(self.plans.items()))
        content = {"version": VERSION, "entries": dict(self.places()), "plans": plans}
        write_checked(path, pprint.pformat(content, width=100, sort_dicts=False) + "\n")

    def places(self) -> list[tuple[IndexKey, dict[str, str]]]:
        """Return the entries by piece, then shape, then compiler."""
        # By the shape's text: None and numbers do not compare.
        return sorted(self.entries.items(), key=lambda e: (e[0][1], repr(e[0][0]), e[0][2]))


class CompileCache:
    """One rank's compiled forward. Invariant: its directories belong to this user alone."""

    def __init__(
        self,
        root: Path,
        factors: Mapping[str, str],
        scope: CompileScope,
        prefix: str,
        names: Iterable[str] = (),
    ) -> None:
        """Make the directories of a key. Call `open`, which knows whether a cache is wanted."""
        self.root, self.prefix, self.names = root, prefix, tuple(names)
        self.hash = hash_factors(factors)
        self.shared = root / self.hash
        rank = self.shared / f"rank_{scope.tp_rank}_{scope.dp_rank}"
        self.directory = rank / prefix
        self.artifacts = self.shared / ARTIFACTS
        is_new = not (self.shared / FACTORS).exists()
        below = (self.shared / name for name in (LOCKS, DIRECTORY))
        for directory in (root, self.shared, rank, self.directory, self.artifacts, *below):
            make_private(directory)
        self.store = ArtifactStore(self.artifacts)
        self.save_format = scope.config.compile_cache_save_format or compile_cache_save_format()
        self._is_shared = scope.config.share_artifacts
        config = scope.config
        # Another set of sizes needs another plan.
        self._plan_name = f"sizes {config.compile_sizes or ()} ranges {config.compile_ranges}"
        self._pointer = _pointer(root, factors, prefix)
        self._index = Index.read(self.directory / INDEX)
        self.misses: list[str] = []
        if is_new:
            self._explain_miss(factors)
        if read_factors(self.shared) is None:
            write_atomic(self.shared / FACTORS, json.dumps(dict(factors), indent=1).encode())

    @classmethod
    def open(
        cls, scope: CompileScope, prefix: str, traced_files: Iterable[str] | None = None
    ) -> CompileCache | None:
        """Return the cache of the forward called `prefix`; None if there is none to use. Before
        tracing `traced_files` is None, and the answer what an earlier start left, if nothing has
        changed since."""
        if is_compile_cache_disabled():
            return None
        if not re.fullmatch(r"\w[\w.-]*", prefix):
            raise ValueError(f"prefix: wanted the name of a directory, found {prefix!r}")
        compiler = make_compiler(scope.config)
        factors = key_factors(scope, compiler.name, compiler.compute_hash(scope.config))
        root = root_directory(scope.config.cache_dir)
        try:
            if traced_files is None:
                for names in _read_pointer(_pointer(root, factors, prefix)):
                    full = {**factors, TRACED_FILES: traced_factor(names)}
                    if (root / hash_factors(full) / FACTORS).exists():
                        return cls(root, full, scope, prefix, names)
                return None
            names = traced_names(traced_files)
            full = {**factors, TRACED_FILES: traced_factor(names)}
            cache = cls(root, full, scope, prefix, names)
        except (PrivateDirectoryError, OSError) as error:
            logger.warning("compile cache is off: %s", error)
            return None
        logger.info("compile cache: %s", cache.directory)
        for name in names:
            logger.debug("compile cache: traced %s", name)
        return cache

    def _explain_miss(self, factors: Mapping[str, str]) -> None:
        nearest = nearest_factors(self.root, factors)
        if nearest is None:
            self.misses.append("nothing was compiled before")
            cache_misses[COLD] += 1
        else:
            name, old = nearest
            changed = differing(old, factors)
            cache_misses.update(changed.keys())
            changes = [describe(key, *pair) for key, pair in changed.items()]
            self.misses += [f"{change} (since {name})" for change in changes]
        for reason in self.misses:
            logger.info("compile cache: %s is new: %s", self.hash, reason)

    def load_plan(self) -> str | None:
        """Return the plan that was saved for the same sizes; None if none can be used."""
        path = self._index.plans.get(self._plan_name)
        if path is None:
            return None
        try:
            return self.store.get(Path(path).name).decode()
        except (ArtifactError, UnicodeDecodeError) as error:
            logger.warning("compile cache: forward is traced again: %s", error)
            return None

    def save_plan(self, text: str) -> None:
        """Keep a plan, and remember the files by which a later start finds it untraced."""
        try:
            path = LINK + self.store.put(text.encode())
            self._update(lambda index: index.plans.update({self._plan_name: path}))
            make_private(self._pointer.parent)
            known = [names for names in _read_pointer(self._pointer) if names != list(self.names)]
            sets = [list(self.names), *known][:MAX_FORWARDS]
            content = {"version": VERSION, "traced_files": sets}
            write_atomic(self._pointer, json.dumps(content, indent=1).encode())
        except (OSError, PrivateDirectoryError) as error:
            logger.warning("compile cache: plan is not saved: %s", error)

    def find(self, key: str, compiler: str) -> str | None:
        """Return the artifact of a piece that this rank or, if it shares, another one compiled."""
        paths = sorted(self.shared.glob(f"rank_*/*/{INDEX}")) if self._is_shared else ()
        for index in itertools.chain([self._index], map(Index.read, paths)):
            for (_, _, name), entry in index.entries.items():
                if (entry["key"], name) == (key, compiler):
                    return Path(entry["artifact"]).name
        return None

    def record(self, shape: Shape, graph_index: int, compiler: str, key: str, name: str) -> None:
        entry = {"key": key, "artifact": LINK + name}
        place = (shape, graph_index, compiler)
        if self._index.entries.get(place) == entry:
            return
        try:
            self._update(lambda index: index.entries.update({place: entry}))
        except OSError as error:
            logger.warning("compile cache: piece %d is not entered: %s", graph_index, error)

    def unpack(self, name: str, graph_index: int, shape: Shape) -> Path | None:
        """Write an artifact's generated code for people to read, if so configured; return where."""
        if self.save_format != "unpacked":
            return None
        path = self.directory / UNPACKED / f"piece_{graph_index}_{shape_text(shape)}.py"
        try:
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, unpack(self.store.get(name)).get(OUTPUT_CODE, b""))
        except (ArtifactError, OSError) as error:
            logger.warning("compile cache: piece %d is not unpacked: %s", graph_index, error)
            return None
        return path

    @contextmanager
    def compiling(self, key: str) -> Iterator[None]:
        """Hold the only right to compile a piece, once those who hold it are done."""
        if not self._is_shared:
            yield
            return
        with file_lock(self.shared / LOCKS / f"{key}.lock", COMPILE_WAIT_S) as is_held:
            if not is_held:
                logger.warning("compile cache: %s is compiled by another process too", key)
            yield

    def _update(self, change: Callable[[Index], None]) -> None:
        """Change the index as it is now on disk: another process may have written it."""
        path = self.directory / INDEX
        rank, prefix = self.directory.parts[-2:]
        with file_lock(self.shared / LOCKS / f"{rank}_{prefix}.lock", INDEX_WAIT_S):
            self._index = Index.read(path)
            change(self._index)
            self._index.write(path)
        counter.num_cache_entries_updated += 1


def shape_text(shape: Shape) -> str:
    """Spell what a piece is compiled for: `general`, `8`, `9-16`."""
    if shape is None:
        return "general"
    return str(shape) if isinstance(shape, int) else f"{shape[0]}-{shape[1]}"


def read_factors(directory: Path) -> dict[str, str] | None:
    """Return what the hash of a directory was made of; None if that cannot be read."""
    try:
        found = json.loads((directory / FACTORS).read_bytes())
    except (OSError, ValueError):
        return None
    is_sound = isinstance(found, dict) and all(isinstance(v, str) for v in found.values())
    return found if is_sound and hash_factors(found) == directory.name else None


def nearest_factors(
    root: Path, factors: Mapping[str, str], *, before: float | None = None
) -> tuple[str, dict[str, str]] | None:
    """Return name and factors of the latest directory of those that differ in the fewest factors;
    `before` leaves out later directories."""
    found = []
    for path in sorted(root.glob(f"*/{FACTORS}")):
        old = read_factors(path.parent)
        written = path.stat().st_mtime
        if old and old != dict(factors) and (before is None or written < before):
            found.append((len(differing(old, factors)), -written, path.parent.name, old))
    return min(found, key=lambda item: item[:3])[2:] if found else None


def _pointer(root: Path, factors: Mapping[str, str], prefix: str) -> Path:
    base = {name: value for name, value in factors.items() if name != TRACED_FILES}
    return root / FORWARDS / f"{hash_factors(base)}_{prefix}.json"


def _read_pointer(path: Path) -> list[list[str]]:
    try:
        found = json.loads(path.read_bytes())
        return [[str(name) for name in names] for names in found["traced_files"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("compile cache: forward is traced again: %s: %s", path.name, error)
        return []


def entry_key(graph_key: str, shape: Shape) -> str:
    return hashlib.sha256(f"{graph_key}\0{shape_text(shape)}".encode()).hexdigest()[:32]
