"""Which kernel a tensor's device chooses, and what tracing sees of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from compile.context import ForwardContext, KVCacheTensor, forward_context
from compile.custom_op import function_of
from compile.passes.quantizers import (
    quantize_fp8_per_token,
    quantize_fp8_per_token_group,
    quantize_nvfp4,
)
from model.config import Latent
from model.kernels import cpu, dispatch, paged_attention, triton
from model.kernels.cpu.packed_linear import PackedWeight, scaled_linear
from model.kernels.dispatch import silu_and_mul
from model.kernels.scaled_linear import BlockScaledWeight, ScaledWeight
from model.kernels.triton import decode as triton_decode
from model.kernels.triton import elementwise as triton_elementwise
from model.kernels.triton import experts as triton_experts
from model.kernels.triton import fp4 as triton_fp4
from model.kernels.triton import fp8 as triton_fp8
from model.kernels.triton import latent as triton_latent
from model.kernels.triton import latent_chunks as triton_latent_chunks
from model.kernels.triton import prefill as triton_prefill
from model.kernels.triton import rope as triton_rope
from model.kernels.triton import rounding as triton_rounding
from model.kernels.triton import routing as triton_routing
from model.layers import attention, latent_attention, moe
from model.layers.attention import Attention, AttentionMetadata
from model.layers.decoder import RMSNorm
from model.layers.latent_attention import LatentAttention
from model.parallel import Placement

CPU = torch.device("cpu")
H, HKV, D, BLOCK = 8, 2, 16, 4
KERNELS = {
    "split": triton_decode._split_kernel,
    "join": triton_decode._join_kernel,
    "norm": triton_elementwise._norm_kernel,
    "latent": triton_latent._latent_kernel,
    "before": triton_latent_chunks._before_kernel,
    "own": triton_latent_chunks._own_kernel,
    "prefill": triton_prefill._prefill_kernel,
    "rope": triton_rope._rope_kernel,
    "silu": triton_elementwise._silu_kernel,
    "up": triton_experts._up_kernel,
    "down": triton_experts._down_kernel,
    "fp4": triton_fp4._linear_kernel,
    "fp8": triton_fp8._linear_kernel,
    "rows": triton_rounding._rows_kernel,
    "groups": triton_rounding._groups_kernel,
    "blocks": triton_rounding._blocks_kernel,
    "sum": triton_experts._sum_kernel,
    "route": triton_routing._route_kernel,
    "sort": triton_routing._sort_kernel,
    "write": triton_latent._write_kernel,
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Record which kernels a GPU with 100 multiprocessors would launch, on which grids."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, kernel in KERNELS.items():

        def run(*_: Any, grid: tuple[int, ...], name: str = name, **__: Any) -> None:
            found.append((name, grid))

        monkeypatch.setattr(kernel, "run", run)
    monkeypatch.setattr(triton_decode, "num_sms", lambda _: 100)
    use_triton(monkeypatch)
    return found


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose a GPU's kernels for every tensor."""
    for module in (attention, latent_attention, moe):
        monkeypatch.setattr(module, "kernels_for", lambda _: triton)
    monkeypatch.setattr(dispatch, "uses_ops", lambda _: True)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return, in a fake mode, a tensor without values: reading one is an error.

    A GPU's own fake tensors cannot be sliced where torch is built without one.
    """
    return torch.empty(shape, dtype=dtype)


def metadata_of(num_decodes: int, num_seqs: int, num_tokens: int) -> AttentionMetadata:
    int32 = {"dtype": torch.int32}
    return AttentionMetadata(
        num_decodes=num_decodes,
        cu_seqlens_q=empty(num_seqs + 1, **int32),
        seq_lens=empty(num_seqs, **int32),
        block_table=empty(num_seqs, 1024, **int32),
        slot_mapping=empty(num_tokens, dtype=torch.int64),
    )


def attend(num_decodes: int, num_seqs: int, num_tokens: int) -> torch.Tensor:
    """Run the attention op's body on tensors without values."""
    metadata = metadata_of(num_decodes, num_seqs, num_tokens)
    cache = KVCacheTensor(empty(9, BLOCK, HKV, D), empty(9, BLOCK, HKV, D))
    layer = Attention(HKV, D, layer_name="layer")
    q, k, v = empty(num_tokens, H, D), empty(num_tokens, HKV, D), empty(num_tokens, HKV, D)
    cos, sin = empty(num_tokens, 1, D // 2), empty(num_tokens, 1, D // 2)
    output = torch.empty_like(q)
    with forward_context(ForwardContext({"layer": layer}, metadata, {"layer": cache})):
        attention._unified_attention_with_output(q, k, v, cos, sin, output, "layer")
    return output


def test_the_device_chooses_the_kernels() -> None:
    assert dispatch.kernels_for(torch.empty(1)) is cpu
    with FakeTensorMode():
        assert dispatch.kernels_for(torch.empty(1, device="cuda")) is triton


def test_a_value_that_is_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The torch functions do read values; those in C++ need memory, which a fake has not.
    for name in ("rope_and_write_kv", "paged_decode", "paged_prefill"):
        monkeypatch.setattr(cpu, name, getattr(paged_attention, name))
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        attend(3, 5, 40)


@pytest.mark.feature("Y02")
def test_attention_on_a_gpu_launches_kernels_and_reads_no_value(launches: list[Any]) -> None:
    with FakeTensorMode():
        attend(3, 5, 40)
    block_q = 128 // (H // HKV)
    splits = triton_decode.num_splits(3, HKV, 1024 * BLOCK, 100)
    assert splits == 4096 // 256
    assert launches == [
        ("rope", (40, HKV)),
        ("split", (3, HKV, splits)),
        ("join", (3, H)),
        ("prefill", (40 // block_q + 2 + 1, HKV)),
    ]


def attend_to_latents(num_decodes: int, num_seqs: int, num_tokens: int) -> None:
    latent = Latent(
        None, kv_rank=64, nope_dim=10, rope_dim=6, v_dim=14, is_interleaved=True, scale=1
    )
    place = Placement(torch.bfloat16, torch.device("cpu"))
    layer = LatentAttention(34, latent, layer_name="layer", place=place)
    layer.weight = torch.nn.Parameter(empty(34 * 24, 64), requires_grad=False)
    cache = empty(9, BLOCK, 1, 70)
    caches = {"layer": KVCacheTensor(cache, cache)}
    metadata = metadata_of(num_decodes, num_seqs, num_tokens)
    with forward_context(ForwardContext({"layer": layer}, metadata, caches)):
        q_nope, q_pe = empty(num_tokens, 34, 16).split([10, 6], dim=-1)
        rows = (empty(num_tokens, 64), empty(num_tokens, 6), empty(num_tokens, 34, 14))
        latent_attention._mla_attention(q_nope, q_pe, *rows, "layer")


@pytest.mark.feature("S04", "Y02")
def test_latent_attention_on_a_gpu_launches_kernels_and_reads_no_value(launches: list[Any]) -> None:
    with FakeTensorMode():
        attend_to_latents(3, 5, 40)
    splits = triton_decode.num_splits(3, 17, 1024 * BLOCK, 100)
    assert launches == [
        ("write", (40,)),
        # Heads in pairs: 17 are too many for a program.
        ("latent", (3, 17, splits)),
        ("join", (3, 34)),
        # What stands before the chunks of 37 tokens of two sequences, then their own tokens.
        ("before", (37 // 16 + 2 + 1, 17)),
        ("own", (37 // 128 + 2 + 1, 34)),
    ]


@pytest.mark.feature("S04", "T05", "Y02")
def test_latents_of_chunks_of_few_tokens_are_attended_to_as_they_are(launches: list[Any]) -> None:
    with FakeTensorMode():
        attend_to_latents(3, 8, 23)
    splits = triton_decode.num_splits(20, 17, 1024 * BLOCK, 100)
    assert launches[-2:] == [("latent", (20, 17, splits)), ("join", (20, 34))]


def test_the_grid_of_a_full_batch_has_room_for_one_long_sequence(launches: list[Any]) -> None:
    with FakeTensorMode():
        attend(250, 250, 250)
    assert launches == [
        ("rope", (250, HKV)),
        ("split", (250, HKV, 1024 * BLOCK // 256)),
        ("join", (250, H)),
    ]


def body(name: str) -> Any:
    """Return what an op runs on a GPU."""
    return function_of(getattr(torch.ops.lockstep, name).default, "cuda")


@pytest.mark.feature("Y02")
def test_other_layers_on_a_gpu_launch_kernels(launches: list[Any]) -> None:
    with FakeTensorMode():
        weight = empty(32)
        # The ops' own bodies: under a fake mode the ops themselves only compute shapes.
        body("rms_norm")(empty(7, 32), weight, 1e-5)
        body("rms_norm")(empty(7, 3, 32), weight, 1e-5)
        body("fused_add_rms_norm")(empty(7, 32), empty(7, 32), weight, 1e-5)
        body("silu_and_mul")(empty(7, 4096))
    assert launches == [("norm", (7,)), ("norm", (21,)), ("norm", (7,)), ("silu", (7, 2))]


@pytest.mark.feature("Y02")
@pytest.mark.parametrize(
    ("num_tokens", "num_tiles"),
    [
        (1, 8),  # no more tiles than pairs: experts without tokens have none
        (64, 64 * 8 // 16 + 128),
        (4096, 4096 * 8 // 64 + 128),
    ],
)
def test_experts_on_a_gpu_launch_kernels_and_read_no_value(
    launches: list[Any], num_tokens: int, num_tiles: int
) -> None:
    with FakeTensorMode(), ComputedBesides() as besides:
        x, logits = empty(num_tokens, 64), empty(num_tokens, 128)
        matrices = empty(128, 2 * 48, 64), empty(128, 64, 48)
        out = moe._routed_experts(x, logits, *matrices, 8, True, "", "", None, 1, 1, 1.0)
    assert besides.ops == [], "each is a launch of its own"
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    tiles = triton_experts.product_tiles(num_tokens * 8, 128, x.dtype)
    columns = -(-48 // tiles.gated_columns), -(-64 // tiles.columns)
    assert launches == [
        ("route", (-(-num_tokens // 4),)),
        ("sort", (128,)),
        ("up", (num_tiles, columns[0])),
        ("down", (num_tiles, columns[1])),
        ("sum", (num_tokens, 1)),
    ]


class ComputedBesides(TorchDispatchMode):
    """Collects the operations that do more than make a tensor or a view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.ops.append(func.name())
        return func(*args, **(kwargs or {}))


def traced_ops(function: Any, *args: torch.Tensor) -> list[str]:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.compile(function, backend=keep, fullgraph=True)(*args)
    torch._dynamo.reset()
    return [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]


def test_a_traced_graph_has_the_ops_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = RMSNorm(32, 1e-5, Placement(torch.float32, torch.device("cpu")))
    norm.allocate("weight").fill_(1.0)
    x = torch.randn(7, 32)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed, residual = norm.add(norm(x), residual)
        return silu_and_mul(torch.cat((normed, residual), -1))

    ops = {"lockstep.rms_norm", "lockstep.fused_add_rms_norm", "lockstep.silu_and_mul"}
    assert ops.isdisjoint(traced_ops(layer, x, x.clone()))
    use_triton(monkeypatch)
    assert ops <= set(traced_ops(layer, x, x.clone()))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("rms_norm", (torch.empty(7, 32), torch.empty(32), 1e-5)),
        ("fused_add_rms_norm", (torch.empty(7, 32), torch.empty(7, 32), torch.empty(32), 1e-5)),
        ("silu_and_mul", (torch.empty(7, 3, 64),)),
    ],
)
def test_fake_results_are_like_real_ones(op: str, args: Any, launches: list[Any]) -> None:
    real = body(op)(*args)
    assert launches
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if torch.is_tensor(arg) else arg for arg in args]
        fake = getattr(dispatch, op)(*fakes)
    pairs = zip(
        *(found if op.startswith("fused") else [found] for found in (real, fake)), strict=True
    )
    for one, other in pairs:
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


# --- short numbers ----------------------------------------------------------------------------


def on_gpu(op: Any) -> Any:
    """Return what an op calls on a GPU."""
    return function_of(op.default, "cuda")


@pytest.mark.feature("S08")
def test_inputs_of_layers_of_short_numbers_are_rounded_by_one_launch(launches: list[Any]) -> None:
    x, wide, scale = torch.randn(5, 64), torch.randn(5, 272), torch.ones(1)
    of_rows = on_gpu(quantize_fp8_per_token)(x)
    of_groups = on_gpu(quantize_fp8_per_token_group)(wide)
    of_fp4 = on_gpu(quantize_nvfp4)(x, scale)
    for rounded, weight in (
        (of_groups, ScaledWeight.empty((48, 272), CPU, is_grouped=True)),
        (of_rows, ScaledWeight.empty((48, 64), CPU, is_grouped=False)),
        (of_fp4, BlockScaledWeight.empty((48, 64), CPU)),
    ):
        owner = PackedWeight(weight)
        out = on_gpu(scaled_linear)(*rounded, owner.handle, None, 48, torch.bfloat16)
        assert (out.shape, out.dtype) == ((5, 48), torch.bfloat16)
    rounding = [("rows", (5, 1)), ("groups", (5, 1)), ("blocks", (5, 1))]
    assert launches == [*rounding, ("fp8", (1, 2)), ("fp8", (1, 2)), ("fp4", (1, 2))]


@pytest.mark.feature("S08")
@pytest.mark.parametrize("kind", ["rows", "groups", "blocks"])
def test_experts_of_short_numbers_are_rounded_before_each_product(
    kind: str, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "is_on_gpu", lambda _: True)
    owners = []
    for shape in ((4, 320, 144), (4, 144, 160)):
        if kind == "blocks":
            owners.append(PackedWeight(BlockScaledWeight.empty(shape, CPU)))
        else:
            weight = ScaledWeight.empty(shape, CPU, is_grouped=kind == "groups")
            owners.append(PackedWeight(weight))
    x, logits = torch.randn(5, 144), torch.randn(5, 4)
    handles = (owner.handle for owner in owners)
    moe._routed_experts(x, logits, *handles, 2, True, "", "", None, 1, 1, 1.0)
    names = [name for name, _ in launches]
    assert names == ["route", "sort", kind, "up", kind, "down", "sum"]
