"""Kernels for a GPU, in Triton; each equals a torch function, its reference.

`model.kernels.cpu` has the same names, which take the same arguments.
"""

from model.kernels.drawing import penalise as penalise
from model.kernels.triton.adapters import add_adapters as add_adapters
from model.kernels.triton.decode import paged_decode as paged_decode
from model.kernels.triton.elementwise import fused_add_rms_norm as fused_add_rms_norm
from model.kernels.triton.elementwise import rms_norm as rms_norm
from model.kernels.triton.elementwise import silu_and_mul as silu_and_mul
from model.kernels.triton.experts import expert_mlp as expert_mlp
from model.kernels.triton.filters import draw as draw
from model.kernels.triton.fp4 import fp4_linear as fp4_linear
from model.kernels.triton.fp8 import fp8_linear as fp8_linear
from model.kernels.triton.integers import integer_linear as integer_linear
from model.kernels.triton.latent import latent_decode as latent_decode
from model.kernels.triton.latent import write_latents as write_latents
from model.kernels.triton.latent_chunks import latent_prefill as latent_prefill
from model.kernels.triton.prefill import paged_prefill as paged_prefill
from model.kernels.triton.rope import rope_and_write_kv as rope_and_write_kv
from model.kernels.triton.rounding import quantize_blocks as quantize_blocks
from model.kernels.triton.rounding import quantize_groups as quantize_groups
from model.kernels.triton.rounding import quantize_rows as quantize_rows
from model.kernels.triton.routing import route as route
