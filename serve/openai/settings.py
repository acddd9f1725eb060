"""The limits and names that the HTTP layer is built with."""

from __future__ import annotations

import msgspec


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for the life of the app."""

    served_model_name: str
    max_model_len: int
    """Tokens of prompt and output together."""
    max_body_bytes: int = 8 * 2**20
    request_timeout_s: float = 600.0
    """For receiving the request, and again for answering it to the last byte."""
    max_answer_bytes: int = 64 * 2**20
    """Of a streamed answer; a whole one, which is in memory several times, may be a part of it."""
    retry_after_s: float = 5.0
    """How long a client that comes before the pools are ready is told to wait."""
    max_sequences: int = 1024
    """Of one request: the prompts of a completions request, each with `n` choices."""
    vocab_size: int | None = None
    """Token ids that the model knows; None: as many as the tokenizer."""
    max_prompt_len: int | None = None
    """The longest prompt whose KV the model can compute; None: any."""
    debug: bool = False
    """Whether /debug/ranks and /debug/ingress exist."""
