"""Kernels for a CPU: C++ where it is built, torch functions elsewhere.

`model.kernels.triton` has the same names, which take the same arguments.
"""

from model.kernels.cpu.attention import paged_decode, paged_prefill, rope_and_write_kv
from model.kernels.cpu.elementwise import fused_add_rms_norm, rms_norm, silu_and_mul
from model.kernels.cpu.experts import expert_mlp
from model.kernels.filters import filter_top_k_top_p
from model.kernels.sparse_mlp import route

__all__ = [
    "expert_mlp",
    "filter_top_k_top_p",
    "fused_add_rms_norm",
    "paged_decode",
    "paged_prefill",
    "rms_norm",
    "rope_and_write_kv",
    "route",
    "silu_and_mul",
]
