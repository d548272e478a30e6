"""The catalogue of worker metrics, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relax_events.telemetry.component_metrics import (
    ConsumerLagMetrics,
    CriticMetrics,
    DeliveryMetrics,
    EngineMetrics,
    EpisodeMetrics,
    ReplicaMetrics,
    SpanMetrics,
    WeightMetrics,
)

SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class WorkerMetrics:
    """The metrics of every worker. Labels are bounded: role, topic, reason, outcome; never a
    version or an id.
    """

    def __init__(self, role: str) -> None:
        self.registry = CollectorRegistry()
        self._role = role
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self._processed = counter(
            "relax_records_processed_total",
            "Records that a worker processed; samples where a role processes samples.",
            ["role"],
        )
        self._expired = counter(
            "relax_records_expired_total",
            "Records skipped because their policy version is older than the staleness bound.",
            ["role"],
        )
        self._dropped = counter(
            "relax_duplicate_generation_records_total",
            "Records of a second generation of a prompt group, dropped because the first one "
            "was joined.",
            ["role"],
        )
        self._dead_letters = counter(
            "relax_dead_letters_total",
            "Records written to a dead-letter topic.",
            ["role", "reason"],
        )
        self._ended = counter(
            "relax_prompt_groups_ended_total", "Prompt groups by outcome.", ["outcome"]
        )
        self._duration = Histogram(
            "relax_record_batch_duration_seconds",
            "Time to process one record batch.",
            ["role"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self._purged = counter(
            "relax_records_purged_total", "Records deleted by version retention.", ["topic"]
        )
        self._scored = counter(
            "relax_samples_scored_total", "Samples by outcome of scoring.", ["outcome"]
        )
        self._generated = counter(
            "relax_samples_generated_total",
            "Samples of finished prompt groups by finish reason; `lost` by a fault of environment, "
            "engine or media, `late` by a turn of the policy.",
            ["role", "finish"],
        )
        self._tokens = counter(
            "relax_tokens_total", "Tokens that a worker generated, scored or trained.", ["role"]
        )
        self._in_flight = gauge("relax_records_in_flight", "Records in flight.", ["role"])
        self._version = gauge(
            "relax_policy_version", "Policy version that a worker uses or knows.", ["role"]
        )
        self.critic = CriticMetrics(role, self.registry)
        self.consumer_lag = ConsumerLagMetrics(role, self.registry)
        self.weights = WeightMetrics(role, self.registry)
        self.engine = EngineMetrics(role, self.registry)
        self.routing = ReplicaMetrics(role, self.registry)
        self.episodes = EpisodeMetrics(role, self.registry)
        self.spans = SpanMetrics(role, self.registry)
        self.deliveries = DeliveryMetrics(self.registry)
        self._progress = gauge(
            "relax_last_progress_timestamp_seconds",
            "When a worker last processed a record.",
            ["role"],
        )

    def count_processed(self, count: int, *, seconds: float) -> None:
        """Count a finished record batch."""
        self._processed.labels(self._role).inc(count)
        self._duration.labels(self._role).observe(seconds)
        self._progress.labels(self._role).set_to_current_time()

    def count_expired(self, count: int) -> None:
        """Count records whose version left the window."""
        self._expired.labels(self._role).inc(count)

    def count_dropped_generation(self, count: int) -> None:
        """Count records of a prompt group that was generated again, where another generation of it
        was joined.
        """
        self._dropped.labels(self._role).inc(count)

    def initialize_dead_letters(self, reasons: Iterable[str]) -> None:
        """Initialize the dead-letter counters of these error classes with 0: Prometheus does not
        see an increase in a counter that appears as 1.
        """
        for reason in reasons:
            self._dead_letters.labels(self._role, reason)

    def count_dead_letter(self, reason: str) -> None:
        """Count a dead letter by the class of its error."""
        self._dead_letters.labels(self._role, reason).inc()

    def count_purged(self, entity: str, count: int) -> None:
        """Count records of a topic that retention deleted."""
        self._purged.labels(entity).inc(count)

    def count_ended_group(self, outcome: str) -> None:
        """Count a prompt group's end."""
        self._ended.labels(outcome).inc()

    def count_scored(self, outcome: str) -> None:
        """Count a sample that got a reward (`scored`), did not (`failed`), or whose LLM judge gave
        no readable score (`unreadable`).
        """
        self._scored.labels(outcome).inc()

    def count_generated(self, counts: Mapping[str, int]) -> None:
        """Count samples by finish reason."""
        for finish_reason, count in counts.items():
            self._generated.labels(self._role, finish_reason).inc(count)

    def count_tokens(self, count: int) -> None:
        """Count tokens."""
        self._tokens.labels(self._role).inc(count)

    def set_in_flight(self, count: int) -> None:
        """Set the number of records in progress."""
        self._in_flight.labels(self._role).set(count)

    def set_policy_version(self, version: int) -> None:
        """Set the policy version that the worker serves or knows."""
        self._version.labels(self._role).set(version)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class ErrorMetrics(Collector):
    """Errors of a worker's clients. Labels are bounded: librdkafka's error names and the actions of
    object stores.
    """

    def __init__(
        self,
        role: str,
        *,
        broker: Mapping[str, int],
        objects: Mapping[str, int],
        away_seconds: Callable[[], float],
    ) -> None:
        self._role, self._broker, self._objects, self._away_seconds = (
            role,
            broker,
            objects,
            away_seconds,
        )

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        broker = CounterMetricFamily(
            "relax_broker_errors",
            "Errors that Kafka clients reported in the background, recovered or not.",
            labels=["role", "error"],
        )
        failed = "Calls of the object store that failed, retried calls included."
        objects = CounterMetricFamily("relax_object_errors", failed, labels=["role", "action"])
        for family, counts in ((broker, self._broker), (objects, self._objects)):
            for name, count in dict(counts).items():
                family.add_metric([self._role, name], count)
            yield family
        away = GaugeMetricFamily(
            "relax_object_store_unavailable_seconds",
            "How long an object store has not answered; 0 when it answers.",
            labels=["role"],
        )
        away.add_metric([self._role], self._away_seconds())
        yield away
