"""Check that this machine's GPU computes the right thing, and how far from its targets.

    python examples/bench/gpu_check.py kernels|models|graphs|tests [--out FILE] [--only PART ...]
        [--deadline SECONDS] [--slow FACTOR] [--device cpu] [--quick]

Each run is a list of parts, those worth most first, and ends within its deadline of nine minutes:

    kernels  every kernel against its torch reference in float32, and timed
    models   whole models, the engine's loops, collectives of one rank
    graphs   levels and graph modes against eager, at every captured size
    tests    the tests that are marked `gpu`

torch, triton, transformers, msgspec and pyzmq are enough for the first three; Ray and llguidance
are not needed. Each part runs in its own process with its own time limit. One that fails or hangs
is recorded, with its stacks, and the next one runs; one that the deadline leaves no time for is
recorded as not run. FILE is written anew after every part, and names those that are to come.

Timed rows have the larger of two floors: the bytes they must move over the copy bandwidth measured
in the same run, and the operations they must do over the measured rate of a matrix product. One
that is replayed alone from a graph has the launch of a graph with a kernel of nothing on top.
Figures with a target (`gpu_check_targets.py`) are printed beside it, and the summary names those
that were missed. With `--device cpu` the same parts run with small shapes, through torch, and have
no targets of speed.

The exit code is 1 if a part failed or did not run, or a result was wrong. A target that was missed
does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_check_targets import ELSEWHERE, Judged, State, judge

BEGAN = time.monotonic()
"""The deadline counts from here. This process does not import torch, so it starts at once."""
KERNELS, MODELS, ENGINE = "gpu_check_kernels", "gpu_check_models", "gpu_check_engine"
GROUPS, GRAPHS, TESTS = "gpu_check_groups", "gpu_check_graphs", "gpu_check_tests"
STARTS, MODES = "gpu_check_starts", "gpu_check_modes"

RUNS: dict[str, dict[str, tuple[str, float]]] = {
    "kernels": {
        "machine": (KERNELS, 180.0),
        "decode": (KERNELS, 180.0),
        "ragged": (KERNELS, 180.0),
        "fp8": (KERNELS, 120.0),
        "prefill": (KERNELS, 180.0),
        "latents": (KERNELS, 180.0),
        "tiles": (KERNELS, 120.0),
        "pool": (KERNELS, 120.0),
        "filters": (KERNELS, 120.0),
        "experts": (KERNELS, 180.0),
        "short_experts": (KERNELS, 180.0),
        "adapters": (KERNELS, 120.0),
        "integers": (KERNELS, 120.0),
        "scaled_linear": (KERNELS, 120.0),
        "rope": (KERNELS, 120.0),
        "elementwise": (KERNELS, 120.0),
        "transfer": (KERNELS, 120.0),
    },
    "models": {
        "machine": (KERNELS, 180.0),
        "model": (MODELS, 180.0),
        "step": (MODELS, 240.0),
        "overlap": (ENGINE, 180.0),
        "drafts": (ENGINE, 180.0),
        "sealed": (ENGINE, 120.0),
        "collectives": (GROUPS, 90.0),
        "sizing": (GRAPHS, 240.0),
        "restart": (STARTS, 240.0),
        "sizing-moe": (GRAPHS, 240.0),
        "runner": (MODELS, 180.0),
    },
    "graphs": {
        "machine": (KERNELS, 180.0),
        "graphs-3-FULL_AND_PIECEWISE-shared-bfloat16": (GRAPHS, 240.0),
        "modes": (MODES, 240.0),
        "graphs-0-FULL_DECODE_ONLY-shared": (GRAPHS, 120.0),
        "graphs-3-FULL_AND_PIECEWISE-shared": (GRAPHS, 240.0),
        "graphs-0-NONE-shared": (GRAPHS, 120.0),
        "graphs-0-FULL_AND_PIECEWISE-shared": (GRAPHS, 120.0),
        "graphs-2-NONE-shared": (GRAPHS, 240.0),
        "graphs-3-PIECEWISE-shared": (GRAPHS, 240.0),
        "graphs-3-FULL_AND_PIECEWISE-per_bucket": (GRAPHS, 240.0),
        "graphs-2-FULL_DECODE_ONLY-shared": (GRAPHS, 240.0),
        "graphs-0-FULL-shared": (GRAPHS, 120.0),
        "graphs-3-NONE-shared": (GRAPHS, 240.0),
        "graphs-3-FULL_DECODE_ONLY-shared": (GRAPHS, 240.0),
        "graphs-3-FULL_AND_PIECEWISE-shared-sizes": (GRAPHS, 400.0),
        "graphs-3-FULL_AND_PIECEWISE-shared-streams": (GRAPHS, 240.0),
    },
    "tests": {"tests": (TESTS, 480.0)},
}
"""The parts of each run, in their order, with their modules and the seconds that they may take; a
GPU's first calls compile kernels. A graph part's name holds level, mode, pool policy and what is
particular; one that fails leaves the others alone."""
PARTS = {name: where for parts in RUNS.values() for name, where in parts.items()}
DEADLINE_S = 540.0
STACKS_S = 3.0
"""How long before its limit a part prints its stacks."""
LEAST_S = 10.0
"""A part that has less time than this is not begun: importing torch takes most of it."""
KILL_S = 5.0
"""A process that waits for its driver cannot be killed; the next part runs beside it."""


@dataclass(frozen=True)
class Limits:
    """What bounds the parts of a run. `end` is a reading of the monotonic clock."""

    end: float
    deadline_s: float
    factor: float
    """Of every part's own limit."""

    def of(self, name: str) -> float:
        """Return the seconds that a part may take from now on; 0 if it does not fit."""
        left = self.end - time.monotonic()
        return min(PARTS[name][1] * self.factor, left) if left >= LEAST_S else 0.0


def not_run(name: str, why: str) -> dict[str, Any]:
    """Return what is recorded of a part that was not begun."""
    return {
        "part": name,
        "is_run": False,
        "failure": f"not run: {why}",
        "stderr": "",
        "seconds": 0.0,
        "rows": [],
    }


def run_part(name: str, options: argparse.Namespace, limits: Limits) -> dict[str, Any]:
    """Run a part in its own process; return its rows so far, and what went wrong."""
    limit_s = limits.of(name)
    if not limit_s:
        return not_run(name, f"the deadline of {limits.deadline_s:g} s leaves no time for it")
    began = time.monotonic()
    try:
        rows, failure, tail = _run_process(name, options, limit_s)
    except OSError as error:  # the machine may be short of processes or of disk
        rows, failure, tail = [], f"could not be started: {error}", ""
    seconds = time.monotonic() - began
    if failure.startswith("no end") and limit_s < PARTS[name][1] * limits.factor:
        failure += f", where the deadline of {limits.deadline_s:g} s cut it off"
    return {
        "part": name,
        "is_run": True,
        "failure": failure,
        "stderr": tail,
        "seconds": round(seconds, 1),
        "rows": rows,
    }


def _run_process(
    name: str, options: argparse.Namespace, limit_s: float
) -> tuple[list[dict[str, Any]], str, str]:
    command = [sys.executable, __file__, "--part", name, "--device", options.device]
    command += ["--time-limit", str(limit_s), *(["--quick"] if options.quick else [])]
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        # Of its own session, so that what it starts (compilers, pytest) ends with it.
        process = subprocess.Popen(command, stdout=printed, stderr=errors, start_new_session=True)
        failure = ""
        try:
            if process.wait(limit_s):
                failure = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"no end within {limit_s:.3g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
        printed.seek(0)
        errors.seek(0)
        return list(_rows(printed)), failure, errors.read()[-4000:]


def _rows(lines: Any) -> Any:
    for line in lines:
        # A process that is killed may leave half a line.
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{"):
                yield json.loads(line)


def print_rows(name: str, options: argparse.Namespace) -> None:
    """Run a part in this process and print each row as a line of JSON.

    Its module is imported here, so that one that cannot be imported fails its own parts alone.
    """
    import torch
    from gpu_check_rows import Setting

    if STACKS_S < options.time_limit < math.inf:
        faulthandler.dump_traceback_later(options.time_limit - STACKS_S)
    kind, *arguments = name.split("-")
    part = getattr(importlib.import_module(PARTS[name][0]), f"part_{kind}")
    at = Setting(torch.device(options.device), options.quick)
    torch.manual_seed(0)
    if at.device.type == "cpu":
        torch.set_num_threads(1)
    with torch.inference_mode():
        for row in part(at, *arguments):
            print(json.dumps({**asdict(row), "is_right": row.is_right}), flush=True)


def add_floors(parts: list[dict[str, Any]]) -> None:
    """Give every timed row its floor and how many times as long it took.

    A rate that was not measured gives no floor to the rows that need it.
    """
    rows = [row for part in parts for row in part["rows"]]
    named = {row["name"]: row for row in rows if row["seconds"]}
    for row in rows:
        bounds = {"num_bytes": row["copy"], "num_flops": "matmul"}
        rates = [
            row[amount] * named[name]["seconds"] / named[name][amount]
            if name in named
            else math.nan
            for amount, name in bounds.items()
            if row[amount]
        ]
        launch_s = named.get("launch", {}).get("seconds", 0.0) if row["is_replayed"] else 0.0
        floor_s = max(rates, default=math.nan) + launch_s
        if not row["seconds"] or any(math.isnan(each) for each in rates) or not rates:
            continue
        row["floor_s"], row["times_floor"] = floor_s, row["seconds"] / floor_s
        row["gb_per_s"] = row["num_bytes"] / row["seconds"] / 1e9
        row["tflop_per_s"] = row["num_flops"] / row["seconds"] / 1e12


def print_header() -> None:
    """Print the names of the columns."""
    print(f"{'':56}{'error':>10}{'limit':>10}{'us':>12}{'floor us':>12}{'times':>8}", flush=True)


def print_part(part: dict[str, Any], judged: list[Judged]) -> None:
    """Print a part's rows, what failed, and the figures that have a target."""
    for row in part["rows"]:
        cells = [f"{row['name']:56}", _cell(row["error"], 10, ".1e")]
        cells += [_cell(row["limit"], 10, ".1e")]
        cells += [_cell(_micros(row.get(name)), 12, ".1f") for name in ("seconds", "floor_s")]
        cells += [_cell(row.get("times_floor"), 8, ".2f")]
        if row["value"] is not None:
            cells += [f" {row['value']:.6g} {row['unit']}"]
        print("".join(cells), row["note"], "" if row["is_right"] else "WRONG", flush=True)
    for each in judged:
        print(f"    {each.state.value:6} {each.text}", flush=True)
    if part["failure"]:
        label = "FAILED" if part["is_run"] else "NOT RUN"
        print(f"{label} {part['part']}: {part['failure']}\n{part['stderr']}", flush=True)


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'' if value is None else format(value, form):>{width}}"


def _micros(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def chosen(run: str, only: list[str]) -> list[str]:
    """Return a run's parts that are named, or whose names begin with one; all if none is given.

    The machine's comes with them, where the run has it.
    """
    kinds = {"machine", *only}
    return [
        name for name in RUNS[run] if not only or name in kinds or name.partition("-")[0] in kinds
    ]


def is_right(parts: list[dict[str, Any]]) -> bool:
    """Return whether all parts ran to their ends and no result was wrong."""
    return all(not p["failure"] and all(row["is_right"] for row in p["rows"]) for p in parts)


def write_out(path: Path, run: str, options: argparse.Namespace, parts: list[Any]) -> None:
    """Write what is known by now; a disk that is full stops no part."""
    judged = judge(parts, has_speed=options.device == "cuda" and not options.quick)
    found = {
        "run": run,
        "device": options.device,
        "parts": parts,
        "targets": [each.as_dict() for each in judged],
        "elsewhere": ELSEWHERE,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.tmp")
        unfinished.write_text(json.dumps(found, indent=1))
        unfinished.replace(path)
    except OSError as error:
        print(f"cannot write {path}: {error}", flush=True)


def print_summary(parts: list[dict[str, Any]], judged: list[Judged]) -> None:
    """Print what failed, was wrong, was not run or missed its target."""
    rows = [row for part in parts for row in part["rows"]]
    print(f"\nsummary: {len(parts)} parts, {len(rows)} rows")
    lines = {
        "failed": [f"{p['part']}: {p['failure']}" for p in parts if p["is_run"] and p["failure"]],
        "wrong": [f"{row['name']} {row['note']}" for row in rows if not row["is_right"]],
        "not run": [p["part"] for p in parts if not p["is_run"]],
        "targets missed": [each.text for each in judged if each.state is State.MISSED],
        "targets not measured": [each.text for each in judged if each.state is State.UNKNOWN],
    }
    num_met = sum(each.state is State.MET for each in judged)
    for title, found in lines.items():
        print(f"  {title}: {len(found) or 'none'}", *found, sep="\n    ")
    num_apart = sum(each.state is State.NOT_APPLICABLE for each in judged)
    print(f"  targets met: {num_met}; of a GPU at full size alone: {num_apart}", flush=True)


def run_parts(run: str, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run parts one after the other, print each and write all; return what is recorded of them."""
    deadline_s = options.deadline * options.slow
    limits = Limits(BEGAN + deadline_s, deadline_s, options.slow)
    parts = [not_run(name, "the run has not come to it") for name in names]
    has_speed = options.device == "cuda" and not options.quick
    known: set[str] = set()
    print_header()
    for index, name in enumerate(names):
        if options.out:
            write_out(options.out, run, options, parts)
        parts[index] = run_part(name, options, limits)
        add_floors(parts)
        judged = judge(parts, has_speed=has_speed)
        new = [j for j in judged if j.state in (State.MET, State.MISSED) and j.text not in known]
        known |= {each.text for each in new}
        print_part(parts[index], new)
    if options.out:
        write_out(options.out, run, options, parts)
    print_summary(parts, judge(parts, has_speed=has_speed))
    return parts


def main() -> None:
    """Run the parts of a run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=list(RUNS), nargs="?")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="smallest shapes, fewest repetitions")
    parser.add_argument("--only", nargs="+", default=[], help="parts, or how their names begin")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for the run")
    parser.add_argument("--slow", type=float, default=1.0, help="factor of every limit in time")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--time-limit", type=float, default=math.inf, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print_rows(options.part, options)
        return
    if options.run is None:
        parser.error(f"wanted one of {', '.join(RUNS)}")
    names = chosen(options.run, options.only)
    known = {each for name in RUNS[options.run] for each in (name, name.partition("-")[0])}
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only: wanted some of {', '.join(sorted(known))}, found {unknown[0]!r}")
    # What ends this process ends the part too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(0 if is_right(run_parts(options.run, names, options)) else 1)


if __name__ == "__main__":
    main()
