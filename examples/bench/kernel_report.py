"""Registers, shared memory, spills and pipelines of every Triton kernel, compiled ahead of time.

    python examples/bench/kernel_report.py [--arch 80 90] [--json]

No GPU is needed. Each kernel's own launch function is called with tensors that have shapes but no
memory; what it would have launched is compiled for each architecture with the same types,
constants and alignments, so the report cannot drift from what runs. cuobjdump reads the binaries.

    per SM   programs that fit on one multiprocessor at once
    buffers  tiles of each pipelined load that shared memory holds; 1 copies no tile ahead
    waits    copies that each wait leaves in flight; 0 waits for all of them
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Triton 3.9 warns where neither is chosen; fusing multiply and add is what older ones do.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from compile.formats import FP8_GROUP
from model.kernels.cpu.packed_linear import GPU_TILE_OUTPUTS
from model.kernels.paged_attention import FP8
from model.kernels.scaled_linear import (
    FIRST_FP8_GPU,
    BlockScaledWeight,
    IntegerWeight,
    ScaledWeight,
)
from model.kernels.triton import adapters as triton_adapters
from model.kernels.triton import all_reduce as triton_all_reduce
from model.kernels.triton import decode as triton_decode
from model.kernels.triton import elementwise as triton_elementwise
from model.kernels.triton import experts as triton_experts
from model.kernels.triton import filters as triton_filters
from model.kernels.triton import fp4 as triton_fp4
from model.kernels.triton import fp8 as triton_fp8
from model.kernels.triton import integers as triton_integers
from model.kernels.triton import latent as triton_latent
from model.kernels.triton import latent_chunks as triton_latent_chunks
from model.kernels.triton import prefill as triton_prefill
from model.kernels.triton import rope as triton_rope
from model.kernels.triton import rounding as triton_rounding
from model.kernels.triton import routing as triton_routing
from model.kernels.triton.experts import Matrices
from model.quantization import Integers

KERNEL_MODULES = (
    triton_adapters,
    triton_all_reduce,
    triton_decode,
    triton_experts,
    triton_elementwise,
    triton_filters,
    triton_fp4,
    triton_fp8,
    triton_integers,
    triton_latent,
    triton_latent_chunks,
    triton_prefill,
    triton_rope,
    triton_rounding,
    triton_routing,
)
BLOCK_SIZE, MAX_BLOCKS, NUM_BLOCKS = 16, 2048, 4096
FLOAT = torch.float32
REGISTERS, WARP_REGISTERS, MAX_WARPS = 65_536, 256, 64
"""Of a multiprocessor; what a warp's are rounded up to."""
SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
RESERVED_BYTES = 1 << 10
"""Shared memory of a multiprocessor, and what the driver takes of it for each program."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Launch:
    """What a launch function asked for: the kernel, its arguments in order, its options."""

    kernel: JITFunction[Any]
    args: list[Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Usage:
    """What one program of a compiled kernel takes."""

    kernel: str
    case: str
    arch: int
    num_warps: int
    registers: int
    """Per thread."""
    shared_bytes: int
    """Static and dynamic."""
    stack_bytes: int
    """Per thread: spilled registers and local arrays."""
    local_bytes: int
    buffers: list[int]
    """Of each load that goes through shared memory, in the order of the program."""
    waits: list[int]
    """Of each wait for asynchronous copies, likewise."""

    @property
    def per_multiprocessor(self) -> int:
        """Programs that registers, shared memory and warps leave room for on one multiprocessor."""
        of_warp = -(-self.registers * 32 // WARP_REGISTERS) * WARP_REGISTERS
        by_registers = REGISTERS // (of_warp * self.num_warps)
        by_memory = SHARED_BYTES[self.arch] // (self.shared_bytes + RESERVED_BYTES)
        return min(by_registers, by_memory, MAX_WARPS // self.num_warps)


# --- what to compile ------------------------------------------------------------------------


def cases(
    arch: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield named calls of every launch function in realistic shapes."""
    for head_dim in (64, 128):
        for group in (4, 8):
            yield from attention_cases(f"D{head_dim} G{group}", head_dim, group, None, dtype)
    yield from attention_cases("D128 G8 W4096", 128, 8, 4096, dtype)
    for head_dim, group in ((64, 8), (128, 4)):
        name = f"D{head_dim} G{group} e4m3"
        yield from attention_cases(name, head_dim, group, None, dtype, has_fp8=True)
    yield from latent_cases(16, dtype)
    x, weight = empty(64, 4096, dtype=dtype), empty(4096, dtype=dtype)
    yield "E4096", lambda: triton_elementwise.rms_norm(x, weight, 1e-5)
    yield "E4096 fp8", lambda: triton_rounding.quantize_rows(x)
    yield "E4096 fp8 by group", lambda: triton_rounding.quantize_groups(x)
    yield "E4096 residual", lambda: triton_elementwise.fused_add_rms_norm(x, x, weight, 1e-5)
    for num_ranks, hidden, held in ((2, 4096, dtype), (8, 8192, dtype), (3, 100, torch.float32)):
        yield all_reduce_case(num_ranks, hidden, held)
    for num_tokens in (1, 4096):
        # Experts as Qwen3-30B-A3B has them, with the lowest tiles and the highest.
        yield expert_case(num_tokens, 128, 8, 2048, 768, dtype)
    yield expert_case(512, 8, 2, 1024, 512, torch.float32)
    for num_tokens in (1, 4096):
        for held in (Integers(4, 128), Integers(8, 4096)):
            yield integer_case(num_tokens, 4096, 14336, held, dtype)
        yield fp4_case(num_tokens, 4096, 14336, dtype)
        for num_groups in (1, 32):
            yield fp8_case(num_tokens, 4096, 14336, num_groups, dtype)
        for matrices in (integer_matrices, fp4_matrices, fp8_matrices, grouped_fp8_matrices):
            yield short_expert_case(num_tokens, 2048, 768, matrices, dtype)
    # DeepSeek-V3's and -V2's routing.
    yield route_case("sigmoid", 256, 8, empty(256, dtype=torch.float32), 8, 4, 2.5)
    yield route_case("softmax", 160, 6, None, 8, 3, 16.0)
    for num_tokens, rank in ((1, 16), (64, 16), (4096, 64)):
        # Queries, keys and values of a layer as Llama-3-8B has it.
        yield adapter_case(num_tokens, 4096, [4096, 1024, 1024], rank, dtype)
    yield adapter_case(512, 14336, [4096], 64, torch.float32)
    yield "n14336", lambda: triton_elementwise.silu_and_mul(empty(64, 2 * 14336, dtype=dtype))
    logits, limits = empty(32, 151_936, dtype=torch.float32), empty(32, dtype=torch.float32)
    counts = empty(32, dtype=torch.int64)
    yield "V151936", lambda: triton_filters.filter_top_k_top_p(logits, counts, limits)


def all_reduce_case(
    num_ranks: int, hidden: int, dtype: torch.dtype
) -> tuple[str, Callable[[], object]]:
    """Return a call that sums over ranks."""
    peers = triton_all_reduce.PeerMemory(empty(0, dtype=torch.uint8), [0] * num_ranks, 0)
    x, weight = empty(8, hidden, dtype=dtype), empty(hidden, dtype=dtype)
    name = f"R{num_ranks} E{hidden}"
    return name, lambda: peers.all_reduce_add_rms_norm(x, x, weight, 1e-5)


def expert_case(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, size: int, dtype: torch.dtype
) -> tuple[str, Callable[[], object]]:
    """Return a sparse layer's call."""
    x, logits = empty(num_tokens, hidden, dtype=dtype), empty(num_tokens, num_experts, dtype=dtype)
    gate_up = empty(num_experts, 2 * size, hidden, dtype=dtype)
    down = empty(num_experts, hidden, size, dtype=dtype)
    name = f"T{num_tokens} X{num_experts} E{hidden}"

    def call() -> None:
        experts, weights = triton_routing.route(logits, top_k, True)
        triton_experts.expert_mlp(x, experts, weights, gate_up, down, 0)

    return name, call


def integer_case(
    num_tokens: int, inputs: int, outputs: int, held: Integers, dtype: torch.dtype
) -> tuple[str, Callable[[], object]]:
    """Return a product with a weight of integers."""
    words = held.group * held.bits // 32
    size = (outputs // GPU_TILE_OUTPUTS, inputs // held.group, 1 + words, GPU_TILE_OUTPUTS)
    weight = IntegerWeight(empty(*size, dtype=torch.int32), held)
    x, bias = empty(num_tokens, inputs, dtype=dtype), empty(outputs, dtype=dtype)
    name = f"T{num_tokens} I{inputs} b{held.bits}"
    return name, lambda: triton_integers.integer_linear(x, weight, bias, outputs)


def fp4_case(
    num_tokens: int, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[str, Callable[[], object]]:
    """Return a product with FP4 numbers, rounded before."""
    x, scale = empty(num_tokens, inputs, dtype=dtype), empty(1, dtype=torch.float32)
    blocks = empty(outputs, inputs // 16, dtype=FP8)
    numbers = empty(outputs, inputs // 2, dtype=torch.uint8)
    weight = BlockScaledWeight(numbers, blocks, empty(1, outputs, dtype=torch.float32), scale)

    def call() -> None:
        rounded = triton_rounding.quantize_blocks(x, scale)
        triton_fp4.fp4_linear(*rounded, weight, None, dtype)

    return f"T{num_tokens} I{inputs} fp4", call


def fp8_case(
    num_tokens: int, inputs: int, outputs: int, num_groups: int, dtype: torch.dtype
) -> tuple[str, Callable[[], object]]:
    """Return a product with FP8 numbers that have so many scales for an output."""
    x, scales = empty(num_tokens, inputs, dtype=FP8), empty(num_tokens, num_groups, dtype=FLOAT)
    numbers, own = empty(outputs, inputs, dtype=FP8), empty(num_groups, outputs, dtype=FLOAT)
    name = f"T{num_tokens} I{inputs} G{num_groups} fp8"
    weight = ScaledWeight(numbers, own)
    return name, lambda: triton_fp8.fp8_linear(x, scales, weight, None, dtype)


def short_expert_case(
    num_tokens: int,
    hidden: int,
    size: int,
    matrices: Callable[[int, int], Matrices],
    dtype: torch.dtype,
) -> tuple[str, Callable[[], object]]:
    """Return a sparse layer's call whose 128 matrices are short numbers."""
    x, weights = empty(num_tokens, hidden, dtype=dtype), empty(num_tokens, 8, dtype=torch.float32)
    args = (x, empty(num_tokens, 8, dtype=torch.int64), weights)
    both = (matrices(2 * size, hidden), matrices(hidden, size))
    name = f"T{num_tokens} {matrices.__name__.removesuffix('_matrices')}"
    return name, lambda: triton_experts.expert_mlp(*args, *both, 0)


def integer_matrices(outputs: int, inputs: int) -> Matrices:
    size = (128, outputs // GPU_TILE_OUTPUTS, inputs // 128, 17, GPU_TILE_OUTPUTS)
    return IntegerWeight(empty(*size, dtype=torch.int32), Integers(4, 128))


def fp8_matrices(outputs: int, inputs: int, num_groups: int = 1) -> Matrices:
    scales = empty(128, num_groups, outputs, dtype=torch.float32)
    return ScaledWeight(empty(128, outputs, inputs, dtype=FP8), scales)


def grouped_fp8_matrices(outputs: int, inputs: int) -> Matrices:
    return fp8_matrices(outputs, inputs, inputs // FP8_GROUP)


def fp4_matrices(outputs: int, inputs: int) -> Matrices:
    blocks = empty(128, outputs, inputs // 16, dtype=FP8)
    scales, of_inputs = (empty(128, n, dtype=torch.float32) for n in (outputs, 1))
    numbers = empty(128, outputs, inputs // 2, dtype=torch.uint8)
    return BlockScaledWeight(numbers, blocks, scales.unsqueeze(1), of_inputs)


def route_case(
    name: str, num_experts: int, top_k: int, bias: torch.Tensor | None, *groups: float
) -> tuple[str, Callable[[], object]]:
    """Return a call that chooses experts of the best groups."""
    logits = empty(64, num_experts, dtype=torch.float32)
    return name, lambda: triton_routing.route(logits, top_k, True, bias, *groups)


def adapter_case(
    num_tokens: int, inputs: int, sizes: list[int], rank: int, dtype: torch.dtype
) -> tuple[str, Callable[[], object]]:
    """Return a call that adds what eight adapters make of a linear layer's inputs."""
    out, x = empty(num_tokens, sum(sizes), dtype=dtype), empty(num_tokens, inputs, dtype=dtype)
    a = empty(8, len(sizes) * rank, inputs, dtype=dtype)
    b = empty(8, rank, sum(sizes), dtype=dtype)
    of_token = empty(num_tokens, dtype=torch.int32)
    name = f"T{num_tokens} P{len(sizes)} R{rank}"
    return name, lambda: triton_adapters.add_adapters(out, x, a, b, sizes, of_token)


def attention_cases(
    name: str,
    head_dim: int,
    group: int,
    window: int | None,
    dtype: torch.dtype,
    *,
    has_fp8: bool = False,
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a layer's write, its prefill and its decodes with and without splits."""
    num_kv_heads = 8
    heads = (num_kv_heads * group, num_kv_heads, num_kv_heads)
    held = FP8 if has_fp8 else dtype
    scales = empty(2, num_kv_heads, dtype=torch.float32) if has_fp8 else None
    pool = empty(NUM_BLOCKS, 2, 2, BLOCK_SIZE, num_kv_heads, head_dim, dtype=held)
    caches = (pool[:, 1, 0], pool[:, 1, 1])
    q, k, v = empty(512, sum(heads), head_dim, dtype=dtype).split(heads, dim=1)
    out, scale = torch.empty_like(q), head_dim**-0.5
    cos = empty(512, 1, head_dim // 2, dtype=dtype)
    table, lengths, bounds = (
        empty(*shape, dtype=torch.int32) for shape in ((256, MAX_BLOCKS), (256,), (257,))
    )
    slots = empty(512, dtype=torch.int64)

    def decode(n: int) -> Callable[[], object]:
        where = (table[:n], lengths[:n])
        return lambda: triton_decode.paged_decode(
            q[:n], *caches, *where, scale, out[:n], window, scales
        )

    yield (
        name,
        lambda: triton_prefill.paged_prefill(
            q, *caches, table, bounds, lengths, scale, out, window, scales
        ),
    )
    yield f"{name} S1", decode(1)
    yield f"{name} S256", decode(256)
    if window is None:
        yield (
            name,
            lambda: triton_rope.rope_and_write_kv(q, k, v, cos, cos, *caches, slots, scales),
        )


def latent_cases(num_heads: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a layer's write, decodes with and without splits, and a prompt's tokens behind others
    and among themselves, as DeepSeek has them."""
    cache = empty(NUM_BLOCKS, 2, 1, BLOCK_SIZE, 1, 576, dtype=dtype)[:, 1, 0]
    tokens = (empty(512, 512, dtype=dtype), empty(512, 64, dtype=dtype))
    q, out = empty(512, num_heads, 576, dtype=dtype), empty(512, num_heads, 512, dtype=dtype)
    table, lengths, rows = (
        empty(*shape, dtype=torch.int32) for shape in ((256, MAX_BLOCKS), (512,), (512,))
    )

    def attend(n: int, *of_chunks: torch.Tensor) -> Callable[[], object]:
        where = (cache, cache[..., :512], table, lengths[:n], 0.1, out[:n], *of_chunks)
        return lambda: triton_latent.attend(q[:n], *where)

    log_sums = empty(512, num_heads, dtype=torch.float32)
    queries = empty(512, num_heads, 192, dtype=dtype).split([128, 64], dim=-1)
    chunks = (empty(512, 576, dtype=dtype), empty(num_heads, 256, 512, dtype=dtype))
    bounds = (empty(17, dtype=torch.int32), lengths[:16])
    found = empty(512, num_heads, 128, dtype=dtype)

    yield (
        f"H{num_heads}",
        lambda: triton_latent.write_latents(*tokens, cache, empty(512, dtype=torch.int64)),
    )
    yield f"H{num_heads} S1", attend(1)
    yield f"H{num_heads} S256", attend(256)
    yield f"H{num_heads} T4", attend(4, rows)
    yield (
        f"H{num_heads} T512",
        lambda: triton_latent_chunks.attend_before(
            q, cache, cache[..., :512], table, lengths[:16], 0.1, out, bounds[0], log_sums
        ),
    )
    yield (
        f"H{num_heads} T512 own",
        lambda: triton_latent_chunks.attend_own(*queries, *chunks, *bounds, log_sums, 0.1, found),
    )


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


# --- launches to binaries -------------------------------------------------------------------


def kernels_of(module: ModuleType) -> list[JITFunction[Any]]:
    """Return the kernels that a module launches."""
    return [x for name, x in vars(module).items() if name.endswith("_kernel")]


@contextmanager
def recording(arch: int) -> Iterator[list[Launch]]:
    """Collect what a device of an architecture would launch."""
    launches: list[Launch] = []
    with ExitStack() as stack:
        for module in (triton_prefill, triton_latent_chunks):
            stack.enter_context(patch.object(module, "arch_of", lambda _device: arch))
        has_fp8 = divmod(arch, 10) >= FIRST_FP8_GPU
        stack.enter_context(patch.object(triton_fp8, "multiplies_fp8", lambda _device: has_fp8))
        for kernel in (kernel for module in KERNEL_MODULES for kernel in kernels_of(module)):
            original = kernel.run
            stack.callback(setattr, kernel, "run", original)
            setattr(kernel, "run", _recorder(kernel, launches))  # noqa: B010
        yield launches


def _recorder(kernel: JITFunction[Any], launches: list[Launch]) -> Callable[..., None]:
    def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in kernel.params]
        constants = {n: kwargs.pop(n) for n in names if n in kwargs}
        launches.append(Launch(kernel, [*args, *constants.values()], kwargs))
        assert names[len(args) :] == list(constants), "constants in another order than parameters"

    return run


def ast_source(launch: Launch) -> ASTSource:
    """Specialise a launch as the runtime would: types, constants, divisibility by 16."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, launch.args, strict=True)):
        kind = "constexpr" if parameter.is_constexpr else _type_of(value)
        integer = None if parameter.do_not_specialize or kind[0] != "i" else value
        if parameter.is_constexpr or value is None or integer == 1:
            kind, constants[(i,)] = "constexpr", value
        elif parameter.do_not_specialize_on_alignment:
            pass
        elif kind[0] == "*" or (integer is not None and integer % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
    return ASTSource(launch.kernel, signature, constants, attributes)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        names = {
            "bfloat16": "bf16",
            "float16": "fp16",
            "float32": "fp32",
            "float64": "fp64",
            "float8_e4m3fn": "fp8e4nv",
            "uint8": "u8",
        }
        name = str(value.dtype).removeprefix("torch.")
        return "*" + names.get(name, name.replace("int", "i"))
    if isinstance(value, float):
        return "fp32"
    return "i32" if value is not None and -(2**31) <= value < 2**31 else "i64"


def _binary_of(launch: Launch) -> str:
    return f"{ast_source(launch).hash()} {sorted(launch.options.items())}"


def compile_launch(launch: Launch, case: str, arch: int) -> Usage:
    """Compile for one architecture and read what the binary takes."""
    compiled = triton.compile(
        ast_source(launch), target=GPUTarget("cuda", arch, 32), options=dict(launch.options)
    )
    usage = resource_usage(compiled.asm["cubin"])
    buffers, waits = pipeline_of(compiled.asm["ttgir"])
    return Usage(
        kernel=f"{Path(sys.modules[launch.kernel.__module__].__file__ or '').stem}"
        f".{launch.kernel.__name__}",
        case=case,
        arch=arch,
        num_warps=compiled.metadata.num_warps,
        registers=usage["REG"],
        shared_bytes=max(compiled.metadata.shared, usage["SHARED"]),
        stack_bytes=usage["STACK"],
        local_bytes=usage["LOCAL"],
        buffers=buffers,
        waits=waits,
    )


def pipeline_of(ttgir: str) -> tuple[list[int], list[int]]:
    """Return the buffers of each load and the copies that each wait leaves in flight."""
    shapes = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<([\dx]+)x\w+,", ttgir)
    buffers = [int(shape.split("x")[0]) for shape in shapes if shape.count("x") == 2]
    waits = re.findall(r"async_wait .*\{num = (\d+) : i32\}", ttgir)
    return buffers, [int(num) for num in waits]


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Return what cuobjdump says about a binary with one function."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:\d+ STACK:\d+ SHARED:\d+ LOCAL:\d+", printed.stdout + printed.stderr)
    if found is None:
        raise SystemExit(f"cuobjdump: wanted REG:... in its output, found {printed.stdout!r}")
    return {name: int(n) for name, n in re.findall(r"(\w+):(\d+)", found.group())}


def report(archs: list[int]) -> Iterator[Usage]:
    """Compile every case for every architecture."""
    for arch in archs:
        for case, call in cases(arch):
            with recording(arch) as launches:
                call()
            # A launch function may launch one binary several times.
            for launch in {_binary_of(launch): launch for launch in launches}.values():
                yield compile_launch(launch, case, arch)


def main() -> None:
    """Print a table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        raise SystemExit("TRITON_INTERPRET: wanted unset, to compile; found it set")
    if not options.json:
        print(
            f"{'kernel':32}{'case':20}{'sm':>4}{'warps':>7}{'regs':>6}{'shared':>9}{'stack':>7}"
            f"{'per SM':>8}  buffers, waits"
        )
    for usage in report(options.arch):
        if options.json:
            per_multiprocessor = {"per_multiprocessor": usage.per_multiprocessor}
            print(json.dumps(asdict(usage) | per_multiprocessor), flush=True)
        else:
            print(
                f"{usage.kernel:32}{usage.case:20}{usage.arch:>4}{usage.num_warps:>7}"
                f"{usage.registers:>6}{usage.shared_bytes:>9}{usage.stack_bytes:>7}"
                f"{usage.per_multiprocessor:>8}  {usage.buffers or '-'}, {usage.waits or '-'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
