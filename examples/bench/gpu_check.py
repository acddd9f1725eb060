"""Check that this machine's accelerator computes the right thing, and how far from its floor.

    python examples/bench/gpu_check.py [--device cuda] [--out FILE] [--quick] [--only PART ...]
        [--slice NUMBER] [--deadline SECONDS]

One command for a bare machine: torch, triton, transformers, msgspec and pyzmq are enough, Ray is
not needed. Each part runs in its own process with its own time limit; what fails or hangs is
recorded, with its stacks, and the next part runs. FILE is written anew after every part. Where a
command may not take as long as all parts together (100 minutes at worst), `--slice 1`, `--slice 2`
and so on run what nine minutes hold, `--only` runs parts, or all whose names begin so (`graphs`),
and a deadline ends what is left.

Every kernel is compared with its torch twin in float32 and timed against the larger of two floors:
the bytes it must move over the copy bandwidth measured in the same run, and the operations it must
do over the measured rate of a matrix product. On a CPU the same parts run with small shapes,
through torch.

The exit code is 1 if a part failed or a result was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from gpu_check_rows import Setting

GRAPHS = (
    "0-NONE-shared",
    "0-FULL_DECODE_ONLY-shared",
    "2-NONE-shared",
    "2-FULL_DECODE_ONLY-shared",
    "3-NONE-shared",
    "3-PIECEWISE-shared",
    "3-FULL_DECODE_ONLY-shared",
    "3-FULL_AND_PIECEWISE-shared",
    "3-FULL_AND_PIECEWISE-per_bucket",
    "3-FULL_AND_PIECEWISE-shared-bfloat16",
    "3-FULL_AND_PIECEWISE-shared-sizes",
)
"""Level, mode, pool policy and what is particular of each graph part; one that fails leaves the
others alone."""
PARTS: dict[str, tuple[str, float]] = {
    "machine": ("gpu_check_kernels", 60.0),
    "decode": ("gpu_check_kernels", 240.0),
    "prefill": ("gpu_check_kernels", 240.0),
    "pool": ("gpu_check_kernels", 240.0),
    "ragged": ("gpu_check_kernels", 240.0),
    "tiles": ("gpu_check_kernels", 120.0),
    "rope": ("gpu_check_kernels", 120.0),
    "elementwise": ("gpu_check_kernels", 120.0),
    "experts": ("gpu_check_kernels", 240.0),
    "filters": ("gpu_check_kernels", 120.0),
    "transfer": ("gpu_check_kernels", 120.0),
    "model": ("gpu_check_models", 240.0),
    "runner": ("gpu_check_models", 240.0),
    "step": ("gpu_check_models", 300.0),
    "sizing": ("gpu_check_graphs", 240.0),
    **{f"graphs-{variant}": ("gpu_check_graphs", 240.0) for variant in GRAPHS},
}
"""Each part's module and the seconds it may take; a GPU's first calls compile kernels."""
SLICE_S = 540.0
"""What a slice takes at most, the machine's part included."""
STACKS_S = 3.0
"""How long before its limit a part prints its stacks."""


def run_part(name: str, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Run a part in its own process; return its rows so far, and what went wrong."""
    limit_s = min(PARTS[name][1], options.time_limit, left_s)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    failure, tail = f"not run: the deadline of {options.deadline:g} s has passed", ""
    if limit_s > 0:
        rows, failure, tail = _run_process(name, options, limit_s)
    seconds = round(time.monotonic() - began, 1)
    return {"part": name, "failure": failure, "stderr": tail, "seconds": seconds, "rows": rows}


def _run_process(
    name: str, options: argparse.Namespace, limit_s: float
) -> tuple[list[dict[str, Any]], str, str]:
    command = [sys.executable, __file__, "--part", name, "--device", options.device]
    command += ["--time-limit", str(limit_s), *(["--quick"] if options.quick else [])]
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=printed, stderr=errors)
        failure = ""
        try:
            if process.wait(limit_s):
                failure = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"no end within {limit_s:g} s"
            process.kill()
            # A process that waits for its driver cannot be killed; the next part runs beside it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        printed.seek(0)
        errors.seek(0)
        rows = [json.loads(line) for line in printed if line.startswith("{")]
        return rows, failure, errors.read()[-4000:]


def print_rows(name: str, options: argparse.Namespace) -> None:
    """Run a part in this process and print each row as a line of JSON.

    Its module is imported here, so that one that cannot be imported fails its own parts alone.
    """
    if options.time_limit > STACKS_S:
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
    """Give every timed row its floor and how many times as long it took."""
    rows = {row["name"]: row for part in parts for row in part["rows"]}
    copy, matmul = rows.get("copy"), rows.get("matmul")
    if copy is None or matmul is None:
        return
    bytes_per_s = copy["num_bytes"] / copy["seconds"]
    flops_per_s = matmul["num_flops"] / matmul["seconds"]
    for row in rows.values():
        if row["seconds"] is not None:
            row["floor_s"] = max(row["num_bytes"] / bytes_per_s, row["num_flops"] / flops_per_s)
            row["times_floor"] = row["seconds"] / row["floor_s"]
            row["gb_per_s"] = row["num_bytes"] / row["seconds"] / 1e9
            row["tflop_per_s"] = row["num_flops"] / row["seconds"] / 1e12


def print_header() -> None:
    """Print the names of the columns."""
    print(f"{'':46}{'error':>10}{'limit':>10}{'us':>12}{'floor us':>12}{'times':>8}", flush=True)


def print_part(part: dict[str, Any]) -> None:
    """Print a part's rows and what failed."""
    for row in part["rows"]:
        cells = [f"{row['name']:46}", _cell(row["error"], 10, ".1e")]
        cells += [_cell(row["limit"], 10, ".1e")]
        cells += [_cell(_micros(row.get(name)), 12, ".1f") for name in ("seconds", "floor_s")]
        cells += [_cell(row.get("times_floor"), 8, ".2f")]
        print("".join(cells), row["note"], "" if row["is_right"] else "WRONG", flush=True)
    if part["failure"]:
        print(f"FAILED {part['part']}: {part['failure']}\n{part['stderr']}", flush=True)


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'' if value is None else format(value, form):>{width}}"


def _micros(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def chosen(names: list[str]) -> list[str]:
    """Return the parts that are named, or whose names begin with one; the machine's comes first."""
    kinds = {"machine", *names}
    return [name for name in PARTS if name in kinds or name.partition("-")[0] in kinds]


def slices(names: list[str]) -> list[list[str]]:
    """Cut parts, the machine's first, into lists that each end in time, each with the machine's."""
    machine, *others = names
    found = [[machine]]
    for name in others:
        if sum(PARTS[part][1] for part in (*found[-1], name)) > SLICE_S:
            found.append([machine])
        found[-1].append(name)
    return found


def main() -> None:
    """Run the parts one after the other and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = list(dict.fromkeys(name.partition("-")[0] for name in PARTS))
    names = [*kinds, *(name for name in PARTS if name not in kinds)]
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--quick", action="store_true", help="smallest shapes, fewest repetitions")
    parser.add_argument("--only", nargs="+", choices=names, default=kinds)
    parser.add_argument("--slice", type=int, help="of the parts: number 1 and up, 9 minutes each")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for any part")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds for all parts")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print_rows(options.part, options)
        return
    names = chosen(options.only)
    if options.slice is not None:
        cut = slices(names)
        if not 1 <= options.slice <= len(cut):
            parser.error(f"--slice: wanted 1 to {len(cut)}, found {options.slice}")
        names = cut[options.slice - 1]
        print(f"slice {options.slice} of {len(cut)}: {' '.join(names)}")
    end = time.monotonic() + options.deadline
    parts: list[dict[str, Any]] = []
    print_header()
    for name in names:
        parts.append(run_part(name, options, end - time.monotonic()))
        add_floors(parts)
        print_part(parts[-1])
        if options.out:
            options.out.write_text(json.dumps({"device": options.device, "parts": parts}, indent=1))
        if name == "machine" and parts[-1]["failure"]:
            print("the machine cannot be measured: no other part runs")
            break
    is_right = all(not p["failure"] and all(row["is_right"] for row in p["rows"]) for p in parts)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
