"""Compiling in another process while a rank serves, with everything but Ray and sockets."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_ranks import config_of, run, tokens_of, wait_for
from wire_structs import submit_of

from cluster.config import EngineConfig
from cluster.engine.compile_switch import CannotCompile
from cluster.group.context import RankContext
from cluster.group.membership import GroupMembership
from cluster.rank.compile_process import CompileJob, CompileProcess
from cluster.rank.leader import assemble_engine
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import Submit
from compile.counters import counter
from compile.graphs.capture import is_sealed
from model.parallel import Shard

ALONE = GroupMembership(None, Shard())
LIMIT_S = 240.0
"""For a process that imports torch and traces, on a machine that does much else."""


def compiling(path: Path, cache: Path, **fields: Any) -> EngineConfig:
    compilation: dict[str, Any] = {
        "level": 3,
        # Pieces as they were traced: kept in the cache like others, and there within seconds.
        "use_inductor": False,
        "serve_while_compiling": "on",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": (1, 2),
        "capture_num_tokens": (4, 8),
        "cache_dir": str(cache),
        "sealed": "strict",
    }
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    return config_of(path, num_kv_blocks=64, **sizes | compilation | fields)


@contextmanager
def started(config: EngineConfig) -> Iterator[ModelRunner]:
    runner = ModelRunner(RankContext(config))
    try:
        yield runner
    finally:
        runner.close()


def error_of(runner: ModelRunner) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not runner.compile_error:
        assert time.monotonic() < deadline
        runner.load_piece()
    return runner.compile_error


def request(number: int) -> Submit:
    return submit_of(f"r{number}", [5, 6, 7, 8], max_tokens=50)


INTEGERS = {"dtype": "float16", "quantization": "int8"}
"""Only what linear layers hold as integers is packed, and then traced otherwise, in this dtype."""


@pytest.mark.feature("X06")
@pytest.mark.parametrize(
    "held", [{}, pytest.param(INTEGERS, marks=pytest.mark.slow)], ids=["plain", "integers"]
)
def test_a_rank_serves_eagerly_goes_over_and_is_sealed_and_the_next_start_is_warm(
    held: dict[str, Any], oracle: Any, tmp_path: Path
) -> None:
    path = oracle.path
    eager = replace(compiling(path, tmp_path, level=0, cudagraph_mode="NONE"), **held)
    with started(eager) as runner:
        outputs = run(assemble_engine(eager, runner), [request(0).request])
        wanted = tokens_of(outputs["r0"])
    config = replace(compiling(path, tmp_path), **held)
    with counter.expect(num_backend_compilations=0), started(config) as runner:
        switch = runner.switch
        assert not switch.is_over and not is_sealed()
        assert runner.compile_progress is not None and runner.compile_progress[0] == "compiling"
        engine = assemble_engine(config, runner)
        found: list[list[int]] = []
        stages, deadline = {0}, time.monotonic() + LIMIT_S
        is_last = False
        while engine.has_unfinished or not is_last:
            assert time.monotonic() < deadline, runner.compile_progress
            if not engine.has_unfinished:
                is_last = switch.is_over and len(found) > 1  # its steps are replays
                found.append([])
                engine.submit(request(len(found)))
            runner.load_piece()
            found[-1] += tokens_of(engine.step())
            stages.add(switch.stage)
        assert stages == {0, 1, 2, 3, 4, 5}, "pieces, two graphs of pieces, two of decode steps"
        assert all(each == wanted for each in found)
        assert is_sealed() and runner.compile_progress is None and not runner.compile_error
        assert sum(runner.forward.num_replays.values()) > 0
        graphs = runner.forward.captured
    with counter.expect(num_backend_compilations=0), started(config) as runner:
        assert runner.switch.is_over and runner.forward.captured == graphs
        assert runner.compile_progress is None


@pytest.mark.feature("X06")
def test_without_a_cache_to_leave_it_in_a_rank_compiles_before_it_is_ready(
    oracle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_DISABLE_COMPILE_CACHE", "1")
    with started(compiling(oracle.path, tmp_path)) as runner:
        assert runner.switch.is_over and runner.forward.captured.batch_sizes == (1, 2)


@pytest.mark.feature("X06")
def test_a_compiler_that_fails_says_why_and_the_rank_goes_on_eagerly(
    oracle: Any, tmp_path: Path
) -> None:
    lost = CompileJob.of(RankContext(compiling(tmp_path / "gone", tmp_path)), ALONE)
    assert "gone" in ended(lost).error
    with started(compiling(oracle.path, tmp_path)) as runner:
        for child in psutil.Process().children():
            with suppress(psutil.ZombieProcess):  # of another test
                if "cluster.rank.compile_process" in child.cmdline():
                    child.terminate()
        assert error_of(runner) == "the process that compiles was ended by SIGTERM"
        assert runner.compile_progress is None and not runner.switch.can_advance


@pytest.mark.feature("E01", "A07", "F07")
def test_a_rank_whose_model_cannot_be_compiled_ends_and_says_why(
    oracle: Any, tmp_path: Path
) -> None:
    config = compiling(oracle.path, tmp_path, splitting_ops=["lockstep::nothing"])
    wanted = r"^compilation\.splitting_ops: wanted .*, found 'lockstep::nothing'$"
    with started(config) as runner, pytest.raises(CannotCompile, match=wanted):
        error_of(runner)


def ended(job: CompileJob) -> CompileProcess:
    process = CompileProcess(job, lambda: None)
    wait_for(lambda: process.has_ended, LIMIT_S)
    return process


PARENT = """
import os, pathlib, pickle, signal, sys
from cluster.rank.compile_process import CompileProcess
process = CompileProcess(pickle.loads(bytes.fromhex(sys.argv[1])), lambda: None)
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(status: Path) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in status.read_text()
    return False


@pytest.mark.feature("X06")
def test_a_compiler_ends_with_its_rank(oracle: Any, tmp_path: Path) -> None:
    job = CompileJob.of(RankContext(compiling(oracle.path, tmp_path)), ALONE)
    done = subprocess.run(
        [sys.executable, "-c", PARENT, pickle.dumps(job).hex()], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL
    status = Path(f"/proc/{int(done.stdout)}/status")
    wait_for(lambda: not is_running(status), LIMIT_S)  # it does not outlive its rank
    assert not list(tmp_path.glob("*/artifacts/*")), "it had compiled before it noticed"
