"""The metrics as Prometheus reads them. Values come from the status board. They are fetched and
written by one task at a time, no matter how many scrapers wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from cluster.observe.metrics import (
    COMMON_LABELS,
    COUNTER,
    GAUGE,
    HISTOGRAM,
    PREFIX,
    Described,
    MetricsSnapshot,
    samples,
)

OPEN_METRICS = "application/openmetrics-text"
PLAIN = "text/plain"
_METRIC_FAMILIES: dict[str, Any] = {
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
}


class SnapshotCollector(Collector):
    def __init__(self, snapshot: MetricsSnapshot, described: Described) -> None:
        self._snapshot = snapshot
        self._described = described

    def collect(self) -> Iterator[Metric]:
        for metric, found in samples(self._snapshot, self._described):
            name, labels = PREFIX + metric.name, (*COMMON_LABELS, *metric.labels)
            family = _METRIC_FAMILIES[metric.kind](name, metric.meaning, labels=labels)
            for sample in found:
                buckets = [list(sample.buckets)] if metric.kind == HISTOGRAM else []
                family.add_metric(sample.labels, *buckets, sample.value)
            yield family


def format_of(accept: str) -> str:
    """Return which of two formats an Accept header asks for; Prometheus names the best first."""
    kinds = [kind.partition(";")[0].strip() for kind in accept.split(",")]
    return next((kind for kind in kinds if kind in (OPEN_METRICS, PLAIN)), PLAIN)


def exposition(snapshot: MetricsSnapshot, described: Described, kind: str) -> tuple[bytes, str]:
    # Escaping would turn the colons of the names into underscores, and all of them are plain ASCII.
    wanted = f"{OPEN_METRICS}; version=1.0.0; escaping=allow-utf-8"
    encode, content_type = choose_encoder(wanted if kind == OPEN_METRICS else "")
    return encode(SnapshotCollector(snapshot, described)), content_type


class Scrapes:
    """Answers scrapers. Belongs to one event loop."""

    def __init__(
        self, snapshot: Callable[[], Awaitable[MetricsSnapshot]], described: Described
    ) -> None:
        self._snapshot = snapshot
        self._described = described
        self._running: dict[str, asyncio.Task[tuple[bytes, str]]] = {}

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return text and content type of the values of now, one text for all who wait for the same
        format: a scraper that leaves ends nothing."""
        kind = format_of(accept)
        task = self._running.get(kind)
        if task is None:
            task = self._running[kind] = asyncio.get_running_loop().create_task(self._write(kind))
            task.add_done_callback(lambda _: self._running.pop(kind, None))
        return await asyncio.shield(task)

    async def _write(self, kind: str) -> tuple[bytes, str]:
        snapshot = await self._snapshot()
        # Some milliseconds of Python, which the event loop has no time for.
        return await asyncio.to_thread(exposition, snapshot, self._described, kind)
