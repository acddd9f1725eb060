"""The metrics once more, through `ray.util.metrics`, for those who scrape Ray's own endpoints.

Ray's names take no colon: `lockstep:steps_total` is `lockstep_steps_total` there, with whatever Ray
puts before it. All are set as gauges, because a Ray counter starts at zero with its process and a
total does not; `rate` and `histogram_quantile` take them like those of `/metrics`.
"""

from __future__ import annotations

from ray.util.metrics import Gauge

from cluster.observe.metrics import COMMON_LABELS, HISTOGRAM, Described, MetricsSnapshot, samples

RAY_PREFIX = "lockstep_"


class RayMetrics:
    """One application's gauges."""

    def __init__(self, described: Described) -> None:
        self._described = described
        self._gauges: dict[str, Gauge] = {}

    def export(self, snapshot: MetricsSnapshot) -> None:
        """Set all gauges; some milliseconds."""
        for metric, found in samples(snapshot, self._described):
            labels = (*COMMON_LABELS, *metric.labels)
            for sample in found:
                tags = dict(zip(labels, sample.labels, strict=True))
                if metric.kind != HISTOGRAM:
                    self._set(metric.name, metric.meaning, sample.value, tags)
                    continue
                self._set(f"{metric.name}_sum", metric.meaning, sample.value, tags)
                self._set(f"{metric.name}_count", metric.meaning, sample.buckets[-1][1], tags)
                for bound, times in sample.buckets:
                    of_bucket = {**tags, "le": bound}
                    self._set(f"{metric.name}_bucket", metric.meaning, times, of_bucket)

    def _set(self, name: str, meaning: str, value: float, tags: dict[str, str]) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(RAY_PREFIX + name, meaning, tag_keys=tuple(tags))
        gauge.set(value, tags=tags)
