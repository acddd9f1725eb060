"""Serve mixed requests on the simulated CUDA device in many orders, and compare with the CPU.

    python tests/simulation/run_cuda_device.py --orders 200 --seed 0
    python tests/simulation/run_cuda_device.py --only full-overlapped --orders 20

Order number i has the seed `--seed` + i and is random; each configuration also runs once as late as
is legal. Prints each run that differs, and fails if any does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from cuda_device import Order  # noqa: E402
from cuda_work import CONFIGURATIONS, run_on_cpu, run_on_device  # noqa: E402


def main() -> int:
    """Run what the command line says; return 1 if anything differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=10, help="for each configuration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=CONFIGURATIONS, action="append", help="configuration")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.orders)
    orders: list[tuple[Order, int]] = [("late", 0), *(("random", seed) for seed in seeds)]
    wanted, num_failed = run_on_cpu().token_ids, 0
    for name in arguments.only or CONFIGURATIONS:
        num_equal = 0
        for order, seed in orders:
            found: object
            try:
                found = run_on_device(name, order, seed).token_ids
            except RuntimeError as error:
                found = f"{type(error).__name__}: {error}"
            num_equal += found == wanted
            if found != wanted:
                print(f"{name}, {order}, seed {seed}: wanted {wanted}, found {found}", flush=True)
        print(f"{name}: {num_equal} of {len(orders)} orders equal the CPU", flush=True)
        num_failed += len(orders) - num_equal
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
