"""What inference engines do, in figures: a part of every worker's metrics."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge


class EngineMetrics:
    """What a worker with an engine tells of it. Labels are the fields of `EngineUsage` and the activities of `EngineWatch`."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._samples = Gauge(
            "relax_engine_samples", "Samples in the engine: `decoding`, or `waiting` for room.", ["role", "state"], registry=registry
        )
        self._capacity = Gauge("relax_engine_capacity_samples", "Samples that the engine may decode side by side.", ["role"], registry=registry)
        self._tokens = Counter(
            "relax_engine_tokens_total",
            "Tokens of the engine: `drawn`; `prefilled` before the next could be drawn; `reused`, which a cache spared; `resumed`, drawn before "
            "their sample went on.",
            ["role", "kind"],
            registry=registry,
        )
        self._seconds = Counter(
            "relax_engine_seconds_total",
            "Time that the engine was `generating`, or stood still while it was `loading` weights; the rest it waited.",
            ["role", "activity"],
            registry=registry,
        )
        self._refused = Counter(
            "relax_weights_refused_total", "Policy versions that an engine did not take; it is tried again.", ["role"], registry=registry
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
