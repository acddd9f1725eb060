"""The deterministic simulator: no schedule hangs or loses a token, and planted bugs are found.

`run.py` beside this file runs as many schedules as one likes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run as runner
from sim_bugs import BUGS
from sim_schedule import FAILED_START, MIN_STEPS, draw_schedule
from sim_world import run_schedule

NUM_SCHEDULES = 600
NUM_CHUNKS = 8
MAX_UNTIL_FOUND = 100
"""No planted bug has ever survived as many."""


@pytest.mark.feature("X04")
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_no_schedule_hangs_or_loses_a_token(chunk: int) -> None:
    num = NUM_SCHEDULES // NUM_CHUNKS
    for seed in range(chunk * num, (chunk + 1) * num):
        outcome = run_schedule(draw_schedule(seed))
        assert outcome.finding is None, f"run.py --only {seed}: {outcome.finding}"
        assert 2 <= outcome.schedule.num_ranks <= 4
        assert outcome.num_requests >= 8
        assert outcome.num_steps >= MIN_STEPS
        assert outcome.struck, f"seed {seed}: wanted a fault, found none"


@pytest.mark.feature("X04")
def test_the_seeds_meet_every_fault_and_every_kind_of_end() -> None:
    tally = runner.Tally()
    for seed in range(60):
        tally.add(run_schedule(draw_schedule(seed)))
    kinds = ["diverge", "drain", "kill", "pause", "slow", "stall", "stop"]
    wanted = {f"struck: {kind}" for kind in [*kinds, "held link", FAILED_START]}
    wanted |= {"had: aborts", "had: pre-emption", "had: resubmission"}
    wanted |= {f"ranks: {n}" for n in (2, 3, 4)} | {f"restarts: {n}" for n in (0, 1, 2)}
    assert wanted <= set(tally.counts)
    print("\n".join(tally.lines()))


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
