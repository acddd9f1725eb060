"""Drawing tokens on a CPU: the kernel in C++ where it is built, torch functions elsewhere."""

from __future__ import annotations

import torch

from model.kernels import drawing
from model.kernels.cpu.native import int64_array, native_function


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    allowed: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """Do what `drawing.draw` does, but for the last bits of masses. A row is read a few times, by
    one thread."""
    kernel = native_function("draw", torch.float32, "drawing")
    if kernel is None or logits.stride(1) != 1:
        return drawing.draw(logits, temperature, uniform, allowed, top_k, top_p, min_p)
    log_min_p = None if min_p is None else min_p.log()
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    num_words = 0 if allowed is None else allowed.stride(0)
    sizes = int64_array(torch.get_num_threads(), num_rows, vocab_size, logits.stride(0), num_words)
    tensors = (logits, temperature, uniform, allowed, top_k, top_p, log_min_p, token_ids)
    kernel(*(None if tensor is None else tensor.data_ptr() for tensor in tensors), sizes)
    return token_ids
