"""What the HTTP layer is built over: limits and names, and the backend that generates tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from cluster.observe.counts import Counts
from cluster.observe.metrics import MetricsSnapshot
from cluster.wire.messages import EngineOutput, GenerateRequest
from serve.arguments import DeployArgs
from serve.requests.records import SequenceRecord


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for the life of the app."""

    served_model_name: str
    """What answers call the model."""
    other_model_names: tuple[str, ...] = ()
    """What requests may call it besides."""
    max_model_len: int
    """Tokens of prompt and output together."""
    args: DeployArgs = DeployArgs()
    """What `deploy` was asked for: limits, formats, debugging."""
    retry_after_s: float = 5.0
    """The `Retry-After` of requests before the pools are ready."""
    max_sequences: int = 1024
    """Of one request: the prompts of a completions request, each with `n` choices."""
    vocab_size: int | None = None
    """Token ids that the model knows; None: as many as the tokenizer."""
    max_prompt_len: int | None = None
    """The longest prompt whose KV the model can compute; None: any."""
    cache_info: tuple[tuple[str, str], ...] = ()
    """Labels of the metric `cache_config_info`."""

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.served_model_name, *self.other_model_names)


class Backend(Protocol):
    """The pools behind the HTTP layer. All methods are called on the ingress's event loop."""

    def is_ready(self) -> bool:
        """Return whether requests are taken."""

    def failure(self) -> str:
        """Return what does not work and is not on its way to; empty if it is well."""

    async def status(self) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the body of /ready."""

    async def figures(self) -> dict[str, Any]:
        """Return the body of /status."""

    async def debug_ranks(self) -> dict[str, Any]:
        """Return the body of /debug/ranks."""

    async def metrics(self, counts: Counts) -> MetricsSnapshot:
        """Take what this process has counted, and return what all have."""

    def debug_ingress(self) -> dict[str, Any]:
        """Return the body of /debug/ingress."""

    def generate(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        """Start one sequence and yield its outputs in order.

        The last one has a finish_reason of stop, length, abort or error. `aclose()`, or
        cancelling the task that waits for the next output, aborts the sequence. The backend puts
        its own address into `reply_to`, and notes in `record` what it learns of the way.

        The stream may raise Overloaded, an ApiError or anything else instead of its first output.
        """
