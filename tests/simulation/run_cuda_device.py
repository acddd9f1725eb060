"""Serve mixed requests on the simulated CUDA device in many orders, and compare with the CPU.

    python tests/simulation/run_cuda_device.py --orders 200 --seed 0
    python tests/simulation/run_cuda_device.py --only 3-FULL --orders 20

Every mode runs with and without overlap, as one engine and as a prefill and a decode engine: in
`--orders` random orders each, with seeds from `--seed` on, and before them as late as is legal and
at once. A start serves a few orders, and the next one is of another family. Prints what was found
wrong, with order and seed, and fails if anything was.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
ORDERS_PER_START = 12


def main() -> int:
    """Run what the command line says; return 1 if anything was found wrong."""
    with tempfile.TemporaryDirectory(prefix="lockstep-simulation-") as scratch:
        # It is read when the product is imported.
        os.environ["LOCKSTEP_CACHE_ROOT"] = scratch
        return run(Path(scratch))


def run(scratch: Path) -> int:
    """Run what the command line says, with models in `scratch`."""
    from cuda_device import Order
    from cuda_work import FAMILIES, MODES, Oracle, all_ways, serve

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=10, help="for each way to serve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=MODES, action="append", help="mode")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.orders)
    orders: list[tuple[Order, int]] = [("late", arguments.seed), ("eager", arguments.seed)]
    orders += [("random", seed) for seed in seeds]
    oracle, families, num_wrong = Oracle(scratch), cycle(FAMILIES), 0
    for way in all_ways():
        if way.mode not in (arguments.only or MODES):
            continue
        began, num_right = time.monotonic(), 0
        for first in range(0, len(orders), ORDERS_PER_START):
            case = replace(way, family=next(families))
            served = orders[first : first + ORDERS_PER_START]
            found_by_order: list[list[str]] = []
            try:
                found_by_order += serve(case, oracle, served)
            except Exception as error:
                found_by_order.append([f"{type(error).__name__}: {error}"])
            num_right += found_by_order.count([])
            for (order, seed), found in zip(served, found_by_order, strict=False):
                for each in found:
                    print(f"{case}, {order}, seed {seed}: {each}", flush=True)
        print(
            f"{way.name}: {num_right} of {len(orders)}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        num_wrong += len(orders) - num_right
    print("in each the tokens of the CPU, and no wait or copy more than is called for")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
