"""What the HTTP layer needs of the backend that generates the tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from cluster.messages import EngineOutput, GenerateRequest


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
