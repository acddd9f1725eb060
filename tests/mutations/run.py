"""Break the code on purpose, one patch at a time, and print which test noticed.

    python tests/mutations/run.py [NAME ...]

Each `NAME.patch` beside this file opens with `Tests:` lines, the tests that have to fail once it is
applied, and the text of what it breaks. A patch is applied to a copy of the tracked files, so the
checkout is never touched. The exit code is the number of patches that no test noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 600


@dataclass(frozen=True)
class Mutation:
    """One patch: what it breaks, and the tests that must notice."""

    path: Path
    claim: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def read_mutation(path: Path) -> Mutation:
    """Read a patch's head.

    Raises:
        ValueError: it names no tests.
    """
    head = path.read_text().split("\ndiff --git ", 1)[0].splitlines()
    tests = [line.removeprefix("Tests:").split() for line in head if line.startswith("Tests:")]
    claim = " ".join(line for line in head if line and not line.startswith("Tests:"))
    if not tests:
        raise ValueError(f"{path.name}: wanted a line that starts with 'Tests:', found none")
    return Mutation(path, claim, tuple(name for names in tests for name in names))


def mutations() -> list[Mutation]:
    """Return all patches in the order of their names."""
    return [read_mutation(path) for path in sorted(HERE.glob("*.patch"))]


def copy_tracked(target: Path) -> None:
    """Copy what git tracks, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def failing_tests(mutation: Mutation) -> list[str]:
    """Apply the patch to a copy and return the ids of the tests that fail there."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        tree = Path(name)
        copy_tracked(tree)
        subprocess.run(["git", "apply", str(mutation.path)], cwd=tree, check=True)
        environment = {**os.environ, "PYTHONPATH": str(tree), "LOCKSTEP_CACHE_ROOT": f"{tree}/.c"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-rfE", *mutation.tests],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    lines = done.stdout.splitlines()
    return [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]


def main(names: list[str]) -> int:
    """Run the named patches, or all; return how many went unnoticed."""
    unnoticed = 0
    for mutation in mutations():
        if names and mutation.name not in names:
            continue
        found = failing_tests(mutation)
        unnoticed += not found
        print(f"{mutation.name}: {found[0] if found else 'NOT NOTICED'}", flush=True)
        print(f"    {mutation.claim}", flush=True)
    return unnoticed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
