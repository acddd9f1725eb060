"""The deterministic simulator: no schedule hangs or loses a token, and planted bugs are found.

How many schedules a run of these tests goes through, and from which seed on, is told by
`LOCKSTEP_SIMULATION_SCHEDULES` (10,000) and `LOCKSTEP_SIMULATION_SEED` (0). `run.py` beside this
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
    FAILED_START,
    FATAL,
    HARMLESS,
    IN_TRANSFER,
    LOST_CALLS,
    MIN_STEPS,
    draw_schedule,
)
from sim_world import run_schedule

NUM_SCHEDULES = int(os.environ.get("LOCKSTEP_SIMULATION_SCHEDULES", "10000"))
FIRST_SEED = int(os.environ.get("LOCKSTEP_SIMULATION_SEED", "0"))
NUM_PROCESSES = len(os.sched_getaffinity(0))
MAX_UNTIL_FOUND = 300
"""No planted bug has ever survived as many."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.feature("X04")
def test_no_schedule_hangs_or_loses_a_token() -> None:
    tally = runner.Tally()
    seeds = range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES)
    print(f"seeds {seeds.start} to {seeds.stop - 1}, {NUM_PROCESSES} processes")
    for outcome in runner.run_all(seeds, NUM_PROCESSES):
        tally.add(outcome)
        seed = outcome.schedule.seed
        assert outcome.finding is not None or outcome.num_steps >= MIN_STEPS, f"seed {seed}"
        assert outcome.finding is not None or outcome.num_requests >= 8, f"seed {seed}"
        assert outcome.struck, f"seed {seed}: wanted a fault, found none"
        assert 2 <= outcome.schedule.num_ranks <= 4, f"seed {seed}"
    print("\n".join(tally.lines()))
    assert tally.num_schedules == NUM_SCHEDULES
    assert not tally.findings, "\n".join(tally.findings[: runner.MAX_TOLD])


@pytest.mark.feature("X04")
def test_the_seeds_meet_every_fault_and_every_kind_of_end() -> None:
    tally = runner.Tally()
    for seed in range(250):
        tally.add(run_schedule(draw_schedule(seed)))
    wanted = {f"struck: {kind}" for kind in (*FATAL, *HARMLESS, LOST_CALLS, FAILED_START)}
    wanted |= {f"struck: {kind} in a transfer" for kind in IN_TRANSFER}
    wanted |= {"had: aborts", "had: pre-emption", "had: resubmission", "had: handoff"}
    wanted |= {f"ranks: {n}" for n in (2, 3, 4)} | {f"restarts: {n}" for n in (0, 1, 2)}
    wanted |= {f"groups, dp x tp: {group}" for group in ("2x1", "3x1", "4x1", "1x2", "2x2")}
    assert wanted <= set(tally.counts), sorted(wanted - set(tally.counts))


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
    found = runner.schedules_until_found(BUGS[name], most=MAX_UNTIL_FOUND)
    print(f"{name}: {found}")
    assert "not found" not in found
