"""Metrics of engines, engine replicas, the critic, consumer lag, spans, deliveries and weight
transfer: a part of every worker's metrics.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class EngineMetrics:
    """Metrics of a worker's engine. Labels are the fields of `EngineUsage` and the activities of
    `EngineMonitor`.
    """

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._samples = Gauge(
            "relax_engine_samples",
            "Samples in the engine: `decoding`, or `waiting` for capacity.",
            ["role", "state"],
            registry=registry,
        )
        self._capacity = Gauge(
            "relax_engine_capacity_samples",
            "Maximum samples that the engine decodes concurrently.",
            ["role"],
            registry=registry,
        )
        self._tokens = Counter(
            "relax_engine_tokens_total",
            "Tokens of the engine: `generated`; `prefilled` before generation; `cached`, whose "
            "prefill a cache saved; `recomputed`, of samples that resumed elsewhere.",
            ["role", "kind"],
            registry=registry,
        )
        self._seconds = Counter(
            "relax_engine_seconds_total",
            (
                "Time that the engine was `generating`, or paused while `loading` weights; the "
                "rest is idle."
            ),
            ["role", "activity"],
            registry=registry,
        )
        self._refused = Counter(
            "relax_weight_load_failures_total",
            "Policy versions that an engine failed to load; it tries again.",
            ["role"],
            registry=registry,
        )

    def set_samples(self, *, decoding: int, waiting: int, capacity: int) -> None:
        """Set the number of samples in the engine, and its capacity."""
        self._samples.labels(self._role, "decoding").set(decoding)
        self._samples.labels(self._role, "waiting").set(waiting)
        self._capacity.labels(self._role).set(capacity)

    def count_tokens(self, counts: Mapping[str, int]) -> None:
        """Count tokens by kind."""
        for kind, count in counts.items():
            self._tokens.labels(self._role, kind).inc(count)

    def count_seconds(self, activity: str, seconds: float) -> None:
        """Count time by the engine's activity."""
        self._seconds.labels(self._role, activity).inc(seconds)

    def count_load_failure(self) -> None:
        """Count a policy version that the engine failed to load."""
        self._refused.labels(self._role).inc()


class ReplicaMetrics:
    """Metrics of a worker's engine replicas."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._losses = Counter(
            "relax_engine_failures_total",
            "Times that an engine failed, or did not start.",
            ["role"],
            registry=registry,
        )
        self._moved = Counter(
            "relax_engine_migrated_samples_total",
            "Samples moved with their tokens from a failed engine to another.",
            ["role"],
            registry=registry,
        )
        self._serving = Gauge(
            "relax_engine_serving",
            "Engines of a worker that accept prompt groups.",
            ["role"],
            registry=registry,
        )
        self._open = Gauge(
            "relax_engine_open_circuits",
            "Engines of a worker that failed, or are restarting.",
            ["role"],
            registry=registry,
        )

    def count_failure(self, num_samples: int) -> None:
        """Count an engine failure, and the samples that move to another engine."""
        self._losses.labels(self._role).inc()
        self._moved.labels(self._role).inc(num_samples)

    def set_engines(self, *, serving: int, away: int) -> None:
        """Set the number of engines that serve, and of engines that do not."""
        self._serving.labels(self._role).set(serving)
        self._open.labels(self._role).set(away)


class EpisodeMetrics:
    """Metrics of a worker's episodes, in which environments or programs drive the policy."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._attempts = Counter(
            "relax_episode_attempts_total",
            "Attempts of episodes: finished, late by a turn of the policy, begun_again after a "
            "failure of environment, program or engine, or failed as the last of the budget. Lost "
            "with a process that others share, which uses no attempt: disturbed, or alone, where "
            "it may be the cause and begins again in a process of its own.",
            ["role", "outcome"],
            registry=registry,
        )
        self._forks = Counter(
            "relax_session_forks_total",
            "Calls of programs that did not continue the last turn of their conversation.",
            ["role"],
            registry=registry,
        )
        self._malformed = Counter(
            "relax_malformed_tool_calls_total",
            "Tool calls of the policy that could not be read in the format of its model family: "
            "their programs received them as text.",
            ["role", "reason"],
            registry=registry,
        )
        for outcome in ("finished", "late", "begun_again", "failed", "disturbed", "alone"):
            self._attempts.labels(role, outcome)

    def count_episode(self, outcome: str) -> None:
        """Count an attempt."""
        self._attempts.labels(self._role, outcome).inc()

    def count_malformed_calls(self, reasons: Iterable[str]) -> None:
        """Count tool calls that could not be read, by reason."""
        for reason in reasons:
            self._malformed.labels(self._role, reason).inc()

    def count_forks(self, number: int) -> None:
        """Count the forks of a session."""
        self._forks.labels(self._role).inc(number)


class CriticMetrics:
    """Metrics of the critic's newest step."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._value_loss = Gauge(
            "relax_critic_value_loss",
            "Value loss of the critic's newest step.",
            ["role"],
            registry=registry,
        )
        self._explained = Gauge(
            "relax_critic_explained_variance_ratio",
            "Share of the returns' variance that the critic explained, in its newest step.",
            ["role"],
            registry=registry,
        )
        self._lag = Gauge(
            "relax_critic_version_lag",
            "Policy versions by which the critic is behind the newest.",
            ["role"],
            registry=registry,
        )

    def set(self, *, value_loss: float, explained_variance: float, version_lag: int) -> None:
        """Set the metrics of the newest step, and the critic's lag in policy versions."""
        self._value_loss.labels(self._role).set(value_loss)
        self._explained.labels(self._role).set(explained_variance)
        self._lag.labels(self._role).set(version_lag)


class ConsumerLagMetrics:
    """Consumer lag of a worker, by topic and slot."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._lag = Gauge(
            "relax_consumer_lag_records",
            (
                "Unread records in the partitions assigned to a worker's consumer, by slot "
                "(policy version mod slots)."
            ),
            ["role", "topic", "slot"],
            registry=registry,
        )
        self._lagging: set[tuple[str, str]] = set()

    def set(self, counts: Mapping[tuple[str, int], int], *, shards: int) -> None:
        """Set the number of unread records by topic, without the run's prefix, and slot; revoked
        partitions are removed.
        """
        lag: Tally[tuple[str, str]] = Tally()
        for (topic, partition), count in counts.items():
            lag[topic, str(partition // shards)] += count
        for topic_partition, count in lag.items():
            self._lag.labels(self._role, *topic_partition).set(count)
        for topic_partition in self._lagging - lag.keys():
            self._lag.remove(self._role, *topic_partition)
        self._lagging = set(lag)


class DeliveryMetrics:
    """Failed deliveries to trackers and notification services."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tracker_errors = Counter(
            "relax_tracker_errors_total",
            "Failed writes of metrics to a tracker; they are retried.",
            ["tracker"],
            registry=registry,
        )
        self._notification_errors = Counter(
            "relax_notification_errors_total",
            "Failed notifications of a service; they are retried.",
            ["service"],
            registry=registry,
        )

    def count_tracker_error(self, tracker: str) -> None:
        """Count an error of a tracker of the run file."""
        self._tracker_errors.labels(tracker).inc()

    def count_notification_error(self, service: str) -> None:
        """Count an error of a service that notices go to, by its scheme and host."""
        self._notification_errors.labels(service).inc()


class SpanMetrics:
    """Metrics of delivered and lost spans."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._sent = Counter(
            "relax_spans_sent_total",
            "Spans that the trace collector accepted.",
            ["role"],
            registry=registry,
        )
        self._lost = Counter(
            "relax_spans_dropped_total",
            (
                "Spans that the trace `collector` did not accept in time, or that found the "
                "export `queue` full."
            ),
            ["role", "reason"],
            registry=registry,
        )

    def sent(self, count: int) -> None:
        """Count spans that the collector accepted."""
        self._sent.labels(self._role).inc(count)

    def lost(self, count: int, reason: str) -> None:
        """Count lost spans: the `collector` did not accept them, or the `queue` was full."""
        self._lost.labels(self._role, reason).inc(count)


DELAY_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class WeightMetrics:
    """Metrics of policy versions that move from the trainer to rollout workers."""

    def __init__(self, role: str, registry: CollectorRegistry) -> None:
        self._role = role
        self._loaded = Counter(
            "relax_weights_loaded_total",
            "Policy versions that an engine loaded, by transport.",
            ["role", "transport"],
            registry=registry,
        )
        self._lost = Counter(
            "relax_prompt_groups_without_weights_total",
            (
                "Prompt groups that were ended and reissued because the weights of their policy "
                "version can't be read."
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
            "Bytes of policy versions that were broadcast completely, on both sides.",
            ["role", "transport"],
            registry=registry,
        )
        self._failures = Counter(
            "relax_weights_broadcast_failures_total",
            (
                "Broadcasts of a policy version that were rejected, lost, corrupted or skipped: "
                "the engine reads it from the store."
            ),
            ["role", "reason"],
            registry=registry,
        )
        self._engines = Gauge(
            "relax_weights_broadcast_engines",
            "Engines to which the trainer broadcasts new policy versions.",
            ["role"],
            registry=registry,
        )

    def count_lost_groups(self, count: int) -> None:
        """Count prompt groups of a version whose weights can't be read."""
        self._lost.labels(self._role).inc(count)

    def count_loaded(self, transport: str, *, delay_seconds: float) -> None:
        """Count a policy version that an engine loaded, and its delay since publication."""
        self._loaded.labels(self._role, transport).inc()
        self._delay.labels(self._role).observe(max(0.0, delay_seconds))

    def count_broadcast_bytes(self, num_bytes: int, *, transport: str) -> None:
        """Count the bytes of a policy version that arrived by broadcast."""
        self._moved.labels(self._role, transport).inc(num_bytes)

    def count_broadcast_failure(self, reason: str) -> None:
        """Count a failed broadcast, after which the version is read from the store: `refused`,
        `lost`, `torn` or `skipped`.
        """
        self._failures.labels(self._role, reason).inc()

    def set_broadcast_engines(self, count: int) -> None:
        """Set the number of engines that receive policy versions by broadcast."""
        self._engines.labels(self._role).set(count)
