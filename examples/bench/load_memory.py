"""Private memory of a rank while it loads, against the bytes of its slice.

    python examples/bench/load_memory.py [--gigabytes 2] [--ranks 2] [--dtype bfloat16]
        [--hidden 2048] [--vocab 32000] [--tied] [--quantization none]

A random Llama checkpoint in files of 256 MB is written to a temporary directory and loaded by one
rank in a fresh process. The parent reads its RssAnon and RssShmem a thousand times a second;
pages of the checkpoint are mapped from its files and are not private. With `--quantization` the
rank holds integers; the slice is still that of numbers.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
FILE_BYTES = 256 * 2**20
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 2048, 5632, 32, 8, 32000

CHILD = """
import sys
import torch
from model.kernels.cpu.native import libraries_for, native_library
from model.kernels.cpu.packed_linear import can_pack
from model.layers.linear import MergedColumnParallelLinear
from model.weights import load_model
from model.parallel import Placement, Shard

torch.set_num_threads(1)
path, rank, ranks, dtype, held = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
dtype = getattr(torch, dtype)
# What a process allocates once, however small its model: the kernels and oneDNN's own code.
for library in libraries_for(dtype, dtype, held, has_peers=False):
    native_library(library)
small = MergedColumnParallelLinear(
    256, 256, ["up_proj"], Placement(dtype, torch.device("cpu")), bias=False
)
small.allocate("weight").zero_()
small.loaded("weight")
print("ready", can_pack(dtype, torch.device("cpu")), flush=True)
sys.stdin.readline()
shard = Shard(rank, ranks)
model, _ = load_model(path, shard=shard, dtype=dtype, device="cpu", quantization=held)
print(sum(p.nbytes for p in model.parameters()), flush=True)
sys.stdin.readline()
"""


def main() -> None:
    """Write the checkpoint, load it, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of the loaded model")
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        shape = {"hidden": options.hidden, "vocab": options.vocab, "tied": options.tied}
        write_checkpoint(path, int(options.gigabytes * 1e9), **shape)
        kinds = (options.dtype, options.quantization)
        print(json.dumps(measure(path, options.ranks, *kinds)))


def write_checkpoint(path: Path, num_bytes: int, *, hidden: int, vocab: int, tied: bool) -> None:
    """Write a random bfloat16 Llama of about `num_bytes` whose layers follow from that."""
    inner, kv = hidden * INNER // HIDDEN, hidden * KV_HEADS // HEADS
    ends = (1 if tied else 2) * vocab * hidden
    layer = 2 * hidden * hidden + 2 * kv * hidden + 3 * inner * hidden
    num_layers = max((num_bytes // 2 - ends) // layer, 1)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _layer(hidden, inner, kv)}
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    _write_files(path, shapes)


def _layer(hidden: int, inner: int, kv: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        ("input_layernorm.weight", (hidden,)),
        ("self_attn.q_proj.weight", (hidden, hidden)),
        ("self_attn.k_proj.weight", (kv, hidden)),
        ("self_attn.v_proj.weight", (kv, hidden)),
        ("self_attn.o_proj.weight", (hidden, hidden)),
        ("post_attention_layernorm.weight", (hidden,)),
        ("mlp.gate_proj.weight", (inner, hidden)),
        ("mlp.up_proj.weight", (inner, hidden)),
        ("mlp.down_proj.weight", (hidden, inner)),
    ]


def _write_files(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    names = list(shapes)
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, dtype=torch.bfloat16)
        if name == names[-1] or sum(t.nbytes for t in tensors.values()) > FILE_BYTES:
            file_name = f"model-{len(set(weight_map.values())):05d}.safetensors"
            save_file(tensors, path / file_name)
            weight_map |= dict.fromkeys(tensors, file_name)
            tensors = {}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def measure(
    path: Path, ranks: int, dtype: str, held: str, rank: int = 0
) -> dict[str, float | bool]:
    """Load one rank's slice in a fresh process and return slice, peak and rest in bytes."""
    command = [sys.executable, "-c", CHILD, str(path), str(rank), str(ranks), dtype, held]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        is_packed = child.stdout.readline().split() == ["ready", "True"]
        before = private_bytes(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        began = time.monotonic()
        peak = _watch(child)
        seconds = time.monotonic() - began
        slice_bytes = int(child.stdout.readline())
        rest = private_bytes(child.pid) - before
        child.stdin.close()
    return {
        "slice_bytes": slice_bytes,
        "peak_bytes": peak - before,
        "peak_ratio": round((peak - before) / slice_bytes, 3),
        "rest_ratio": round(rest / slice_bytes, 3),
        "load_s": round(seconds, 1),
        "packed": is_packed,
    }


def _watch(child: subprocess.Popen[str]) -> int:
    """Return the child's largest private memory until it prints a line or ends."""
    peak = 0
    while not select.select([child.stdout], [], [], 0.001)[0]:
        peak = max(peak, private_bytes(child.pid))
    return peak


def private_bytes(pid: int) -> int:
    """Return RssAnon and RssShmem of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    wanted = ("RssAnon:", "RssShmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


if __name__ == "__main__":
    main()
