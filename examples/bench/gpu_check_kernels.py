"""The kernel parts of gpu_check.py: kernels against their torch references in float32, timed."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpu_check_rows import Row, Setting, attempts, error_of

from cluster.kv.transport.store import BlockStore
from compile.passes.quantizers import quantize_blocks, quantize_groups
from model.kernels import adapters, latent_attention, paged_attention, sparse_mlp
from model.kernels.cpu.packed_linear import PackedWeight
from model.kernels.cpu.packed_linear import scaled_linear as scaled_op
from model.kernels.dispatch import kernels_for, packed_linear, silu_and_mul
from model.kernels.filters import filter_top_k_top_p
from model.kernels.scaled_linear import (
    BlockScaledWeight,
    ScaledWeight,
    quantize_inputs,
    scaled_linear,
    scaled_weight,
)
from model.kernels.triton.filters import filter_top_k_top_p as filter_on_gpu
from model.kv_cache import KVCacheSpec
from model.layers.decoder import RMSNorm
from model.parallel import Placement
from model.quantization import Integers

BLOCK_SIZE = 16


def part_machine(at: Setting) -> Iterator[Row]:
    """Name the device and measure what floors are made of."""
    note = f"torch {torch.__version__}, {platform.machine()}"
    if at.device.type == "cuda":
        import triton

        properties = torch.cuda.get_device_properties(at.device)
        note = f"{properties.name}, {properties.multi_processor_count} SMs, {note}"
        note += f", triton {triton.__version__}"
    yield Row("device", note=note)
    source = torch.zeros(at.pick(1 << 30, 1 << 26), dtype=torch.uint8, device=at.device)
    target = torch.empty_like(source)
    seconds = at.time(lambda: target.copy_(source))
    yield Row("copy", seconds=seconds, num_bytes=2 * source.numel())
    n = at.pick(8192, 512)
    a, b = at.randn(n, n), at.randn(n, n)
    yield Row("matmul", seconds=at.time(lambda: a @ b), num_flops=2 * n**3)
    one = at.randn(1)
    one.add_(1)
    yield Row("launch", seconds=at.time_replayed(lambda: one.add_(1)))


# --- kernels --------------------------------------------------------------------------------


@dataclass
class Cached:
    """Sequences in a paged cache whose blocks lie in random order, in bfloat16 or FP8.

    Slots behind a sequence are zero for the torch functions' sake.
    """

    at: Setting
    lengths: list[int]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_layers: int = 1
    """Of the pool; the caches are the last one's."""
    has_fp8: bool = False
    scales: tuple[torch.Tensor, ...] = field(init=False, default=())
    """What kernels take besides where the caches are FP8."""
    k_cache: torch.Tensor = field(init=False)
    v_cache: torch.Tensor = field(init=False)
    table: torch.Tensor = field(init=False)
    seq_lens: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        columns = -(-max(self.lengths) // BLOCK_SIZE)
        num_blocks = columns * len(self.lengths)
        spec = KVCacheSpec(
            self.num_layers, self.num_kv_heads, self.head_dim, BLOCK_SIZE, torch.bfloat16
        )
        pool = self.at.randn(num_blocks + 1, *spec.block_shape)
        pool[0] = 0
        if self.has_fp8:
            of_heads = torch.linspace(1, 2, self.num_kv_heads, device=self.at.device)
            self.scales = (torch.outer(of_heads.new_tensor([0.02, 0.3]), of_heads),)
            pool = paged_attention.quantize_kv(pool, self.scales[0].unsqueeze(1))
        self.k_cache, self.v_cache = pool[:, -1, 0], pool[:, -1, 1]
        order = torch.randperm(num_blocks, device=self.at.device) + 1
        self.table = order.view(len(self.lengths), columns).int()
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=self.at.device)
        for row, length in zip(self.table, self.lengths, strict=True):
            if length % BLOCK_SIZE:
                pool[int(row[length // BLOCK_SIZE]), ..., length % BLOCK_SIZE :, :, :].zero_()

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def token_bytes(self) -> int:
        """Of one token's key and value."""
        return 2 * self.k_cache.itemsize * self.num_kv_heads * self.head_dim

    def wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the caches hold in float32."""
        if not self.scales:
            return self.k_cache.float(), self.v_cache.float()
        k_scale, v_scale = self.scales[0].unsqueeze(-1)
        return self.k_cache.float() * k_scale, self.v_cache.float() * v_scale


DecodeCase = tuple[str, list[int], int | None, int]
"""A name, the sequences' lengths, a sliding window, and the layers of the pool."""
PrefillCase = tuple[str, list[int], list[int], int | None, int]
"""The same, and each sequence's number of queries behind the lengths."""


def part_decode(at: Setting) -> Iterator[Row]:
    """Decode attention: one long sequence, many, and a sliding window."""
    long, many = at.pick(32768, 600), at.pick(64, 4)
    half = at.pick(4096, 300)
    cases: list[DecodeCase] = [
        ("one long", [long], None, 1),
        ("batch", [half - 7 * i for i in range(many)], None, 1),
        ("batch, padded", [half, 0, 1, 17] * (many // 4), None, 1),
        ("window", [half] * many, half // 4, 1),
    ]
    yield from decodes(at, cases)


def part_fp8(at: Setting) -> Iterator[Row]:
    """Attention to an FP8 cache: of one byte a number, which is taken apart."""
    half, many = at.pick(4096, 300), at.pick(64, 4)
    yield from decodes(
        at,
        [
            ("FP8, one long", [at.pick(32768, 600)], None, 1),
            ("FP8", [half - 7 * i for i in range(many)], None, 1),
            ("FP8, window", [half] * many, half // 4, 1),
        ],
        has_fp8=True,
    )
    n = at.pick(4096, 96)
    yield from prefills(
        at,
        [
            ("FP8", [2 * n], [2 * n], None, 1),
            ("FP8, chunks", [4 * n, n], [n // 2, n // 8], None, 1),
        ],
        has_fp8=True,
    )


def decodes(at: Setting, cases: list[DecodeCase], *, has_fp8: bool = False) -> Iterator[Row]:
    """Yield a row for each case."""

    def decode(name: str, lengths: list[int], window: int | None, num_layers: int) -> Row:
        cache = Cached(at, lengths, num_layers=num_layers, has_fp8=has_fp8)
        q = at.randn(len(lengths), cache.num_heads, cache.head_dim)
        found, wanted = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)
        where = (cache.table, cache.seq_lens, cache.scale)
        paged_attention.paged_decode(q.float(), *cache.wide(), *where, wanted, window)
        caches = (cache.k_cache, cache.v_cache)

        def call() -> None:
            kernels_for(q).paged_decode(q, *caches, *where, found, window, *cache.scales)

        call()
        tokens = sum(min(n, window or n) for n in lengths)
        return Row(
            f"decode, {name}: {len(lengths)} x {max(lengths)}",
            error=error_of(found, wanted),
            limit=2e-2,
            is_replayed=True,
            seconds=at.time_replayed(call),
            num_bytes=tokens * cache.token_bytes + 4 * q.numel(),
            num_flops=4 * tokens * cache.num_heads * cache.head_dim,
        )

    return attempts(decode, cases)


def part_prefill(at: Setting) -> Iterator[Row]:
    """Prefill attention: whole prompts, later chunks, a sliding window."""
    n = at.pick(4096, 96)
    cases: list[PrefillCase] = [
        ("one prompt", [2 * n], [2 * n], None, 1),
        ("prompts", [n, n // 2, 17, n // 3], [n, n // 2, 17, n // 3], None, 1),
        ("chunks", [4 * n, n], [n // 2, n // 8], None, 1),
        ("window", [2 * n], [2 * n], n // 4, 1),
    ]
    yield from prefills(at, cases)


def part_pool(at: Setting) -> Iterator[Row]:
    """Attention on a layer of a deep pool: from block to block is far, and blocks lie anywhere."""
    num_layers, n, many = at.pick(32, 5), at.pick(2048, 90), at.pick(32, 4)
    name = f"{num_layers} layers"
    yield from decodes(at, [(name, [n - 7 * i for i in range(many)], None, num_layers)])
    yield from prefills(at, [(name, [n, n // 3], [n, n // 5], None, num_layers)])


def part_ragged(at: Setting) -> Iterator[Row]:
    """Attention over one batch of sequences from one token to thousands, padding among them."""
    most = at.pick(8192, 400)
    lengths = [1, most, 2, 0, 33, most // 3, 1, 15, 16, 17, most // 50, 1, most // 9, 3]
    queries = [1, most // 4, 2, 0, 33, most // 3, 1, 1, 16, 5, most // 50, 1, 7, 3]
    among = [at.pick(32768, 300), *[at.pick(512, 40)] * at.pick(63, 3)]
    yield from decodes(
        at,
        [
            ("ragged", lengths, None, 2),
            ("ragged, window", lengths, 20, 2),
            ("one long among short", among, None, 1),
        ],
    )
    yield from prefills(
        at,
        [("ragged", lengths, queries, None, 2), ("ragged, window", lengths, queries, 20, 2)],
    )


TILES = {
    128: ((128, 32, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3)),
    64: ((128, 64, 8, 3), (64, 128, 4, 3)),
}
"""By head dim, rows, columns, warps and stages to compare; the last of each are sm_90's."""


def part_tiles(at: Setting) -> Iterator[Row]:
    """Prefill attention in several tiles, none of which spills on sm_90."""
    if at.device.type != "cuda":
        yield Row("tiles", note="not applicable: of a GPU's kernel alone")
        return
    n = at.pick(8192, 96)
    cases: list[PrefillCase] = [("one prompt", [n], [n], None, 1), ("chunk", [n], [512], None, 1)]
    for head_dim, each in TILES.items():
        for rows, columns, num_warps, num_stages in each:
            tiles = {"rows": rows, "columns": columns}
            tiles |= {"num_warps": num_warps, "num_stages": num_stages}
            title = f"{rows} x {columns} w{num_warps} s{num_stages}"
            title += "" if head_dim == 128 else f" D{head_dim}"
            named: list[PrefillCase] = [(f"{case[0]}, {title}", *case[1:]) for case in cases]
            yield from prefills(at, named, tiles, head_dim)


def prefills(
    at: Setting,
    cases: list[PrefillCase],
    other_tiles: dict[str, int] | None = None,
    head_dim: int = 128,
    *,
    has_fp8: bool = False,
) -> Iterator[Row]:
    """Yield a row for each case, on a GPU with tiles that differ from the kernel's own if asked."""

    def prefill(
        name: str, lengths: list[int], queries: list[int], window: int | None, num_layers: int
    ) -> Row:
        shape = {"head_dim": head_dim, "num_layers": num_layers}
        cache = Cached(at, lengths, **shape, has_fp8=has_fp8)
        num_tokens = sum(queries)
        bounds = torch.tensor([0, *queries], device=at.device).cumsum(0).int()
        q = at.randn(num_tokens, cache.num_heads, cache.head_dim)
        found, wanted = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)
        where = (cache.table, bounds, cache.seq_lens, cache.scale)
        paged_attention.paged_prefill(q.float(), *cache.wide(), *where, wanted, window)
        args = (cache.k_cache, cache.v_cache, *where, found, window, *cache.scales)

        def call() -> None:
            if other_tiles is None:
                kernels_for(q).paged_prefill(q, *args)
                return
            from model.kernels.triton import prefill as triton_prefill
            from model.kernels.triton.tiles import arch_of

            group = cache.num_heads // cache.num_kv_heads
            arch = arch_of(q.device)
            own = triton_prefill.prefill_tiles(group, cache.head_dim, q.dtype, arch)
            triton_prefill.paged_prefill(q, *args, tiles=replace(own, **other_tiles))

        call()
        pairs = sum(
            min(p + 1, window or p + 1)
            for length, m in zip(lengths, queries, strict=True)
            for p in range(length - m, length)
        )
        return Row(
            f"prefill, {name}: {num_tokens} of {sum(lengths)}",
            error=error_of(found, wanted),
            limit=2e-2,
            is_replayed=True,
            seconds=at.time_replayed(call),
            num_bytes=sum(lengths) * cache.token_bytes + 4 * q.numel(),
            num_flops=4 * pairs * cache.num_heads * cache.head_dim,
        )

    return attempts(prefill, cases)


def part_rope(at: Setting) -> Iterator[Row]:
    """Rotary positions with the KV write, for decodes and for prompts."""
    heads, head_dim = (32, 8, 8), 128
    for name, num_tokens in (("decodes", at.pick(64, 4)), ("prompt", at.pick(4096, 64))):
        q, k, v = at.randn(num_tokens, sum(heads), head_dim).split(heads, dim=1)
        angles = at.randn(num_tokens, 1, head_dim // 2, dtype=torch.float32)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        shape = (num_tokens // BLOCK_SIZE + 2, 2, BLOCK_SIZE, heads[1], head_dim)
        found = torch.zeros(shape, device=at.device).bfloat16()
        wanted = found.float()
        slots = torch.arange(num_tokens, device=at.device) + BLOCK_SIZE
        new = (q, k, v, cos, sin)
        wide = (t.float() for t in new)
        caches = (found[:, 0], found[:, 1], slots)

        def call(args: Any = (*new, *caches)) -> torch.Tensor:
            rotated: torch.Tensor = kernels_for(args[0]).rope_and_write_kv(*args)
            return rotated

        pools = (wanted[:, 0], wanted[:, 1], slots)
        error = error_of(call(), paged_attention.rope_and_write_kv(*wide, *pools))
        row = Row(
            f"rope and KV write, {name}: {num_tokens}",
            error=max(error, error_of(found, wanted)),
            limit=2e-2,
        )
        row.seconds, row.is_replayed = at.time_replayed(call), True
        row.num_bytes = 4 * (k.numel() + v.numel() + q.numel())
        yield row


def part_elementwise(at: Setting) -> Iterator[Row]:
    """Norms and the gate of the MLP."""
    n, hidden, inner = at.pick(4096, 64), at.pick(4096, 256), at.pick(14336, 512)
    norm = RMSNorm(hidden, 1e-5, Placement(torch.bfloat16, at.device))
    norm.weight = torch.nn.Parameter(at.randn(hidden), requires_grad=False)
    wide = RMSNorm(hidden, 1e-5, Placement(torch.float32, torch.device("cpu")))
    wide.weight = torch.nn.Parameter(norm.weight.float().cpu(), requires_grad=False)
    x, residual = at.randn(n, hidden), at.randn(n, hidden)
    wanted = wide(x.float().cpu()).to(at.device)
    yield Row(
        f"norm: {n} x {hidden}",
        error=error_of(norm(x), wanted),
        limit=2e-2,
        is_replayed=True,
        seconds=at.time_replayed(lambda: norm(x)),
        num_bytes=4 * x.numel(),
    )
    wanted, wanted_sum = (
        t.to(at.device) for t in wide.add(x.float().cpu(), residual.float().cpu())
    )
    wanted, wanted_sum = wanted.to(at.device), wanted_sum.to(at.device)
    normed, summed = norm.add(x, residual.clone())
    yield Row(
        f"norm with residual: {n} x {hidden}",
        error=max(error_of(normed, wanted), error_of(summed, wanted_sum)),
        limit=2e-2,
        is_replayed=True,
        seconds=at.time_replayed(lambda: norm.add(x, residual)),
        num_bytes=8 * x.numel(),
    )
    yield sum_of_one_rank(at, norm, wide, hidden)
    gate_up = at.randn(n, 2 * inner)
    yield Row(
        f"silu and mul: {n} x {inner}",
        error=error_of(silu_and_mul(gate_up), silu_and_mul(gate_up.float().cpu()).to(at.device)),
        limit=2e-2,
        is_replayed=True,
        seconds=at.time_replayed(lambda: silu_and_mul(gate_up)),
        num_bytes=3 * gate_up.numel(),
    )


def sum_of_one_rank(at: Setting, norm: RMSNorm, wide: RMSNorm, hidden: int) -> Row:
    """Sum over ranks, add and normalise in one kernel, of a rank that is its only peer: it sets its
    own flags and waits for them, in every replay anew. No GPU alone can show more of it."""
    if at.device.type != "cuda":
        return Row("sum, residual and norm", note="not applicable: of a GPU's kernel alone")
    from model.kernels.triton.all_reduce import MEMORY_BYTES, PeerMemory

    memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=at.device)
    peers = PeerMemory(memory, [memory.data_ptr()], 0)
    x, residual = at.randn(at.pick(32, 4), hidden), at.randn(at.pick(32, 4), hidden)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        found = peers.all_reduce_add_rms_norm(x, residual, norm.weight, norm.eps)
        assert found is not None
        return found

    wanted = [t.to(at.device) for t in wide.add(x.float().cpu(), residual.float().cpu())]
    return Row(
        f"sum, residual and norm of one rank: {len(x)} x {hidden}",
        error=max(error_of(*pair) for _ in range(3) for pair in zip(call(), wanted, strict=True)),
        limit=2e-2,
        is_replayed=True,
        seconds=at.time_replayed(call),
        num_bytes=12 * x.numel(),
    )


def part_experts(at: Setting) -> Iterator[Row]:
    """Routed experts: one token, a batch of decodes, a prompt, and a rank with half of them."""
    num_experts, top_k = at.pick(128, 6), at.pick(8, 2)
    hidden, size = at.pick(2048, 64), at.pick(768, 48)
    gate_up = at.randn(num_experts, 2 * size, hidden) / hidden**0.5
    down = at.randn(num_experts, hidden, size) / size**0.5
    half = num_experts // 2
    cases = [
        ("one token", 1, slice(0, num_experts)),
        ("decodes", at.pick(64, 4), slice(0, num_experts)),
        ("prompt", at.pick(4096, 32), slice(0, num_experts)),
        ("half of the experts", at.pick(64, 4), slice(half, num_experts)),
    ]

    def experts(name: str, num_tokens: int, own: slice) -> Row:
        x = at.randn(num_tokens, hidden)
        logits = at.randn(num_tokens, num_experts, dtype=torch.float32)
        chosen, weights = kernels_for(logits).route(logits, top_k, True)
        routed = (x.float().cpu(), chosen.cpu(), weights.cpu())
        matrices = (gate_up[own].float().cpu(), down[own].float().cpu())
        wanted = sparse_mlp.expert_mlp(*routed, *matrices, own.start).to(at.device)
        args = (x, chosen, weights, gate_up[own], down[own], own.start)

        def call() -> torch.Tensor:
            out: torch.Tensor = kernels_for(x).expert_mlp(*args)
            return out

        error = error_of(call(), wanted)
        is_own = (chosen >= own.start) & (chosen < own.stop)
        num_read, num_pairs = int(chosen[is_own].unique().numel()), int(is_own.sum())
        return Row(
            f"experts, {name}: {num_tokens} to {top_k} of {num_experts}",
            error=error,
            limit=2e-2,
            is_replayed=True,
            seconds=at.time_replayed(call),
            num_bytes=num_read * 6 * size * hidden + 4 * x.numel(),
            num_flops=6 * num_pairs * size * hidden,
        )

    yield from attempts(experts, cases)


def part_short_experts(at: Setting) -> Iterator[Row]:
    """Routed experts whose matrices are FP8 or FP4 numbers: one token, decodes, a prompt. What
    another order of summation changes may tip inputs over to the next number."""
    num_experts, top_k = at.pick(128, 6), at.pick(8, 2)
    hidden, size = at.pick(2048, 64), at.pick(768, 48)
    shapes = ((2 * size, hidden), (hidden, size))
    plain = [at.randn(num_experts, *shape) / shape[1] ** 0.5 for shape in shapes]
    of_one = torch.full((1,), 100.0, device=at.device)
    cases = [
        (f"{held}, {name}", num_tokens, held)
        for held in ("fp8", "fp8 by group", "nvfp4")
        for name, num_tokens in (
            ("one token", 1),
            ("decodes", at.pick(64, 4)),
            ("prompt", at.pick(4096, 32)),
        )
    ]

    def numbers_of(matrices: torch.Tensor, held: str) -> ScaledWeight | BlockScaledWeight:
        if held == "fp8":
            return scaled_weight(matrices)
        if held == "fp8 by group":
            return grouped_weight(matrices)
        scales = of_one.expand(num_experts, 1, matrices.shape[1])
        numbers = quantize_blocks(matrices, of_one)
        return BlockScaledWeight(*numbers, scales.contiguous(), of_one.expand(num_experts, 1))

    def experts(name: str, num_tokens: int, held: str) -> Row:
        x = at.randn(num_tokens, hidden)
        logits = at.randn(num_tokens, num_experts, dtype=torch.float32)
        routed = kernels_for(logits).route(logits, top_k, True)
        both = [numbers_of(matrices, held) for matrices in plain]
        which = [torch.full((num_experts,), place) for place in range(2)]

        def products(places: torch.Tensor) -> sparse_mlp.Products:
            matrices = both[int(places[0])]

            def product(rows: torch.Tensor, expert: int) -> torch.Tensor:
                weight = type(matrices)(*(each[expert].cpu() for each in matrices))
                rounded = quantize_inputs(rows, weight.form, weight.input_scale)
                return scaled_linear(*rounded, weight, None, rows.dtype)

            return product

        args = (x.float().cpu(), *(each.cpu() for each in routed))
        wanted = sparse_mlp.expert_mlp(*args, *which, 0, products).to(at.device)

        def call() -> torch.Tensor:
            if at.device.type == "cpu":
                return sparse_mlp.expert_mlp(x, *routed, *which, 0, products)
            out: torch.Tensor = kernels_for(x).expert_mlp(x, *routed, *both, 0)
            return out

        num_bytes = sum(tensor.nbytes for weight in both for tensor in weight) // num_experts
        return Row(
            f"experts of {name}: {num_tokens} to {top_k} of {num_experts}",
            error=error_of(call(), wanted),
            limit=2e-1 if held == "nvfp4" else 1e-1,
            is_replayed=True,
            seconds=at.time_replayed(call),
            num_bytes=int(routed[0].unique().numel()) * num_bytes + 4 * x.numel(),
            num_flops=6 * routed[0].numel() * size * hidden,
        )

    yield from attempts(experts, cases)


def part_integers(at: Setting) -> Iterator[Row]:
    """Linear layers whose weights are integers: one token, a batch of decodes, a prompt."""
    inputs, outputs = at.pick(4096, 96), at.pick(14336, 80)
    weight = at.randn(outputs, inputs) / inputs**0.5
    cases = [
        (f"{name}, {held.bits} bits", num_tokens, held)
        for held in (Integers(4, at.pick(128, 32)), Integers(8, inputs))
        for name, num_tokens in (
            ("one token", 1),
            ("decodes", at.pick(64, 4)),
            ("prompt", at.pick(4096, 70)),
        )
    ]

    def product(name: str, num_tokens: int, held: Integers) -> Row:
        x, packed = at.randn(num_tokens, inputs), PackedWeight(weight, held)
        on_cpu = PackedWeight(weight.float().cpu(), held)
        wanted = packed_linear(x.float().cpu(), on_cpu.handle, None, outputs).to(at.device)

        def call() -> torch.Tensor:
            found: torch.Tensor = packed_linear(x, packed.handle, None, outputs)
            return found

        return Row(
            f"integers, {name}: {num_tokens} x {inputs} x {outputs}",
            error=error_of(call(), wanted),
            limit=2e-2,
            is_replayed=True,
            seconds=at.time_replayed(call),
            num_bytes=weight.numel() * held.bits // 8 + 2 * num_tokens * (inputs + outputs),
            num_flops=2 * num_tokens * weight.numel(),
        )

    yield from attempts(product, cases)


def grouped_weight(matrices: torch.Tensor) -> ScaledWeight:
    numbers, scales = quantize_groups(matrices)
    return ScaledWeight(numbers, scales.mT.contiguous())


def part_scaled_linear(at: Setting) -> Iterator[Row]:
    """Linear layers of FP4 and FP8 numbers, whose inputs are rounded before: one token, decodes, a
    prompt."""
    inputs, outputs = at.pick(4096, 144), at.pick(14336, 80)
    weight, scale = at.randn(outputs, inputs), torch.full((1,), 100.0, device=at.device)
    of_outputs = scale.expand(1, outputs).contiguous()
    weights: dict[str, BlockScaledWeight | ScaledWeight] = {
        "fp4": BlockScaledWeight(*quantize_blocks(weight, scale), of_outputs, scale),
        "fp8": scaled_weight(weight),
        "fp8 by group": grouped_weight(weight),
    }
    cases = [
        (f"{kind}, {name}", num_tokens, held)
        for kind, held in weights.items()
        for name, num_tokens in (
            ("one token", 1),
            ("decodes", at.pick(64, 4)),
            ("prompt", at.pick(4096, 70)),
        )
    ]

    def product(name: str, num_tokens: int, held: BlockScaledWeight | ScaledWeight) -> Row:
        x, packed = at.randn(num_tokens, inputs), PackedWeight(held)
        on_cpu = type(held)(*(tensor.cpu() for tensor in held))
        rounded = quantize_inputs(x.cpu(), on_cpu.form, on_cpu.input_scale)
        wanted = scaled_linear(*rounded, on_cpu, None, torch.float32).to(at.device)

        def call() -> torch.Tensor:
            numbers = quantize_inputs(x, held.form, held.input_scale)
            found: torch.Tensor = scaled_op(*numbers, packed.handle, None, outputs, x.dtype)
            return found

        return Row(
            f"{name}: {num_tokens} x {inputs} x {outputs}",
            error=error_of(call(), wanted),
            limit=2e-2,
            is_replayed=True,
            seconds=at.time_replayed(call),
            num_bytes=held.nbytes + 2 * num_tokens * (inputs + outputs),
            num_flops=2 * num_tokens * weight.numel(),
        )

    yield from attempts(product, cases)


def part_latents(at: Setting) -> Iterator[Row]:
    """Attention to latents of DeepSeek-V3's sizes, from 16 of its heads: decodes, prompts of which
    nothing is in the cache, chunks behind others, and drafts."""
    heads, rank, nope, rope, values = at.pick(16, 3), at.pick(512, 64), 128, 64, 128
    long, many = at.pick(4096, 200), at.pick(64, 4)
    matrices = at.randn(heads, nope + values, rank) / rank**0.5
    scale = (nope + rope) ** -0.5
    cases = [
        ("decode, one long", [at.pick(32768, 600)], [1]),
        ("decode", [long - 7 * i for i in range(many)], [1] * many),
        ("prompt", [long], [long]),
        ("prompts", [long, long // 2, 17, long // 3], [long, long // 2, 17, long // 3]),
        ("chunks", [4 * long, long], [long // 2, long // 4]),
        ("drafts", [long - 7 * i for i in range(many)], [4] * many),
    ]

    def attend(name: str, lengths: list[int], queries: list[int]) -> Row:
        spec = KVCacheSpec(1, 1, rank + rope, BLOCK_SIZE, torch.bfloat16, has_values=False)
        columns = -(-max(lengths) // BLOCK_SIZE)
        pool = at.randn(columns * len(lengths) + 1, *spec.block_shape)
        cache = pool[:, 0, 0]
        order = torch.randperm(columns * len(lengths), device=at.device) + 1
        table = order.view(len(lengths), columns).int()
        seq_lens, counts = (
            torch.tensor(each, dtype=torch.int32, device=at.device) for each in (lengths, queries)
        )
        q = at.randn(sum(queries), heads, nope + rope)
        found, wanted = q.new_empty(*q.shape[:2], values), q.new_empty(*q.shape[:2], values).float()
        is_decode = max(queries) == 1
        bounds = torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0))
        where = (table, seq_lens) if is_decode else (table, bounds, seq_lens)
        kind = "latent_decode" if is_decode else "latent_prefill"
        parts = q.split([nope, rope], -1)
        wide = (*(part.float() for part in parts), cache.float(), matrices.float())
        getattr(latent_attention, kind)(*wide, *where, scale, wanted)

        def call() -> None:
            getattr(kernels_for(q), kind)(*parts, cache, matrices, *where, scale, found)

        call()
        seen = sum(n * m - m * (m - 1) // 2 for n, m in zip(lengths, queries, strict=True))
        each = 2 * rank + rope if is_decode else nope + rope + values
        made = 2 * sum(queries) * heads * (nope + values) * rank
        return Row(
            f"latents, {name}: {sum(queries)} x {max(lengths)}",
            error=error_of(found, wanted),
            limit=2e-2,
            is_replayed=True,
            seconds=at.time_replayed(call),
            num_bytes=2 * (sum(lengths) * (rank + rope) + matrices.numel() + q.numel()),
            num_flops=2 * seen * heads * each + made,
        )

    yield from attempts(attend, cases)


def part_adapters(at: Setting) -> Iterator[Row]:
    """What LoRA adapters add to queries, keys and values: decodes with as many adapters as there
    are, with one and with none, and a prompt."""
    num_adapters, rank, inputs = at.pick(8, 3), at.pick(16, 4), at.pick(4096, 80)
    sizes = at.pick([4096, 1024, 1024], [48, 16, 16])
    a = at.randn(num_adapters, len(sizes) * rank, inputs) / inputs**0.5
    b = at.randn(num_adapters, rank, sum(sizes)) / rank**0.5
    many, prompt = at.pick(64, 6), at.pick(4096, 70)
    cases = [
        ("all", [1 + i % num_adapters for i in range(many)]),
        ("one", [1] * many),
        ("none", [0] * many),
        ("prompt", [num_adapters] * prompt),
    ]

    def added(name: str, of_token: list[int]) -> Row:
        x, out = at.randn(len(of_token), inputs), at.randn(len(of_token), sum(sizes))
        numbers = torch.tensor(of_token, dtype=torch.int32, device=at.device)
        wanted = out.float().cpu()
        in_float32 = (each.float().cpu() for each in (x, a, b))
        adapters.add_adapters(wanted, *in_float32, sizes, numbers.cpu())
        found = out.clone()

        def call() -> torch.Tensor:
            kernels_for(x).add_adapters(found, x, a, b, sizes, numbers)
            return found

        num_read, num_rows = len({*of_token} - {0}), sum(map(bool, of_token))
        size = (a.numel() + b.numel()) // num_adapters
        # An output is read and written; what is added again and again while it is timed is not.
        error = error_of(call(), wanted.to(at.device))
        return Row(
            f"adapters, {name}: {len(of_token)} tokens of {num_read}",
            error=error,
            limit=2e-2,
            is_replayed=True,
            seconds=at.time_replayed(call),
            num_bytes=2 * num_read * size + num_rows * (2 * inputs + 4 * sum(sizes)),
            num_flops=2 * num_rows * size,
        )

    yield from attempts(added, cases)


def part_filters(at: Setting) -> Iterator[Row]:
    """Top-k and top-p: every token that stays, and no other, as on a CPU."""
    vocab_size = at.pick(151_936, 2000)
    cases = [
        (f"{kind}: {num_rows} x {vocab_size}", num_rows, top_k, top_p)
        for num_rows in (1, at.pick(8, 2), at.pick(64, 3))
        for kind, top_k, top_p in (("top-p", 0, 0.9), ("top-k", 50, 1.0), ("both", 1000, 0.8))
    ]

    def filters(name: str, num_rows: int, top_k: int, top_p: float) -> Row:
        logits = at.randn(num_rows, vocab_size, dtype=torch.float32) * 3
        logits[:, ::7] = logits[:, ::7].round()  # equals, some of them at the edge
        logits[::2] /= 5
        # A row that asks for nothing beside those that do.
        counts = torch.full((num_rows,), top_k, device=at.device)
        masses = torch.full((num_rows,), top_p, device=at.device)
        counts[1::3], masses[1::3] = 0, 1.0
        args = (logits, counts, masses)

        def call() -> torch.Tensor:
            return (filter_on_gpu if logits.is_cuda else filter_top_k_top_p)(*args)

        wanted = filter_top_k_top_p(*(arg.cpu() for arg in args))
        return Row(
            name,
            error=float((call().cpu() != wanted).sum()),
            limit=0.0,
            is_replayed=True,
            seconds=at.time_replayed(call),
            num_bytes=8 * logits.numel(),
        )

    yield from attempts(filters, cases)


def part_transfer(at: Setting) -> Iterator[Row]:
    """KV blocks to the host and back, beside a step that is still running."""
    num_blocks, block_bytes = at.pick(64, 8), at.pick(2 << 20, 1 << 14)
    pool = torch.zeros((2 * num_blocks, block_bytes), dtype=torch.uint8, device=at.device)
    pool[:num_blocks] = torch.randint(0, 256, (num_blocks, block_bytes), device=at.device)
    store = BlockStore(pool)
    read, written = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))[::-1]
    n = at.pick(8192, 64)
    busy = at.randn(n, n)

    def step() -> None:
        for _ in range(20):
            busy @ busy

    if at.device.type == "cuda":
        torch.cuda.synchronize()
    blocks = store.gather(read)
    store.scatter(written, blocks)
    error = error_of(pool[written], pool[read])
    num_bytes = num_blocks * block_bytes
    on_host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=at.device.type == "cuda")
    half = pool[:num_blocks].view(-1)
    link = Row("copy to the host", num_bytes=num_bytes, copy="copy to the host")
    link.seconds = at.time(lambda: on_host.copy_(half, non_blocking=True))
    yield link
    floor = {"num_bytes": num_bytes, "copy": link.name}
    alone = at.time_whole(lambda: store.gather(read))
    yield Row("blocks to the host", seconds=alone, **floor)
    seconds = at.time_whole(lambda: store.scatter(written, blocks))
    yield Row("blocks from the host", error=error, limit=0.0, seconds=seconds, **floor)
    if at.device.type == "cuda":
        waits = []
        for _ in range(10):
            step()
            began = time.perf_counter()
            store.gather(read)
            waits.append(time.perf_counter() - began)
            torch.cuda.synchronize()
        beside = statistics.median(waits)
        # Copies that waited for the step would take many times as long.
        name = "blocks to the host beside a step"
        yield Row(name, error=beside / alone, limit=3.0, seconds=beside, **floor)
