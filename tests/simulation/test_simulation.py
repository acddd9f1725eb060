"""The deterministic simulator: no schedule hangs or loses a token, and planted bugs are found.

How many schedules a run of these tests goes through, and from which seed on, is told by
`LOCKSTEP_SIMULATION_SCHEDULES` (1,000) and `LOCKSTEP_SIMULATION_SEED` (0). `run.py` beside this
file runs as many as one likes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run as runner
from sim_bugs import BUGS
from sim_schedule import (
    CONNECTION,
    DRAINS,
    FAILED_START,
    FATAL,
    HARMLESS,
    IN_TRANSFER,
    LOST_CALLS,
    MAX_RANKS,
    MIN_STEPS,
    MIXED,
    PREFILL_AND_DECODE,
    draw_schedule,
)
from sim_world import run_schedule

FIRST_SEED = int(os.environ.get("LOCKSTEP_SIMULATION_SEED", "0"))
NUM_SCHEDULES = int(os.environ.get("LOCKSTEP_SIMULATION_SCHEDULES", "500"))
SEEDS = range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES)
SHAPES = [*([shape] for shape in MIXED), *PREFILL_AND_DECODE]
NUM_PROCESSES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def tally() -> runner.Tally:
    tally, num_struck = runner.Tally(), 0
    for outcome in runner.run_all(SEEDS, NUM_PROCESSES):
        tally.add(outcome)
        if outcome.finding is None:
            seed = outcome.schedule.seed
            assert outcome.num_steps >= MIN_STEPS, f"seed {seed}"
            assert outcome.num_requests >= 4, f"seed {seed}"
            num_struck += bool(outcome.struck)
            assert 2 <= outcome.schedule.num_ranks <= MAX_RANKS, f"seed {seed}"
    # A few name a step to which no request brings the rank that it is to strike.
    assert num_struck + len(tally.findings) >= 0.95 * len(SEEDS), f"{num_struck} had a fault"
    print(f"seeds {SEEDS.start} to {SEEDS.stop - 1}, {NUM_PROCESSES} processes")
    print("\n".join(tally.lines()))
    return tally


@pytest.mark.timeout(3600)
@pytest.mark.feature("X04")
def test_no_schedule_hangs_or_loses_a_token(tally: runner.Tally) -> None:
    assert tally.num_schedules == len(SEEDS)
    assert not tally.findings, "\n".join(tally.findings[: runner.MAX_TOLD])


@pytest.mark.timeout(3600)
@pytest.mark.feature("X04")
@pytest.mark.skipif(len(SEEDS) < 500, reason="fewer schedules may miss one")
def test_the_seeds_meet_every_fault_and_every_kind_of_end(tally: runner.Tally) -> None:
    other = (*DRAINS, LOST_CALLS, FAILED_START)
    wanted = {f"struck: {kind}" for kind in (*FATAL, *HARMLESS, *CONNECTION, *other)}
    wanted |= {f"struck: {kind} in a transfer" for kind in IN_TRANSFER}
    wanted |= {f"had: {what}" for what in ("aborts", "refusals", "pre-emption", "handoff")}
    wanted |= {"had: moves", "judged: moves", "judged: drains", "moves with KV: lost on its way"}
    wanted |= {"scaled: up", "scaled: down", "judged: queues"}
    wanted |= {f"moves: {pool}" for pool in ("mixed", "prefill", "decode")}
    wanted |= {f"moves beside: {what}" for what in ("pre-emption", "a rebuild")}
    wanted |= {f"replicas: {n}" for n in (1, 2, 3)} | {"ranks: 2", f"ranks: {MAX_RANKS}"}
    wanted |= {f"restarts: {n}" for n in (0, 1, 2)}
    loops = ("plain", "overlapped", "drafting")
    ways = [f"{loop}, {device} the host" for loop in loops for device in ("in", "beside")]
    wanted |= {f"{what}: {way}" for what in ("steps", "moves with KV") for way in ways}
    wanted |= {f"groups, dp x tp: {runner.sizes_of(shapes)}" for shapes in SHAPES}
    assert wanted <= set(tally.counts), sorted(wanted - set(tally.counts))
    assert any(name.endswith("in a move") for name in tally.counts)


def test_a_tally_goes_on_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "tally"
    whole = runner.Tally()
    for seed in range(4):
        whole.add(run_schedule(draw_schedule(seed)))
        part = runner.Tally.read(path)
        part.add(run_schedule(draw_schedule(seed)))
        part.write(path)
    assert runner.Tally.read(path) == whole
    assert list(runner.Tally.read(path).lines()) == list(whole.lines())


@pytest.mark.feature("X04")
def test_a_seed_gives_the_same_trace_in_every_process() -> None:
    seed = 11
    outcome = run_schedule(draw_schedule(seed))
    assert run_schedule(draw_schedule(seed)) == outcome
    assert run_schedule(draw_schedule(seed + 1)).trace != outcome.trace
    script = Path(runner.__file__)
    other = subprocess.run(
        [sys.executable, str(script), "--only", str(seed)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == str(outcome)


@pytest.mark.feature("X04")
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    found = runner.schedules_until_found(BUGS[name])
    print(f"{name}: {found}")
    assert "not found" not in found
