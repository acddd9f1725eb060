"""What tracing is told of every op equals what the op does: shape, dtype, strides, writes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.group.membership import make_group
from compile.context import ForwardContext, KVCacheTensor, forward_context
from compile.passes.quantizers import (
    FP8,
    quantize_fp8_per_token,
    quantize_fp8_per_token_group,
    quantize_nvfp4,
)
from model.config import Latent
from model.kernels.cpu.packed_linear import PackedWeight, can_pack
from model.kernels.scaled_linear import BlockScaledWeight, ScaledWeight
from model.layers.attention import Attention, AttentionMetadata
from model.layers.latent_attention import LatentAttention
from model.parallel import Placement, Shard
from model.quantization import Float8

T, E, H, HKV, D = 5, 48, 4, 2, 8
ROUTE = (torch.linspace(-1, 1, 6), 3, 2, 1.5)
LATENT = Latent(None, kv_rank=10, nope_dim=7, rope_dim=6, v_dim=9, is_interleaved=True, scale=0.4)
DTYPES = (torch.float32, torch.bfloat16)
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)

LIST_OPS = """
import torch
import model.weights
print(*sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("lockstep::")))
"""


@pytest.fixture(scope="module")
def shard() -> Shard:
    """The only rank of a real group."""
    return Shard(0, 1, make_group(dist.HashStore(), 0, 1, device="cpu", host="127.0.0.1"))


@pytest.fixture
def attention_context() -> Iterator[None]:
    """The context of two decodes and a prompt of three tokens."""
    layer = Attention(HKV, D, layer_name="layer")
    metadata = AttentionMetadata(
        num_decodes=2,
        cu_seqlens_q=torch.tensor([0, 1, 2, 5]).int(),
        seq_lens=torch.tensor([3, 1, 3]).int(),
        block_table=torch.tensor([[1], [2], [3]]).int(),
        slot_mapping=torch.tensor([6, 8, 12, 13, 14]),
    )
    pool = torch.randn(2, 4, 4, HKV, D)
    place = Placement(torch.float32, torch.device("cpu"))
    latent = LatentAttention(H, LATENT, layer_name="latent", place=place)
    torch.nn.init.normal_(latent.allocate("weight"))
    latents = torch.randn(4, 4, 1, latent.head_dim)
    caches = {"layer": KVCacheTensor(pool[0], pool[1]), "latent": KVCacheTensor(latents, latents)}
    layers, adapters = {"layer": layer, "latent": latent}, torch.tensor([0, 2, 1, 2, 0]).int()
    with forward_context(ForwardContext(layers, metadata, caches, adapters=adapters)):
        yield


def cases(shard: Shard, dtype: torch.dtype) -> dict[str, list[tuple[Any, ...]]]:
    """Return arguments for every op, by its name."""
    x, weight = torch.randn(T, E, dtype=dtype), torch.randn(E, dtype=dtype)
    wide, long = torch.randn(T, 3 * E, dtype=dtype)[:, :E], torch.randn(T, 136, dtype=dtype)
    matrices = (torch.randn(3, 32, E, dtype=dtype), torch.randn(3, E, 16, dtype=dtype))
    qkv = torch.randn(T, H + 2 * HKV, D)
    q, k, v = qkv.split_with_sizes([H, HKV, HKV], dim=1)
    cos, sin = torch.randn(2, T, 1, D // 2)
    scale = torch.tensor([300.0])
    q_nope, q_pe = torch.randn(T, H, 7 + 6).split([7, 6], dim=-1)
    c, k_pe, with_values = torch.randn(T, 10), torch.randn(T, 6), torch.empty(T, H, 9)
    found: dict[str, list[tuple[Any, ...]]] = {
        "rms_norm": [(x, weight, 1e-5), (torch.randn(T, 3, E, dtype=dtype), weight, 1e-5)],
        "fused_add_rms_norm": [(x, x.clone(), weight, 1e-5), (wide, wide.clone(), weight, 1e-5)],
        "silu_and_mul": [(x,), (torch.randn(T, 3, E, dtype=dtype),)],
        "packed_linear": [],
        "packed_rows": [],
        "routed_experts": [
            (wide, torch.randn(T, 3, dtype=dtype), *matrices, 2, False, "", "", None, 1, 1, 1.0),
            (
                wide,
                torch.randn(T, 6),
                *(m.repeat(2, 1, 1) for m in matrices),
                2,
                True,
                "",
                "",
                *ROUTE,
            ),
        ],
        "mla_attention": [(q_nope, q_pe, c, k_pe, with_values, "latent")],
        "unified_attention_with_output": [(q, k, v, cos, sin, torch.empty(T, H, D), "layer")],
        "lora_add": [
            (torch.randn(T, 7, dtype=dtype), wide, *adapter_matrices(dtype), [4, 1, 2]),
        ],
        "all_reduce": [(x, shard.group_name)],
        "all_reduce_add_rms_norm": [(x, x.clone(), weight, 1e-5, shard.group_name)],
        "quantize_fp8_per_token": [(x,), (wide,), (x[:0],)],
        "quantize_fp8_per_token_group": [(x,), (long,), (long[:0],)],
        "quantize_nvfp4": [(x, scale), (wide, scale), (x[:0], scale)],
        "scaled_linear": [],
        "fused_add_rms_norm_fp8": [(x, x.clone(), weight, 1e-5)],
        "fused_add_rms_norm_out_fp8": [(wide, wide.clone(), weight, 1e-5)],
        "all_reduce_add_rms_norm_fp8": [(x, x.clone(), weight, 1e-5, shard.group_name)],
        "all_reduce_add_rms_norm_out_fp8": [(x, x.clone(), weight, 1e-5, shard.group_name)],
        "fused_add_rms_norm_fp8_group": [(x, x.clone(), weight, 1e-5)],
        "fused_add_rms_norm_out_fp8_group": [(wide, wide.clone(), weight, 1e-5)],
        "all_reduce_add_rms_norm_fp8_group": [(x, x.clone(), weight, 1e-5, shard.group_name)],
        "all_reduce_add_rms_norm_out_fp8_group": [(x, x.clone(), weight, 1e-5, shard.group_name)],
        "fused_add_rms_norm_nvfp4": [(x, x.clone(), weight, 1e-5, scale)],
        "fused_add_rms_norm_out_nvfp4": [(wide, wide.clone(), weight, 1e-5, scale)],
        "all_reduce_add_rms_norm_nvfp4": [
            (x, x.clone(), weight, 1e-5, shard.group_name, scale),
        ],
        "all_reduce_add_rms_norm_out_nvfp4": [
            (x, x.clone(), weight, 1e-5, shard.group_name, scale),
        ],
        "copy_to_user_buffers": [(x, shard.group_name), (wide, shard.group_name)],
        "mm_to_user_buffers": [(x, torch.randn(E, 32, dtype=dtype), shard.group_name)],
        "packed_linear_to_user_buffers": [],
        "user_buffers_all_reduce_add_rms_norm": [(x, x.clone(), weight, 1e-5, shard.group_name)],
        "user_buffers_finalize": [(x, shard.group_name)],
        "gather": [(x, torch.empty(1, T, E, dtype=dtype), shard.group_name)],
        "all_gather": [(x, [T], 0, shard.group_name), (x, [E], 1, shard.group_name)],
        "": [],
    }
    scaled = PackedWeight(torch.randn(32, E, dtype=dtype), Float8())
    for bias in (None, torch.randn(32, dtype=dtype)):
        rounded = quantize_fp8_per_token(x)
        found["scaled_linear"].append((*rounded, scaled.handle, bias, 32, dtype))
    numbers, groups = quantize_fp8_per_token_group(torch.randn(32, 136))
    grouped = PackedWeight(ScaledWeight(numbers, groups.t().contiguous()))
    rounded = quantize_fp8_per_token_group(long)
    found["scaled_linear"].append((*rounded, grouped.handle, None, 32, dtype))
    numbers, blocks = quantize_nvfp4(torch.randn(32, E), scale)
    fp4 = PackedWeight(BlockScaledWeight(numbers, blocks, scale.repeat(1, 32), scale))
    found["scaled_linear"].append((*quantize_nvfp4(x, scale), fp4.handle, None, 32, dtype))
    found[""].append((scaled, grouped, fp4))
    if can_pack(dtype, torch.device("cpu")):
        _add_packed(found, x, shard.group_name)
    return found


def adapter_matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of two adapters of rank 3, for three parts of a layer."""
    return torch.randn(2, 3 * 3, E, dtype=dtype), torch.randn(2, 3, 7, dtype=dtype)


def _add_packed(found: dict[str, list[tuple[Any, ...]]], x: torch.Tensor, group_name: str) -> None:
    """Add the cases of weights that are packed."""
    dtype = x.dtype
    packed = PackedWeight(torch.randn(32, E, dtype=dtype))
    back = PackedWeight(torch.randn(E, 16, dtype=dtype))
    found["packed_linear"] += [
        (x, packed.handle, None, 32),
        (x[:1], packed.handle, torch.randn(32, dtype=dtype), 32),
    ]
    found["packed_linear_to_user_buffers"].append((x, packed.handle, None, 32, group_name))
    if packed.has_rows:
        found["packed_rows"].append((torch.randint(32, (T,)), packed.handle, E, dtype))
    scores, handles = torch.randn(T, 1, dtype=dtype), packed.handle.view(1)
    back_handles = back.handle.view(1)
    found["routed_experts"].append(
        (x, scores, handles, back_handles, 1, True, "", "", None, 1, 1, 1.0)
    )
    # The handles' table is this process's own; the cases keep the weights alive.
    found[""].append((packed, back))


@pytest.mark.feature("K02")
@pytest.mark.usefixtures("attention_context")
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_torch_finds_nothing_wrong_with_any_op(shard: Shard, dtype: torch.dtype) -> None:
    named = cases(shard, dtype)
    kept = named.pop("")
    for name, calls in named.items():
        for args in calls:
            op = getattr(torch.ops.lockstep, name).default
            # Torch cannot multiply FP8 numbers, so its check of writes cannot compare them.
            is_short = any(getattr(arg, "dtype", None) == FP8 for arg in args)
            torch.library.opcheck(op, args, test_utils=CHECKS[is_short:])
    del kept


def test_every_op_of_the_model_is_checked(shard: Shard) -> None:
    done = subprocess.run([sys.executable, "-c", LIST_OPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {name.removeprefix("lockstep::") for name in done.stdout.split()}
    assert names == set(cases(shard, torch.float32)) - {""}
