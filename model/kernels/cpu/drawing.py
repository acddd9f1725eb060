"""Penalties and drawing on a CPU: C++ kernels where they are built, torch functions elsewhere."""

from __future__ import annotations

import torch

from model.kernels import drawing
from model.kernels.cpu.native import int64_array, native_function


def penalise(
    logits: torch.Tensor, counts: torch.Tensor, is_in_prompt: torch.Tensor, *of_rows: torch.Tensor
) -> torch.Tensor:
    """Do what `drawing.penalise` does, but for the last bit, in one pass."""
    kernel = native_function("penalise", torch.float32, "drawing")
    if kernel is None or logits.stride(1) != 1:
        return drawing.penalise(logits, counts, is_in_prompt, *of_rows)
    num_rows, vocab_size = logits.shape
    adjusted = logits.new_empty(logits.shape)
    sizes = int64_array(torch.get_num_threads(), num_rows, vocab_size, logits.stride(0))
    tensors = (logits, counts, is_in_prompt, *(values.contiguous() for values in of_rows), adjusted)
    kernel(*(tensor.data_ptr() for tensor in tensors), sizes)
    return adjusted


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor | None,
    allowed: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `drawing.draw` does, but for the last bits of masses. A row is read a few times, by
    one thread."""
    kernel = native_function("draw", torch.float32, "drawing")
    if kernel is None or logits.stride(1) != 1:
        return drawing.draw(logits, temperature, uniform, allowed, top_k, top_p, min_p, known)
    log_min_p = None if min_p is None else min_p.log()
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    num_words = 0 if allowed is None else allowed.stride(0)
    sizes = int64_array(torch.get_num_threads(), num_rows, vocab_size, logits.stride(0), num_words)
    tensors = (logits, temperature, uniform, allowed, top_k, top_p, log_min_p, token_ids)
    kernel(*(None if tensor is None else tensor.data_ptr() for tensor in tensors), sizes)
    return token_ids
