"""The catalogue of worker metrics, in a registry of their own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relax_events.telemetry.component_metrics import (
    EngineMetrics,
    RoutingMetrics,
    SpanMetrics,
    WeightMetrics,
)

SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class WorkerMetrics:
    """What every worker counts. Labels are bounded: role, topic, reason, outcome; never a version
    or an id.
    """

    def __init__(self, role: str) -> None:
        self.registry = CollectorRegistry()
        self._role = role
        self._processed = Counter(
            "relax_records_processed_total",
            "Records that a worker finished.",
            ["role"],
            registry=self.registry,
        )
        self._expired = Counter(
            "relax_records_expired_total",
            "Records skipped because their version left the window.",
            ["role"],
            registry=self.registry,
        )
        self._dropped = Counter(
            "relax_duplicate_generation_records_total",
            (
                "Records of a second generation of a prompt group, dropped because another one "
                "was joined."
            ),
            ["role"],
            registry=self.registry,
        )
        self._letters = Counter(
            "relax_dead_letters_total",
            "Records written to a dead-letter topic.",
            ["role", "reason"],
            registry=self.registry,
        )
        self._ended = Counter(
            "relax_prompt_groups_ended_total",
            "Prompt groups by how they ended.",
            ["outcome"],
            registry=self.registry,
        )
        self._duration = Histogram(
            "relax_record_batch_duration_seconds",
            "Time to process one record batch.",
            ["role"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self._purged = Counter(
            "relax_records_purged_total",
            "Records deleted by version retention.",
            ["topic"],
            registry=self.registry,
        )
        self._scored = Counter(
            "relax_samples_scored_total",
            "Samples by whether they got a reward.",
            ["outcome"],
            registry=self.registry,
        )
        self._tokens = Counter(
            "relax_tokens_total",
            "Tokens that a worker generated, evaluated or trained.",
            ["role"],
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "relax_records_in_flight", "Records in work.", ["role"], registry=self.registry
        )
        self._version = Gauge(
            "relax_policy_version",
            "Policy version that a worker serves or knows.",
            ["role"],
            registry=self.registry,
        )
        self._value_loss = Gauge(
            "relax_critic_value_loss",
            "Value loss of the critic's newest step.",
            ["role"],
            registry=self.registry,
        )
        self._explained = Gauge(
            "relax_critic_explained_variance_ratio",
            "Share of the returns' variance that the critic knew, in its newest step.",
            ["role"],
            registry=self.registry,
        )
        self._critic_lag = Gauge(
            "relax_critic_version_lag",
            "Policy versions that the critic is behind the newest.",
            ["role"],
            registry=self.registry,
        )
        self._lag = Gauge(
            "relax_consumer_lag_records",
            (
                "Records that a worker's consumer has not read of the partitions that it holds, "
                "by slot (policy version mod slots)."
            ),
            ["role", "topic", "slot"],
            registry=self.registry,
        )
        self._lagging: set[tuple[str, str]] = set()
        self.weights = WeightMetrics(role, self.registry)
        self.engine = EngineMetrics(role, self.registry)
        self.routing = RoutingMetrics(role, self.registry)
        self.spans = SpanMetrics(role, self.registry)
        self._tracker_errors = Counter(
            "relax_tracker_errors_total",
            "Times that a tracker did not take figures; it is tried again.",
            ["tracker"],
            registry=self.registry,
        )
        self._notice_errors = Counter(
            "relax_notification_errors_total",
            "Times that a service did not take a notice; it is tried again.",
            ["service"],
            registry=self.registry,
        )
        self._progress = Gauge(
            "relax_last_progress_timestamp_seconds",
            "When a worker last finished a record.",
            ["role"],
            registry=self.registry,
        )

    def processed(self, count: int, *, seconds: float) -> None:
        """Count a finished record batch."""
        self._processed.labels(self._role).inc(count)
        self._duration.labels(self._role).observe(seconds)
        self._progress.labels(self._role).set_to_current_time()

    def expired(self, count: int) -> None:
        """Count records whose version left the window."""
        self._expired.labels(self._role).inc(count)

    def generation_dropped(self, count: int) -> None:
        """Count records of a prompt group that was generated again, where another generation of it
        was joined.
        """
        self._dropped.labels(self._role).inc(count)

    def expect_dead_letters(self, reasons: Iterable[str]) -> None:
        """Count none yet, for these classes of errors: what Prometheus first sees as 1 it takes for
        no increase.
        """
        for reason in reasons:
            self._letters.labels(self._role, reason)

    def dead_lettered(self, reason: str) -> None:
        """Count a dead letter by the class of its error."""
        self._letters.labels(self._role, reason).inc()

    def purged(self, entity: str, count: int) -> None:
        """Count records of a topic that retention deleted."""
        self._purged.labels(entity).inc(count)

    def ended(self, outcome: str) -> None:
        """Count a prompt group's end."""
        self._ended.labels(outcome).inc()

    def scored(self, outcome: str) -> None:
        """Count a sample that got a reward (`scored`), did not (`failed`), or was given a judgement
        without a score (`unreadable`).
        """
        self._scored.labels(outcome).inc()

    def tokens(self, count: int) -> None:
        """Count tokens."""
        self._tokens.labels(self._role).inc(count)

    def tracker_failed(self, tracker: str) -> None:
        """Count an error of a tracker of the run file."""
        self._tracker_errors.labels(tracker).inc()

    def notice_failed(self, service: str) -> None:
        """Count an error of a service that notices go to, by its scheme and place."""
        self._notice_errors.labels(service).inc()

    def in_flight(self, count: int) -> None:
        """Say how many records are in work."""
        self._in_flight.labels(self._role).set(count)

    def consumer_lag(self, counts: Mapping[tuple[str, int], int], *, shards: int) -> None:
        """Say how many records are unread in each partition, named by its topic without the run;
        partitions that we gave back are left out.
        """
        lag: Tally[tuple[str, str]] = Tally()
        for (topic, partition), count in counts.items():
            lag[topic, str(partition // shards)] += count
        for place, count in lag.items():
            self._lag.labels(self._role, *place).set(count)
        for place in self._lagging - lag.keys():
            self._lag.remove(self._role, *place)
        self._lagging = set(lag)

    def policy_version(self, version: int) -> None:
        """Say which version the worker serves or knows."""
        self._version.labels(self._role).set(version)

    def learned(self, *, value_loss: float, explained_variance: float, version_lag: int) -> None:
        """Say how a step of the critic went, and how many policy versions it is behind."""
        self._value_loss.labels(self._role).set(value_loss)
        self._explained.labels(self._role).set(explained_variance)
        self._critic_lag.labels(self._role).set(version_lag)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class ErrorMetrics(Collector):
    """What a worker's clients met, counted where it happens; labels are bounded by librdkafka's
    names and by what stores are asked to do.
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
        """Give all families."""
        broker = CounterMetricFamily(
            "relax_broker_errors",
            "What clients met in the background, mended or not.",
            labels=["role", "error"],
        )
        failed = "Calls of the object store that failed, those that are tried again included."
        objects = CounterMetricFamily("relax_object_errors", failed, labels=["role", "action"])
        for family, counts in ((broker, self._broker), (objects, self._objects)):
            for name, count in dict(counts).items():
                family.add_metric([self._role, name], count)
            yield family
        away = GaugeMetricFamily(
            "relax_object_store_unavailable_seconds",
            "For how long an object store has not answered; 0 when it does.",
            labels=["role"],
        )
        away.add_metric([self._role], self._away_seconds())
        yield away
