"""What becomes of a worker's spans, in figures: a part of every worker's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class SpanMetrics:
    """Spans that a collector took, and those that none will get."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._sent = Counter("relax_spans_sent_total", "Spans that the collector of traces took.", ["role"], registry=registry)
        self._lost = Counter(
            "relax_spans_lost_total",
            "Spans that the `collector` of traces did not take in time, and such that found the `queue` to it full.",
            ["role", "reason"],
            registry=registry,
        )

    def sent(self, count: int) -> None:
        """Count spans that a collector took."""
        self._sent.labels(self._role).inc(count)

    def lost(self, count: int, reason: str) -> None:
        """Count spans that none will get: `collector` did not take them, or the `queue` was full."""
        self._lost.labels(self._role, reason).inc(count)
