"""The products of a decode step with packed weights: the kernel's against oneDNN's, and torch's.

    python examples/bench/packed_linear.py [--dtype bfloat16] [--threads 2] [--rows 1 8 64]
        [--layers 12] [--hidden 896] [--intermediate 4864] [--kv 256] [--repeats 7]

Weights are those of as many layers as fill no cache, each layer with its own, and every product
meets one that has to come from memory. The three take turns; of each, the fastest turn counts:

    rows      tokens that are multiplied at once
    ms        of all products of all layers
    GB/s      of the weights' bytes
    TFLOP/s   of products
    ratio     of oneDNN's time, or of torch's plain product where oneDNN packs nothing

The kernel is measured at every number of rows that it can take, also where `KERNEL_ROWS` leaves
them to oneDNN; the row says so. Shapes are those of Qwen2.5-0.5B if nothing else is asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from model.kernels.cpu import packed_linear
from model.kernels.cpu.native import native_function
from model.kernels.cpu.packed_linear import PackedWeight

Product = Callable[[torch.Tensor, int], torch.Tensor]
"""Of an input and a number of a weight."""


def main() -> None:
    """Print a line for each number of rows and way to multiply."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--intermediate", type=int, default=4864)
    parser.add_argument("--kv", type=int, default=256, help="outputs of keys and values together")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    hidden, wide = given.hidden, given.intermediate
    shapes = [(hidden + given.kv, hidden), (hidden, hidden), (2 * wide, hidden), (hidden, wide)]
    plain = [torch.randn(s, dtype=dtype) * 0.05 for _ in range(given.layers) for s in shapes]
    packed = [PackedWeight(weight) for weight in plain]
    num_bytes = sum(weight.nbytes for weight in plain)
    ways = products(plain, packed)
    print(f"{given.dtype}, {given.threads} threads, {num_bytes / 1e6:.0f} MB of weights")
    print(f"{'rows':>5} {'multiplied by':<16} {'ms':>8} {'GB/s':>6} {'TFLOP/s':>8}  ratio")
    for rows in given.rows:
        inputs = [torch.randn(rows, weight.shape[1], dtype=dtype) for weight in plain]
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(given.repeats):
            for name, product in ways.items():
                best[name] = min(best[name], seconds(product, inputs))
        base = best.get("oneDNN", best["torch, plain"])
        flop = 2 * rows * sum(weight.numel() for weight in plain)
        for name, took in best.items():
            is_used = name != "kernel" or rows <= packed_linear._entry(packed[0].handle).kernel_rows
            note = "" if is_used else " (not used)"
            print(
                f"{rows:5} {name + note:<16} {1e3 * took:8.2f} {num_bytes / took / 1e9:6.1f}"
                f" {flop / took / 1e12:8.3f}  {took / base:.2f}",
                flush=True,
            )


def products(plain: list[torch.Tensor], packed: list[PackedWeight]) -> dict[str, Product]:
    """Return the ways to multiply that this processor has, by name."""
    entries = [packed_linear._entry(weight.handle) for weight in packed]
    ways: dict[str, Product] = {"torch, plain": lambda x, i: F.linear(x, plain[i])}
    if entries[0].packed is not None:
        ways["oneDNN"] = lambda x, i: torch.ops.mkldnn._linear_pointwise(
            x, entries[i].packed, None, "none", [], ""
        )
    is_built = native_function("packed_linear", plain[0].dtype) is not None
    if is_built and all(entry.kernel_rows > 1 for entry in entries):
        ours = [replace(entry, kernel_rows=sys.maxsize) for entry in entries]
        ways["kernel"] = lambda x, i: packed_linear._product(x, ours[i], None)
    return ways


def seconds(product: Product, inputs: list[torch.Tensor]) -> float:
    """Return how long all products took."""
    began = time.perf_counter()
    for i, x in enumerate(inputs):
        product(x, i)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
