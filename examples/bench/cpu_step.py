"""What an eager step costs on a CPU with our kernels, against torch functions in their place.

    python examples/bench/cpu_step.py [--model DIR] [--dtype bfloat16] [--threads 2] [--rounds 5]
        [--steps 1x1+128 8x1+128 32x1+128 4x128 1x512 32x128 1x2048 1x512+1536]

A step is so many sequences, times their new tokens, plus the tokens that are in the cache. What is
timed is the model's forward, without head and sampling; nothing is compiled. Products with packed
weights are the same in both. The two take turns, and each figure is a median of rounds:

    torch    milliseconds with torch functions: attention of prompts sequence by sequence, norms,
             gates and rotary positions as several operations each; decodes attend in C++ in both
    kernels  milliseconds with all of that in C++
    ratio    of these two
    products, attention, rest
             what a profiler finds of one more step of either, in per cent of it

Without a model it is a random one of the shape of Qwen2.5-0.5B.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compile.context import ForwardContext, forward_context
from model.kernels import cpu, dispatch, paged_attention
from model.kv_cache import KVCacheSpec
from model.layers.attention import AttentionMetadata
from model.layers.decoder import CausalLM
from model.parallel import Shard
from model.weights import load_model

BLOCK_SIZE = 16
STEPS = ["1x1+128", "8x1+128", "32x1+128", "4x128", "1x512", "32x128", "1x2048", "1x512+1536"]
PRODUCTS = ("lockstep::packed_linear", "mkldnn::_linear_pointwise", "aten::addmm", "aten::mm")
ATTENTION = "lockstep::unified_attention_with_output"


def main() -> None:
    """Print a line for each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", nargs="+", default=STEPS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = load(given.model, getattr(torch, given.dtype))
    print(f"{given.dtype}, {given.threads} threads; products, attention and rest in %")
    print(f"{'step':>12} {'torch':>9} {'kernels':>9}  ratio   torch: p, a, r    kernels: p, a, r")
    for name in given.steps:
        step = step_of(model, name)
        seconds: dict[str, list[float]] = {"torch": [], "kernels": []}
        for current in range(given.rounds + 1):
            for variant, found in seconds.items():
                with torch_functions() if variant == "torch" else ExitStack():
                    began = time.perf_counter()
                    step()
                    if current:
                        found.append(time.perf_counter() - began)
        with torch_functions():
            before = shares(step)
        medians = [1e3 * statistics.median(found) for found in seconds.values()]
        columns = (f"{part:5.1f}" for part in (*before, *shares(step)))
        ratio = medians[1] / medians[0]
        print(
            f"{name:>12} {medians[0]:9.2f} {medians[1]:9.2f}   {ratio:.2f} ", *columns, flush=True
        )


def load(path: Path | None, dtype: torch.dtype) -> CausalLM:
    """Return a checkpoint's model, or a random one's."""
    if path is not None:
        return load_model(path, shard=Shard(), dtype=dtype, device="cpu")[0]
    from decode_bandwidth import make_checkpoint

    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), 24, dtype)
        return load_model(Path(name), shard=Shard(), dtype=dtype, device="cpu")[0]


def step_of(model: CausalLM, name: str) -> Callable[[], torch.Tensor]:
    """Return a function that runs a step of sequences whose blocks lie anywhere in a pool."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?", name)
    if found is None:
        raise SystemExit(f"--steps: wanted such as 4x128 or 8x1+128, found {name}")
    num_seqs, new, cached = (int(number or 0) for number in found.groups())
    length = cached + new
    layers = model.attention_layers()
    first = next(iter(layers.values()))
    columns = -(-length // BLOCK_SIZE)
    weight = model.model.norm.weight
    kind = (len(layers), first.num_kv_heads, first.head_dim, BLOCK_SIZE, weight.dtype)
    spec = KVCacheSpec(*kind)
    pool = spec.allocate(num_seqs * columns, torch.device("cpu"))
    pool[1:].normal_()
    table = (torch.randperm(num_seqs * columns) + 1).view(num_seqs, columns).int()
    positions = torch.arange(cached, length)
    slots = table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    metadata = AttentionMetadata(
        num_decodes=num_seqs if new == 1 else 0,
        cu_seqlens_q=torch.arange(0, num_seqs * new + 1, new).int(),
        seq_lens=torch.full((num_seqs,), length).int(),
        block_table=table,
        slot_mapping=slots.flatten(),
    )
    context = ForwardContext(layers, metadata, spec.views(pool, list(layers)))
    ids = torch.randint(model.config.vocab_size, (num_seqs * new,))

    def step() -> torch.Tensor:
        with torch.inference_mode(), forward_context(context):
            return model(ids, positions.repeat(num_seqs))

    return step


@contextmanager
def torch_functions() -> Iterator[None]:
    """Run torch functions in the kernels' place, but for decodes and products."""
    with (
        patch.object(dispatch, "uses_ops", lambda _: False),
        patch.object(cpu, "paged_prefill", paged_attention.paged_prefill),
        patch.object(cpu, "rope_and_write_kv", paged_attention.rope_and_write_kv),
    ):
        yield


def shares(step: Callable[[], torch.Tensor]) -> tuple[float, float, float]:
    """Return which share of a step products, attention and the rest have, in per cent."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        began = time.perf_counter()
        step()
        whole = 1e6 * (time.perf_counter() - began)
    events = {event.key: event for event in profile.key_averages()}
    products = sum(events[name].self_cpu_time_total for name in PRODUCTS if name in events)
    attention = events[ATTENTION].cpu_time_total
    parts = (products, attention, whole - products - attention)
    return tuple(100 * part / whole for part in parts)  # type: ignore[return-value]


if __name__ == "__main__":
    main()
