"""Penalties and drawing in torch functions: what a GPU runs, and what the CPU's kernels must equal.

A row's token depends on that row alone, bit by bit.

Shapes: B rows, R rows of tables, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from model.kernels.filters import filter_top_k_top_p

_WIDTH = 512


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor | None,
    allowed: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    known: torch.Tensor | None = None,
    *,
    filter_logits: Callable[..., torch.Tensor] = filter_top_k_top_p,
) -> torch.Tensor:
    """Return one token of each row, int64 [B]: the likeliest allowed one where the temperature is
    0, else the one at `uniform` of the mass of those that min-p, top-k and top-p keep, in the order
    of their ids. Arguments are the fields of `SamplingTensors`; None keeps all of every row. No
    `uniform`: all rows are greedy; known: `likeliest(logits)`, if computed before.
    """
    if allowed is not None:
        logits = logits.masked_fill(~unpack_bits(allowed, logits.shape[1]), -torch.inf)
        known = None
    greedy = likeliest(logits) if known is None else known
    if uniform is None:
        return greedy
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
    # Relative to the maximum, so that a tiny temperature gives -inf and never inf - inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / divisor
    if min_p is not None:
        # Less likely than `min_p` times the likeliest (Nguyen et al., 2024).
        scaled = scaled.masked_fill(scaled < min_p.log().unsqueeze(-1), -torch.inf)
    if top_k is not None or top_p is not None:
        scaled = filter_logits(scaled, top_k, top_p)
    drawn = _at_mass(scaled.softmax(dim=-1), uniform)
    return torch.where(temperature > 0, drawn, greedy)


def penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    is_in_prompt: torch.Tensor,
    rows: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Apply the repetition penalty (CTRL; Keskar et al., 2019), then OpenAI's two.

    counts: int32 [R, V], how often each output has each token; is_in_prompt: bool [R, V]; rows:
    int64 [B], where each row of logits stands in these; the penalties: float32 [B].
    """
    counts = counts[rows]
    is_in_output = counts > 0
    factor = torch.where(is_in_output | is_in_prompt[rows], repetition.unsqueeze(-1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - frequency.unsqueeze(-1) * counts
    return logits - presence.unsqueeze(-1) * is_in_output


def _at_mass(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return each row's first token whose cumulative mass exceeds `uniform` of the whole mass."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform.unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # Out of range only where logits are not numbers: the id must still be one.
    return drawn.clamp(max=probs.shape[-1] - 1)


def unpack_bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return the first bits of rows of int32 [B, W], the lowest first, as bool [B, num_bits]."""
    if words.device.type == "cpu":
        # Eight at a time; torch would make four bytes of each.
        octets = words.numpy().view(np.uint8)
        bits = np.unpackbits(octets, axis=1, count=num_bits, bitorder="little")
        return torch.from_numpy(bits).bool()
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :num_bits].bool()


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits.argmax(dim=-1)`, the lowest id among equals. logits: [B, V].

    On a CPU torch's argmax visits one value after the other, while its amax uses vectors: find the
    first chunk with the maximum, then the place in it.
    """
    num_rows, vocab_size = logits.shape
    if logits.device.type != "cpu" or num_rows * vocab_size < 2**16:
        return logits.argmax(dim=-1)
    whole = vocab_size // _WIDTH * _WIDTH
    highest = logits[:, :whole].unflatten(1, (-1, _WIDTH)).amax(dim=-1)
    if whole < vocab_size:
        highest = torch.cat((highest, logits[:, whole:].amax(dim=-1, keepdim=True)), dim=-1)
    first = highest.argmax(dim=-1, keepdim=True) * _WIDTH
    # A short last chunk repeats its last logit, which never comes first among equals.
    places = (first + torch.arange(_WIDTH)).clamp(max=vocab_size - 1)
    token_ids: torch.Tensor = first.squeeze(-1) + logits.gather(1, places).argmax(dim=-1)
    return token_ids
