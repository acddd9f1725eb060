"""Kernels for a GPU, in Triton; each equals a torch function, its reference.

`model.kernels.cpu` has the same names, which take the same arguments.
"""

from model.kernels.triton.decode import paged_decode
from model.kernels.triton.elementwise import fused_add_rms_norm, rms_norm, silu_and_mul
from model.kernels.triton.experts import expert_mlp
from model.kernels.triton.filters import filter_top_k_top_p
from model.kernels.triton.prefill import paged_prefill
from model.kernels.triton.rope import rope_and_write_kv
from model.kernels.triton.routing import route

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
