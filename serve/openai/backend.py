"""What the HTTP layer is built over: the pools, and what all handlers share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from cluster.observe.counts import Counts
from cluster.observe.metrics import MetricsSnapshot
from cluster.wire.messages import EngineOutput, GenerateRequest
from serve.admission import Admission
from serve.clients import CacheSalts
from serve.config import ApiSettings
from serve.event_loop import LoopThrottle, StreamBatcher, WorkThreads
from serve.observe.metrics import Scrapes
from serve.requests.records import IngressCounts, RequestRecord, SequenceRecord
from serve.requests.tokenizer import Tokenizer

BEGUN_AT_ONCE = 4
"""Requests, and sequences, started in a turn of the event loop: each costs it a millisecond or
two."""


class Backend(Protocol):
    """The pools behind the HTTP layer. All methods are called on the ingress's event loop.

    `failure` is what does not work and is not on its way to, or empty; `status` the HTTP status and
    the body of /ready, `figures` the body of /status; `metrics` takes what this process has
    counted, and returns what all have.
    """

    def is_ready(self) -> bool: ...
    def failure(self) -> str: ...
    async def status(self) -> tuple[int, dict[str, Any]]: ...
    async def figures(self) -> dict[str, Any]: ...
    async def debug_ranks(self) -> dict[str, Any]: ...
    def debug_ingress(self) -> dict[str, Any]: ...
    async def metrics(self, counts: Counts) -> MetricsSnapshot: ...
    def generate(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        """Start one sequence and yield its outputs in order; it may raise before the first.

        The last one has a finish_reason of stop, length, abort or error. `aclose()`, or
        cancelling the task that waits for the next output, aborts the sequence. The backend puts
        its own address into `reply_to`, and notes in `record` what it learns of the way.
        """


class Serving:
    """What all handlers share."""

    def __init__(
        self,
        settings: ApiSettings,
        backend: Backend,
        tokenizer: Callable[[], Tokenizer | None],
        admission: Admission,
        tick: StreamBatcher | None = None,
        secret: bytes = b"",
    ) -> None:
        """Share what is given; `tick` is the one that the backend's outputs wait for.

        secret: the application's, of at most 64 bytes, which all ingresses have.
        """
        self.salts = CacheSalts(secret, is_per_key=settings.args.divides_prefix_cache)
        self.settings = settings
        self.tokenizer = tokenizer
        self.backend = backend
        self.admission = admission
        self.num_discarding = 0
        """Refused bodies that are read to their end."""
        self.threads = WorkThreads()
        self.requests = LoopThrottle(BEGUN_AT_ONCE)
        self.sequences = LoopThrottle(BEGUN_AT_ONCE)
        self.tick = tick or StreamBatcher()
        self.counts = IngressCounts(settings.max_model_len)
        self.on_end: list[Callable[[RequestRecord], None]] = []
        """Called with what was noted of each generating request."""
        self.is_traced = False
        """Whether a request's trace is noted too."""
        self.scrapes = Scrapes(lambda: backend.metrics(self.counts.counts()), settings.described)
