"""Break the code on purpose, one planted bug at a time, and print which test noticed.

    python tests/mutations/run.py [TEXT ...]

The bugs are those of `planted.py` whose claim has one of the texts, or all. Each is planted in a
copy of the tracked files, so the checkout is never touched.
The exit code is the number of bugs that no test noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from planted import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
NUM_SCHEDULES = "400"
"""Of the simulator: enough for each of the bugs that it is to find."""


def mutated(mutation: Mutation, source: str) -> str:
    """Return the source of the mutation's file with its bug.

    Raises:
        ValueError: what it replaces is not there exactly once.
    """
    for old, new in mutation.edits.items():
        if (found := source.count(old)) != 1:
            raise ValueError(f"{mutation.path}: {old!r}: wanted once, found {found} times")
        source = source.replace(old, new)
    return source


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
    """Plant the bug in a copy and return the ids of the tests that fail there."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        tree = Path(name)
        copy_tracked(tree)
        path = tree / mutation.path
        path.write_text(mutated(mutation, path.read_text()))
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "LOCKSTEP_CACHE_ROOT": f"{tree}/.c",
            "LOCKSTEP_SIMULATION_SCHEDULES": NUM_SCHEDULES,
        }
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


def main(texts: list[str]) -> int:
    """Plant the bugs that are asked for; return how many went unnoticed."""
    for text in texts:
        if not any(text in mutation.claim for mutation in MUTATIONS):
            sys.exit(f"wanted a text of a claim in planted.py, found {text!r}")
    unnoticed = 0
    for mutation in MUTATIONS:
        if texts and not any(text in mutation.claim for text in texts):
            continue
        found = failing_tests(mutation)
        unnoticed += not found
        print(f"{mutation.claim} {found[0] if found else 'NOT NOTICED'}", flush=True)
    return unnoticed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
