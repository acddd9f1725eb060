"""What the HTTP layer is built over: limits and names, and the backend that generates tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from cluster.messages import EngineOutput, GenerateRequest


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
    stream_interval: int = 1
    """Tokens that a chunk of a stream has at least, the first and the last ones apart."""
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


class Backend(Protocol):
    """The pools behind the HTTP layer. All methods are called on the ingress's event loop."""

    def is_ready(self) -> bool:
        """Return whether requests are taken."""
        ...

    def healthy(self) -> bool:
        """Return whether it works or is on its way to; false means that it needs a restart."""
        ...

    async def status(self) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the body of /ready."""
        ...

    async def debug_ranks(self) -> dict[str, Any]:
        """Return the body of /debug/ranks."""
        ...

    def debug_ingress(self) -> dict[str, Any]:
        """Return the body of /debug/ingress."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineOutput, None]:
        """Start one sequence and yield its outputs in order.

        The last one has a finish_reason of stop, length, abort or error. `aclose()`, or
        cancelling the task that waits for the next output, aborts the sequence. The backend puts
        its own address into `reply_to`.

        The stream may raise Overloaded, an ApiError or anything else instead of its first output.
        """
        ...
