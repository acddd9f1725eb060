"""Run many schedules of the simulator, print what came of them, and fail if anything was found.

    python tests/simulation/run.py --schedules 50000 --seed 0
    python tests/simulation/run.py --schedules 1000000 --processes 32 --report report.txt
    python tests/simulation/run.py --only 4711

Schedule number i has the seed `--seed` + i, on any machine and in any process; `--only` runs one
schedule and prints it. `--report` writes what is printed, and the number of schedules until each
planted bug is found. A long run may be made of several: `--tally FILE` keeps the account in a JSON
file, and goes on behind the last seed of what is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from sim_bugs import BUGS  # noqa: E402
from sim_schedule import Shape, draw_schedule  # noqa: E402
from sim_world import Outcome, Plants, run_schedule  # noqa: E402

MAX_TOLD = 20
MAX_UNTIL_FOUND = 5000
"""The rarest planted bug shows in one of a thousand schedules."""
CHUNK = 50


def sizes_of(shapes: list[Shape]) -> str:
    return " and ".join(f"{shape.dp_size}x{shape.tp_size}" for shape in shapes)


@dataclass
class Tally:
    num_schedules: int = 0
    steps: list[int] = field(default_factory=list)
    """Agreed ones with work, of each schedule."""
    counts: Counter[str] = field(default_factory=Counter)
    """By ranks, faults, features, epochs and outcome."""
    totals: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0
    longest_move_s: float = 0.0
    longest_drain_s: float = 0.0
    findings: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Tally:
        if not path.exists():
            return cls()
        found = json.loads(path.read_text())
        counters = {name: Counter(found[name]) for name in ("counts", "totals")}
        return cls(**{**found, **counters})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self)) + "\n")

    def add(self, outcome: Outcome) -> None:
        schedule, finding = outcome.schedule, outcome.finding
        self.num_schedules += 1
        self.steps.append(outcome.num_steps)
        self.longest_pause_s = max(self.longest_pause_s, outcome.longest_pause_s)
        self.longest_move_s = max(self.longest_move_s, outcome.longest_move_s)
        self.longest_drain_s = max(self.longest_drain_s, outcome.longest_drain_s)
        names = [f"ranks: {schedule.num_ranks}", f"restarts: {outcome.num_restarts}"]
        names += [f"replicas: {n}" for n in {shape.num_replicas for shape in schedule.groups}]
        names.append(f"groups, dp x tp: {sizes_of(schedule.groups)}")
        names += [f"struck: {kind}" for kind in sorted(set(outcome.struck))]
        beside = "beside" if schedule.has_device else "in"
        loop = "overlapped" if schedule.is_overlapped else "plain"
        loop = "drafting" if schedule.num_drafts else loop
        names.append(f"steps: {loop}, {beside} the host")
        names += [f"scaled: {way}" for way in sorted(outcome.scaled)]
        names += ["had: aborts"] * bool(outcome.num_aborted)
        names += ["had: refusals"] * bool(outcome.num_refused)
        names += ["had: pre-emption"] * bool(outcome.num_preemptions)
        names += ["had: resubmission"] * bool(outcome.num_resubmitted)
        names += ["had: handoff"] * bool(outcome.num_handoffs)
        names += ["had: moves"] * bool(outcome.moves)
        names += [f"moves: {pool}" for pool in sorted(outcome.moves)]
        if outcome.moves:
            names += ["moves beside: pre-emption"] * bool(outcome.num_preemptions)
            names += ["moves beside: a rebuild"] * bool(outcome.num_restarts)
        if outcome.num_moves_with_kv:
            names.append(f"moves with KV: {loop}, {beside} the host")
        names += ["moves with KV: lost on its way"] * bool(outcome.num_lost_moves)
        names += [f"judged: {what}" for what in sorted(outcome.num_judged)]
        names.append(f"outcome: {finding.kind if finding else 'holds'}")
        self.counts.update(names)
        self.totals.update(
            requests=outcome.num_requests,
            aborted=outcome.num_aborted,
            refused=outcome.num_refused,
            attempts=outcome.num_resubmitted,
            preemptions=outcome.num_preemptions,
            handoffs=outcome.num_handoffs,
            moves=outcome.moves.total(),
            moves_with_kv=outcome.num_moves_with_kv,
            lost_moves=outcome.num_lost_moves,
            steps=outcome.num_steps,
            simulated_s=round(outcome.simulated_s),
        )
        if finding is not None:
            again = f"python tests/simulation/run.py --only {schedule.seed}"
            self.findings.append(f"{finding}; again: {again}")

    def lines(self) -> Iterator[str]:
        yield f"{self.num_schedules} schedules, {len(self.findings)} findings"
        steps = sorted(self.steps)
        p50, p99 = steps[len(steps) // 2], steps[len(steps) * 99 // 100]
        yield f"agreed steps with work: least {steps[0]}, p50 {p50}, p99 {p99}, most {steps[-1]}"
        pause = f"{self.longest_pause_s:.2f} s"
        yield f"longest pause beyond the time to detect, with a healthy replica: {pause}"
        yield f"longest move, with room elsewhere: {self.longest_move_s:.2f} s"
        yield f"longest drain, likewise: {self.longest_drain_s:.2f} s"
        for name, count in sorted(self.counts.items()):
            yield f"  {name:24} {count:8} {count / self.num_schedules:7.1%}"
        for name, count in sorted(self.totals.items()):
            yield f"  in all: {name:16} {count:8}"
        yield from self.findings[:MAX_TOLD]


def schedules_until_found(plants: Plants) -> str:
    for i in range(MAX_UNTIL_FOUND):
        schedule = draw_schedule(i)
        finding = run_schedule(schedule, plants).finding if plants.is_met(schedule) else None
        if finding is not None:
            return f"{i + 1:5} {finding.kind}"
    return f"{MAX_UNTIL_FOUND:5} and not found"


def bug_lines() -> Iterator[str]:
    yield "schedules until a planted bug is found, and as what:"
    for name, plants in BUGS.items():
        yield f"  {name:42} {schedules_until_found(plants)}"


def run_seed(seed: int) -> Outcome:
    return run_schedule(draw_schedule(seed))


def run_all(seeds: Iterable[int], num_processes: int) -> Iterator[Outcome]:
    """Run schedules, in order of their seeds."""
    if num_processes == 1:
        yield from map(run_seed, seeds)
        return
    # What was imported stays; there is no need to look through it again.
    with multiprocessing.get_context("spawn").Pool(num_processes, gc.freeze) as pool:
        yield from pool.imap(run_seed, seeds, chunksize=CHUNK)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", type=int, help="run one schedule and print it")
    parser.add_argument("--report", type=Path, help="also write the report, planted bugs included")
    parser.add_argument("--tally", type=Path, help="go on from this file, and write it")
    arguments = parser.parse_args()
    if arguments.only is not None:
        outcome = run_seed(arguments.only)
        print(outcome)
        return int(outcome.finding is not None)
    gc.freeze()
    tally = Tally() if arguments.tally is None else Tally.read(arguments.tally)
    began, first = time.perf_counter(), arguments.seed + tally.num_schedules
    for outcome in run_all(range(first, first + arguments.schedules), arguments.processes):
        tally.add(outcome)
        if outcome.finding is not None:
            print(tally.findings[-1], flush=True)
    took_s = time.perf_counter() - began
    if arguments.tally is not None:
        tally.write(arguments.tally)
    lines = [f"seeds from {arguments.seed}", *tally.lines()]
    lines.append(f"{arguments.schedules / took_s:.1f} schedules a second")
    print("\n".join(lines), flush=True)
    if arguments.report is not None:
        bugs = list(bug_lines())
        print("\n".join(bugs))
        arguments.report.write_text("\n".join([*lines, *bugs]) + "\n")
    return int(bool(tally.findings))


if __name__ == "__main__":
    sys.exit(main())
