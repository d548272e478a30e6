"""What inference engines do, in figures: a part of every worker's metrics.

How prompt groups find an engine among several, in figures: a part of every worker's metrics.

What becomes of a worker's spans, in figures: a part of every worker's metrics.

How policy versions reach the engines, in figures: a part of every worker's metrics.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class EngineMetrics:
    """What a worker with an engine tells of it. Labels are the fields of `EngineUsage` and the
    activities of `EngineWatch`.
    """

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._samples = Gauge(
            "relax_engine_samples",
            "Samples in the engine: `decoding`, or `waiting` for room.",
            ["role", "state"],
            registry=registry,
        )
        self._capacity = Gauge(
            "relax_engine_capacity_samples",
            "Samples that the engine may decode side by side.",
            ["role"],
            registry=registry,
        )
        self._tokens = Counter(
            "relax_engine_tokens_total",
            "Tokens of the engine: `drawn`; `prefilled` before the next could be drawn; "
            "`reused`, which a cache spared; `resumed`, drawn before "
            "their sample went on.",
            ["role", "kind"],
            registry=registry,
        )
        self._seconds = Counter(
            "relax_engine_seconds_total",
            (
                "Time that the engine was `generating`, or stood still while it was `loading` "
                "weights; the rest it waited."
            ),
            ["role", "activity"],
            registry=registry,
        )
        self._refused = Counter(
            "relax_weight_load_failures_total",
            "Policy versions that an engine did not take; it is tried again.",
            ["role"],
            registry=registry,
        )

    def samples(self, *, decoding: int, waiting: int, capacity: int) -> None:
        """Say how full the engine is."""
        self._samples.labels(self._role, "decoding").set(decoding)
        self._samples.labels(self._role, "waiting").set(waiting)
        self._capacity.labels(self._role).set(capacity)

    def tokens(self, counts: Mapping[str, int]) -> None:
        """Count tokens, by what the engine did with them."""
        for kind, count in counts.items():
            self._tokens.labels(self._role, kind).inc(count)

    def spent(self, activity: str, seconds: float) -> None:
        """Count time by what the engine did in it."""
        self._seconds.labels(self._role, activity).inc(seconds)

    def refused(self) -> None:
        """Count a version that the engine did not take."""
        self._refused.labels(self._role).inc()


class RoutingMetrics:
    """What a router counts of its engines."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._losses = Counter(
            "relax_engine_failures_total",
            "Times that an engine was lost, or did not come up.",
            ["role"],
            registry=registry,
        )
        self._moved = Counter(
            "relax_engine_migrated_samples_total",
            "Samples taken off an engine that was lost, with their tokens, to go on elsewhere.",
            ["role"],
            registry=registry,
        )
        self._serving = Gauge(
            "relax_engine_serving",
            "Engines of a worker that take prompt groups.",
            ["role"],
            registry=registry,
        )
        self._open = Gauge(
            "relax_engine_open_circuits",
            "Engines of a worker that are lost, or coming up again.",
            ["role"],
            registry=registry,
        )

    def lost(self, num_samples: int) -> None:
        """Count a loss, and the samples that go elsewhere for it."""
        self._losses.labels(self._role).inc()
        self._moved.labels(self._role).inc(num_samples)

    def engines(self, *, serving: int, away: int) -> None:
        """Say how many engines serve, and how many don't."""
        self._serving.labels(self._role).set(serving)
        self._open.labels(self._role).set(away)


class SpanMetrics:
    """Spans that a collector took, and those that none will get."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._sent = Counter(
            "relax_spans_sent_total",
            "Spans that the collector of traces took.",
            ["role"],
            registry=registry,
        )
        self._lost = Counter(
            "relax_spans_dropped_total",
            (
                "Spans that the `collector` of traces did not take in time, and such that found "
                "the `queue` to it full."
            ),
            ["role", "reason"],
            registry=registry,
        )

    def sent(self, count: int) -> None:
        """Count spans that a collector took."""
        self._sent.labels(self._role).inc(count)

    def lost(self, count: int, reason: str) -> None:
        """Count spans that none will get: `collector` did not take them, or the `queue` was
        full.
        """
        self._lost.labels(self._role, reason).inc(count)


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
            "relax_prompt_groups_without_weights_total",
            (
                "Prompt groups that were ended, and issued again, since the weights of their "
                "policy version can't be read."
            ),
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
            (
                "Broadcasts of a policy version that were refused, lost, torn or skipped: the "
                "engine takes it from the store."
            ),
            ["role", "reason"],
            registry=registry,
        )
        self._engines = Gauge(
            "relax_weights_broadcast_engines",
            "Engines that the trainer sends new policy versions to.",
            ["role"],
            registry=registry,
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
        """Count a broadcast that left a policy version to the store: `refused`, `lost`, `torn` or
        `skipped`.
        """
        self._failures.labels(self._role, reason).inc()

    def engines(self, count: int) -> None:
        """Say how many engines get new policy versions by broadcast."""
        self._engines.labels(self._role).set(count)
