"""What penalties and drawing cost a step on a CPU: kernels in C++ against torch functions.

    python examples/bench/sampling.py [--threads N] [--rows 1 8 32] [--vocab 4096 151936]
        [--rounds 9]

Both draw from the same logits in turns, of normal distribution times 3. Each figure is a median of
rounds, in milliseconds:

    temperature  0.7, and nothing else
    top-k        the 20 likeliest
    top-p        those that have 0.8 of the mass together
    both         top-k, then top-p
    mask         a grammar's, which allows half of all tokens
    penalties    repetition, presence and frequency, of which nothing is drawn
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model.kernels import cpu, drawing

KINDS: dict[str, dict[str, float] | None] = {
    "temperature": {},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.8},
    "both": {"top_k": 20, "top_p": 0.8},
    "mask": {"allowed": 0},
    "penalties": None,
}


def main() -> None:
    """Print a line for each kind of row, number of rows and size of a vocabulary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 151_936])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'kind':12}{'rows':>6}{'vocab':>9}{'torch':>10}{'kernel':>10}{'ratio':>8}")
    for vocab in options.vocab:
        for rows in options.rows:
            for kind, values in KINDS.items():
                torch_ms, kernel_ms = measure(rows, vocab, values, options.rounds)
                line = f"{torch_ms:10.2f}{kernel_ms:10.2f}{kernel_ms / torch_ms:8.3f}"
                print(f"{kind:12}{rows:6}{vocab:9}{line}", flush=True)


def measure(
    rows: int, vocab: int, values: dict[str, float] | None, num_rounds: int
) -> tuple[float, float]:
    """Return milliseconds of torch functions, and of the kernel. None: of penalties."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    arguments: tuple[torch.Tensor | None, ...]
    if values is None:
        both = (drawing.penalise, cpu.penalise)
        counts = torch.randint(-9, 2, (rows, vocab), generator=generator, dtype=torch.int32)
        arguments = (counts.clamp(min=0), counts == 0, torch.arange(rows), *[torch.ones(rows)] * 3)
    else:
        both = (drawing.draw, cpu.draw)
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator)
        arguments = (
            torch.full((rows,), 0.7),
            torch.rand(rows, dtype=torch.float64, generator=generator),
            words.to(torch.int32) if "allowed" in values else None,
            torch.full((rows,), int(values["top_k"])) if "top_k" in values else None,
            torch.full((rows,), values["top_p"]) if "top_p" in values else None,
            None,
        )
    taken: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(num_rounds + 1):
        for i, call in enumerate(both):
            began = time.perf_counter()
            call(logits, *arguments)
            taken[i].append(time.perf_counter() - began)
    first, second = (1e3 * statistics.median(taken[i][1:]) for i in (0, 1))
    return first, second


if __name__ == "__main__":
    main()
