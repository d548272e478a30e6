"""How prompt groups find an engine among several, in figures: a part of every worker's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class RoutingMetrics:
    """What a router counts of its engines."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._losses = Counter("relax_engine_losses_total", "Times that an engine was lost, or did not come up.", ["role"], registry=registry)
        self._moved = Counter(
            "relax_engine_moved_samples_total",
            "Samples taken off an engine that was lost, with their tokens, to go on elsewhere.",
            ["role"],
            registry=registry,
        )
        self._serving = Gauge("relax_engine_serving", "Engines of a worker that take prompt groups.", ["role"], registry=registry)
        self._open = Gauge("relax_engine_open_circuits", "Engines of a worker that are lost, or coming up again.", ["role"], registry=registry)

    def lost(self, num_samples: int) -> None:
        """Count a loss, and the samples that go elsewhere for it."""
        self._losses.labels(self._role).inc()
        self._moved.labels(self._role).inc(num_samples)

    def engines(self, *, serving: int, away: int) -> None:
        """Say how many engines serve, and how many don't."""
        self._serving.labels(self._role).set(serving)
        self._open.labels(self._role).set(away)
