"""Multi-head latent attention (DeepSeek-V2; DeepSeek-AI, 2024) over the paged cache, as torch
functions: the reference of all kernels.

A token's keys and values of all heads are made of one latent vector, and of a rotated key that all
heads share: those two are what the cache holds. The matrix that makes them, [W_UK; W_UV] for each
head, can be applied to either side:

- *decode* absorbs it: queries become latents, q W_UK, and attend to the cache as it is, like
  queries of one KV head whose values are the first part of its keys; W_UV makes outputs of what
  they find. Nothing is computed for each token of a context.
- *prefill* makes keys and values of latents, since each serves many queries, chunk by chunk: first
  of what was in the cache before, then of the step's own tokens. The chunks' results are joined by
  the logarithms of their sums, so that memory does not grow with the context.

Shapes: T tokens, S sequences, H query heads, n and p the head dim without and with positions, v of
values, r of a latent, N blocks in the pool, B tokens per block, M columns of the block table, Tq
queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from model.kernels.paged_attention import paged_decode, write_rows

CHUNK_TOKENS = 1024
"""Of a context, of which keys and values are there at once."""
CHUNK_QUERIES = 256
"""Of which scores are there at once."""
MIN_CHUNK = 16
"""Tokens of a chunk, on average, from which on keys and values are made of latents. A token's take
r (n + v) products a head, which pays only where many queries share them. Drafts are fewer, and
attend to latents as decodes do."""


def write_latents(
    c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write tokens into their slots, as `paged_attention.write_kv` does.

    c: [T, r]; k_pe: [T, p]; cache: [N, B, 1, r + p]; slot_mapping: int64 [T]
    """
    write_rows(((torch.cat((c, k_pe), dim=-1).unsqueeze(1), cache),), slot_mapping)


def latent_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    matrices: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    attend: Callable[..., None] = paged_decode,
) -> None:
    """Attend from one token per sequence; the output of a sequence of length 0 is zero.

    q_nope: [S, H, n]; q_pe: [S, H, p]; cache: [N, B, 1, r + p]; matrices: [H, n + v, r];
    block_table: int32 [S, M]; seq_lens: int32 [S]; out: [S, H, v]; attend: a kernel that does what
    `paged_decode` does where values are the first part of keys
    """
    (num_seqs, num_heads, nope_dim), rank = q_nope.shape, matrices.shape[2]
    as_latents = torch.bmm(q_nope.transpose(0, 1), matrices[:, :nope_dim]).transpose(0, 1)
    found = q_nope.new_empty(num_seqs, num_heads, rank)
    q = torch.cat((as_latents, q_pe), dim=-1)
    attend(q, cache, cache[..., :rank], block_table, seq_lens, scale, found)
    up = matrices[:, nope_dim:].transpose(1, 2)
    out.copy_(torch.bmm(found.transpose(0, 1), up).transpose(0, 1))


def as_decodes(
    cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each token of a batch of chunks its sequence, and how many of that one's tokens it
    sees, none if it is padding: int32 [T] each. cu_seqlens_q: int32 [S + 1]; seq_lens: int32 [S]"""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=seq_lens.device) + cu_seqlens_q[0]
    seqs = torch.searchsorted(cu_seqlens_q, tokens, right=True, out_int32=True) - 1
    of_token = seqs.clamp(max=len(seq_lens) - 1)
    # All but those behind itself.
    seen = seq_lens[of_token] - (cu_seqlens_q[of_token + 1] - 1 - tokens)
    is_token = (seqs < len(seq_lens)) & (seq_lens[of_token] > 0)
    return of_token, torch.where(is_token, seen, 0).int()


def latent_prefill(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    matrices: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend from chunks of prompts, each to its sequence's tokens up to itself.

    The queries of a sequence are its last tokens, which the cache already holds. Those of a
    sequence of length 0 are padding; their output is zero.

    q_nope: [T, H, n]; q_pe: [T, H, p]; out: [T, H, v], of a batch's tokens from `cu_seqlens_q[0]`
    on; cu_seqlens_q: int32 [S + 1]; the rest as `latent_decode` takes it
    """
    bounds = (cu_seqlens_q - cu_seqlens_q[0]).tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        num_queries = rows.stop - rows.start
        if seq_len == 0:
            out[rows].zero_()
        if num_queries == 0 or seq_len == 0:
            continue
        q = torch.cat((q_nope[rows], q_pe[rows]), dim=-1).transpose(0, 1).float() * scale
        context = _Context(cache, block_table[i], matrices, q_nope.shape[2])
        out[rows] = _attend(q, context, seq_len - num_queries, seq_len).transpose(0, 1)


class _Context:
    """One sequence's keys and values, made when they are asked for."""

    def __init__(
        self, cache: torch.Tensor, blocks: torch.Tensor, matrices: torch.Tensor, nope_dim: int
    ) -> None:
        self._cache, self._blocks = cache, blocks
        self._matrices, self._nope_dim = matrices, nope_dim

    def tokens(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [H, stop - start, n + p] and values [H, stop - start, v] in float32."""
        block_size, rank = self._cache.shape[1], self._matrices.shape[2]
        first = start // block_size
        blocks = self._blocks[first : -(-stop // block_size)]
        gathered = self._cache.index_select(0, blocks).flatten(0, 2)
        rows = gathered[start - first * block_size :][: stop - start]
        latents, k_pe = rows[:, :rank], rows[:, rank:]
        made = torch.matmul(latents, self._matrices.transpose(1, 2))
        k = torch.cat((made[..., : self._nope_dim], k_pe.expand(len(made), -1, -1)), dim=-1)
        return k.float(), made[..., self._nope_dim :].float()


def _attend(q: torch.Tensor, context: _Context, before: int, length: int) -> torch.Tensor:
    """Attend from a sequence's last tokens, behind `before` others. q: [H, Tq, n + p], scaled.

    Returns float32 [H, Tq, v].
    """
    bounds, joined = [*range(0, before, CHUNK_TOKENS), before], None
    # Those before are seen by all queries; of the last tokens each sees those up to itself.
    for start, stop in zip(bounds, [*bounds[1:], length], strict=True):
        k, v = context.tokens(start, stop)
        parts = []
        for at in range(0, q.shape[1], CHUNK_QUERIES):
            queries = q[:, at : at + CHUNK_QUERIES]
            if start < before:
                parts.append(_attend_part(queries, k, v, None))
            else:
                seen = at + queries.shape[1]
                parts.append(_attend_part(queries, k[:, :seen], v[:, :seen], at))
        found = _Found(*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)))
        joined = found if joined is None else joined.join(found)
    assert joined is not None
    return joined.values


class _Found(NamedTuple):
    """What queries found among some keys: [H, Tq, v], and the logarithms of the sums that their
    weights were divided by, [H, Tq, 1]."""

    values: torch.Tensor
    log_sum: torch.Tensor

    def join(self, other: _Found) -> _Found:
        """Return what they find among the keys of both."""
        log_sum = torch.logaddexp(self.log_sum, other.log_sum)
        own, others = ((part.log_sum - log_sum).exp() for part in (self, other))
        return _Found(self.values * own + other.values * others, log_sum)


def _attend_part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, diagonal: int | None) -> _Found:
    """q: [H, Tq, n + p]; k, v: [H, Tk, n + p and v]. Query i sees the keys up to `diagonal` + i;
    None: all."""
    scores = q @ k.transpose(1, 2)
    if diagonal is not None:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(diagonal)
        scores.masked_fill_(~seen, -torch.inf)
    log_sum = scores.logsumexp(-1, keepdim=True)
    return _Found((scores - log_sum).exp_() @ v, log_sum)
