"""Several processes over one cache: no damage, no double work, and no wait for the dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compile.cache.artifacts import ArtifactError, ArtifactStore, CorruptFileError, read_checked
from compile.cache.index import INDEX, Index

NUM_PROCESSES = 4
ROOT = Path(__file__).resolve().parents[3]

COMPILER = """
import json, os, pathlib, sys, time
sys.path.insert(0, sys.argv[1])
import forwards as toy
from compile.cache.compilers import EagerAdaptor

log = pathlib.Path(sys.argv[2])

class Noted(EagerAdaptor):
    # Slow enough for the others to arrive while it works; being faster only makes them load.
    def compile(self, graph, *args, **kwargs):
        with log.open("a") as file:
            file.write(toy.graph_key(graph)[:8] + "\\n")
        time.sleep(0.2)
        return super().compile(graph, *args, **kwargs)
"""
TOGETHER = """
(log.parent / f"ready{os.getpid()}").touch()
while len(list(log.parent.glob("ready*"))) < int(sys.argv[4]):
    time.sleep(0.005)
"""
START = """
fields = json.loads(sys.argv[3])
started = toy.start(toy.scope(**fields), compiler=Noted())
print(json.dumps([started.outputs, started.counters]))
"""
ENDLESS = """
import torch, itertools
from compile.cache.index import CompileCache
from compile.cache.manager import CompilerManager

scope = toy.scope(**json.loads(sys.argv[3]))
cache = CompileCache.open(scope, "backbone", [toy.__file__])
manager = CompilerManager(scope, cache)
for number in itertools.count():
    graph = toy.graphs()[0]
    manager.compile(graph, [toy.INPUT], index=number, shape=None, num_graphs=1, key=str(number))
    cache.save_plan(json.dumps([toy.graph_key(g) for g in toy.graphs()]) + " " * 10**6)
    print(number, flush=True)
"""


def spawn(script: str, log: Path, **fields: Any) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    arguments = [here, str(log), json.dumps(fields), str(NUM_PROCESSES)]
    return subprocess.Popen(
        [sys.executable, "-c", COMPILER + script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def result(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.feature("G11")
@pytest.mark.parametrize("ranks", [(0, 0, 0, 0), (0, 1, 2, 3)], ids=["one_rank", "four_ranks"])
def test_of_four_cold_starts_at_once_one_compiles_each_piece_and_the_rest_load(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    log, root = tmp_path / "log" / "compiled", tmp_path / "root"
    log.parent.mkdir()
    processes = [spawn(TOGETHER + START, log, cache_dir=str(root), tp_rank=rank) for rank in ranks]
    results = [result(process) for process in processes]
    compiled = log.read_text().splitlines()
    assert len(compiled) == len(set(compiled)) == 2
    assert len({json.dumps(outputs) for outputs, _ in results}) == 1
    loaded = sum(counters.get("num_compiled_artifacts_loaded", 0) for _, counters in results)
    assert loaded == 2 * NUM_PROCESSES - len(compiled)
    assert_sound(root)


@pytest.mark.feature("G11")
def test_a_process_that_is_killed_while_it_writes_damages_nothing(tmp_path: Path) -> None:
    root, log = tmp_path / "root", tmp_path / "log" / "compiled"
    log.parent.mkdir()
    writer = spawn(ENDLESS, log, cache_dir=str(root))
    assert writer.stdout is not None
    for _ in range(3):
        assert writer.stdout.readline(), writer.stderr and writer.stderr.read()
    writer.kill()
    writer.communicate()
    assert_sound(root)
    outputs, counters = result(spawn(START, log, cache_dir=str(root)))
    assert outputs and counters["num_backend_compilations"] == 2
    assert_sound(root)


def assert_sound(root: Path) -> None:
    """Every file that has its name is whole, and every index leads to artifacts."""
    for directory in root.glob("*/artifacts"):
        store = ArtifactStore(directory)
        for path in directory.iterdir():
            if not path.name.startswith(".tmp-"):
                try:
                    store.get(path.name)
                except ArtifactError as error:
                    pytest.fail(str(error))
    indexes = list(root.glob(f"*/rank_*/*/{INDEX}"))
    assert indexes
    for path in indexes:
        try:
            read_checked(path)
        except CorruptFileError as error:
            pytest.fail(str(error))
        for entry in Index.read(path).entries.values():
            assert (path.parent / entry["artifact"]).is_file()
