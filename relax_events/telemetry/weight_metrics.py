"""How policy versions reach the engines, in figures: a part of every worker's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

DELAY_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class WeightMetrics:
    """What trainer and rollout workers count of the versions between them."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._loaded = Counter(
            "relax_weights_loaded_total",
            "Policy versions that an engine loaded, by how their tensors came.",
            ["role", "transport"],
            registry=registry,
        )
        self._lost = Counter(
            "relax_weights_lost_prompt_groups_total",
            "Prompt groups that were ended, and issued again, since the weights of their policy version can't be read.",
            ["role"],
            registry=registry,
        )
        self._delay = Histogram(
            "relax_weights_delay_seconds",
            "Time from a policy version's publication until an engine serves it.",
            ["role"],
            buckets=DELAY_BUCKETS,
            registry=registry,
        )
        self._moved = Counter(
            "relax_weights_broadcast_bytes_total",
            "Bytes of policy versions that arrived whole, on both sides of a broadcast.",
            ["role", "transport"],
            registry=registry,
        )
        self._failures = Counter(
            "relax_weights_broadcast_failures_total",
            "Broadcasts of a policy version that were refused, lost, torn or skipped: the engine takes it from the store.",
            ["role", "reason"],
            registry=registry,
        )
        self._engines = Gauge(
            "relax_weights_broadcast_engines", "Engines that the trainer sends new policy versions to.", ["role"], registry=registry
        )

    def lost(self, count: int) -> None:
        """Count prompt groups of a version whose weights can't be read."""
        self._lost.labels(self._role).inc(count)

    def loaded(self, transport: str, *, delay_seconds: float) -> None:
        """Count a policy version that an engine serves now, so long after its publication."""
        self._loaded.labels(self._role, transport).inc()
        self._delay.labels(self._role).observe(max(0.0, delay_seconds))

    def moved(self, num_bytes: int, *, transport: str) -> None:
        """Count the bytes of a policy version that arrived by broadcast."""
        self._moved.labels(self._role, transport).inc(num_bytes)

    def failed(self, reason: str) -> None:
        """Count a broadcast that left a policy version to the store: `refused`, `lost`, `torn` or `skipped`."""
        self._failures.labels(self._role, reason).inc()

    def engines(self, count: int) -> None:
        """Say how many engines get new policy versions by broadcast."""
        self._engines.labels(self._role).set(count)
