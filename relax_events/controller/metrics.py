"""Prometheus metrics of the health manager, of scaling and of the run as a whole, read from the
projections on each scrape.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relax_events.config import RunConfig
from relax_events.controller.health import HealthLimits, find_symptoms
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import TrainStepCommitted, WorkerHeartbeat
from relax_events.projections.health import HealthState, RecoveryLevel, Symptom
from relax_events.projections.run_state import (
    RunState,
    count_sample_records,
    is_silent,
    max_sample_staleness,
)
from relax_events.projections.scale_requests import ENDS, Kind, Status
from relax_events.projections.scaling import ScaleState

OF_WORKERS = (Symptom.SILENT, Symptom.OVERDUE, Symptom.STUCK, Symptom.SLOW_START)


class HealthMetrics(Collector):
    """Metrics of the health manager. Labels are bounded by the roles of the run file and by the
    symptoms; interventions are counted since the run was last resumed.
    """

    def __init__(self, state: HealthState, config: RunConfig) -> None:
        self._state, self._limits, self._roles = (
            state,
            HealthLimits.from_config(config),
            list(config.roles()),
        )

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        acts = list(self._state.interventions)
        restarted = Counter(
            (act.role, act.symptom) for act in acts if act.level is RecoveryLevel.WORKER_RESTART
        )
        symptoms = find_symptoms(self._state, self._limits, now=now_micros())
        symptom_counts = Counter(
            (self._state.last_heartbeats[worker_id].heartbeat.role, symptom)
            for worker_id, symptom in symptoms.items()
        )
        labels = ["role", "symptom"]
        restarts = CounterMetricFamily(
            "relax_health_restarts",
            "Workers that the health manager restarted, by symptom.",
            labels=labels,
        )
        unhealthy = GaugeMetricFamily(
            "relax_health_unhealthy_workers",
            "Workers that are unhealthy now, by symptom.",
            labels=labels,
        )
        for role in sorted({*self._roles, *(role for role, _ in (*restarted, *symptom_counts))}):
            for symptom in OF_WORKERS:
                restarts.add_metric([role, symptom], restarted[role, symptom])
                unhealthy.add_metric([role, symptom], symptom_counts[role, symptom])
        starts = CounterMetricFamily(
            "relax_worker_starts",
            "Worker starts since the controller started, of any cause.",
            labels=["role"],
        )
        for role in sorted({*self._roles, *self._state.num_starts}):
            starts.add_metric([role], self._state.num_starts[role])
        yield from (restarts, unhealthy, starts)
        num_restores = len({act.at for act in acts if act.level is RecoveryLevel.PIPELINE_RESTART})
        yield CounterMetricFamily(
            "relax_pipeline_restarts",
            "Restarts of all workers of the pipeline.",
            value=num_restores,
        )
        yield GaugeMetricFamily(
            "relax_run_aborted",
            "1 when the health manager has ended the run, else 0.",
            value=int(self._state.is_aborted),
        )


class ScaleMetrics(Collector):
    """Metrics of scaling. Labels are bounded by the roles of the run file and by the statuses of a
    request; another thread may scrape it.
    """

    def __init__(self, state: ScaleState, bounds: ScalingBounds) -> None:
        self._state, self._bounds = state, bounds

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        now = now_micros()
        ended = self._state.count_ended(now=now)
        open_now = Counter(
            (request.role, request.kind, self._state.status(request, now=now))
            for request in list(self._state.requests.values())
            if request.is_open(now=now)
        )
        labels = ["role", "direction", "status"]
        pending = GaugeMetricFamily(
            "relax_scale_requests_open",
            "Scaling requests that are not finished.",
            labels=labels,
        )
        over = CounterMetricFamily(
            "relax_scale_requests",
            "Finished scaling requests.",
            labels=labels,
        )
        desired_workers = GaugeMetricFamily(
            "relax_workers_desired",
            "Desired number of workers, including those started with the run.",
            labels=["role"],
        )
        for pool in self._bounds.pools.values():
            for kind, status in product(Kind, Status):
                key = (pool.role, kind, status)
                if status in ENDS[kind]:
                    over.add_metric(key, ended[key])
                elif status not in ENDS[Kind.OUT] | ENDS[Kind.IN]:
                    pending.add_metric(key, open_now[key])
            desired_workers.add_metric([pool.role], pool.num_desired(self._state))
        yield from (pending, over, desired_workers)


SILENT = "silent"
GONE = (SILENT, WorkerState.STOPPED.value)
SERVING = (WorkerState.IDLE.value, WorkerState.WORKING.value)
LIVE = tuple(state.value for state in WorkerState if state is not WorkerState.STOPPED)
MICROS = 1e6


class RunMetrics(Collector):
    """Metrics of the run as a whole. Register it with the metrics of the worker that keeps the
    state up to date; another thread may scrape it.

    An unknown value has no sample. Labels are bounded by the run file: roles, phases, the
    algorithm's metrics, datasets.
    """

    def __init__(self, config: RunConfig, state: RunState) -> None:
        self._config, self._state = config, state
        self.num_queued: int | None = None
        self.partitions: Mapping[str, int] = {}
        """Partitions of the run's topics by what is wrong with them; empty while that is not
        known."""

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, from the current state."""
        yield CounterMetricFamily(
            "relax_train_steps",
            "Committed train steps, in the whole run.",
            value=self._state.num_steps,
        )
        for name, text, value in self._run_gauges():
            yield GaugeMetricFamily(name, text, value=value)
        skipped = self._state.num_updates_skipped
        yield CounterMetricFamily(
            "relax_updates_skipped",
            "Train steps that skipped their update: loss or gradient was not finite.",
            value=skipped,
        )
        yield from self._newest_step(self._state.steps[-1:])
        yield from self._workers(list(self._state.workers.values()))
        yield from self._evaluations()
        yield from self._environment()

    def _run_gauges(self) -> list[tuple[str, str, float]]:
        """Return the metrics that are always known: name, text, value."""
        config, state = self._config, self._state
        return [
            (
                "relax_train_steps_target",
                "Train step at which the run ends.",
                config.num_train_steps,
            ),
            (
                "relax_run_ended",
                "1 when the run has completed or was aborted, else 0.",
                int(state.ended is not None),
            ),
            (
                "relax_run_inactive",
                "1 when the run has ended or is paused, else 0; alerts use it.",
                int(bool(state.ended) or state.is_paused),
            ),
            (
                "relax_published_policy_version",
                "The newest policy version; initially that of the starting weights.",
                state.policy_version,
            ),
            (
                "relax_staleness_bound_versions",
                "Maximum staleness of a trained sample, in policy versions.",
                config.run.max_staleness,
            ),
            (
                "relax_prompt_groups_consecutive_failures",
                "Prompt groups that failed since the last one was trained.",
                state.num_consecutive_failures,
            ),
            (
                "relax_prompt_groups_consecutive_failures_limit",
                "Consecutive failures that end the run.",
                config.run.max_failed_prompt_groups,
            ),
            (
                "relax_checkpoint_interval_steps",
                "Train steps between checkpoints.",
                config.trainer.checkpoint_every,
            ),
            (
                "relax_checkpoint_behind_steps",
                "Train steps since the newest checkpoint, which recovery would replay.",
                _count_steps_since_checkpoint(state),
            ),
        ]

    def _newest_step(self, steps: Iterable[TrainStepCommitted]) -> Iterator[Metric]:
        committed = GaugeMetricFamily(
            "relax_train_step_timestamp_seconds", "When the newest train step was committed."
        )
        step_metrics = GaugeMetricFamily(
            "relax_train_step_metric",
            "Metrics of the newest train step, by name.",
            labels=["metric"],
        )
        phases = GaugeMetricFamily(
            "relax_train_step_phase_seconds",
            "Duration of the phases of the newest train step.",
            labels=["phase"],
        )
        staleness = GaugeMetricFamily(
            "relax_staleness_max_versions",
            "Largest staleness of a sample of the newest train step, in policy versions.",
        )
        records = GaugeMetricFamily(
            "relax_train_step_records",
            "Records of the newest train step's samples; one may hold a whole prompt group.",
        )
        for step in steps:
            committed.add_metric([], step.committed_at / MICROS)
            records.add_metric([], count_sample_records(step))
            staleness.add_metric([], max_sample_staleness(step))
            for name, value in step.metrics.items():
                step_metrics.add_metric([name], value)
            for name, value in step.phase_seconds.items():
                phases.add_metric([name], value)
        yield from (committed, staleness, records, step_metrics, phases)

    def _workers(self, heartbeats: Sequence[WorkerHeartbeat]) -> Iterator[Metric]:
        """Count workers by their last reported state; one whose heartbeat is overdue is silent."""
        heartbeat_timeout_seconds = self._config.workers.heartbeat_timeout_seconds
        newest_at = max(
            (heartbeat.sent_at for heartbeat in heartbeats), default=0
        )  # at the latest our own, which come as often as the others'
        worker_states = [
            (
                heartbeat,
                SILENT
                if is_silent(heartbeat, seconds=heartbeat_timeout_seconds, newest_at=newest_at)
                else heartbeat.state.value,
            )
            for heartbeat in heartbeats
        ]
        counts = Counter(
            (heartbeat.role, worker_state) for heartbeat, worker_state in worker_states
        )
        family = GaugeMetricFamily(
            "relax_workers",
            "Workers by role and by state of their newest heartbeat.",
            labels=["role", "state"],
        )
        for role in sorted({*self._config.roles(), *(role for role, _ in counts)}):
            for state in (*LIVE, *GONE):
                family.add_metric([role, state], counts[role, state])
        first = (
            self._config.first_version
        )  # that of the model's folder: what an engine serves that has not loaded any
        served = [
            max(heartbeat.policy_version, first)
            for heartbeat, worker_state in worker_states
            if heartbeat.role == "rollout" and worker_state in SERVING
        ]
        behind = GaugeMetricFamily(
            "relax_engine_behind_versions",
            "Policy versions by which the slowest live engine is behind the newest.",
        )
        if served and self._state.policy_version >= 0:
            behind.add_metric([], self._state.policy_version - min(served))
        yield from (family, behind)

    def _evaluations(self) -> Iterator[Metric]:
        """Yield the newest evaluation of each dataset."""
        newest = {
            event.dataset: event
            for event in sorted(
                dict(self._state.evaluations).values(), key=lambda event: event.policy_version
            )
        }
        version = GaugeMetricFamily(
            "relax_evaluation_policy_version",
            "Newest policy version that was evaluated.",
            labels=["dataset"],
        )
        reward = GaugeMetricFamily(
            "relax_evaluation_reward_mean",
            "Mean reward of the newest evaluation.",
            labels=["dataset"],
        )
        for dataset, event in newest.items():
            version.add_metric([dataset], event.policy_version)
            if event.reward_mean is not None:
                reward.add_metric([dataset], event.reward_mean)
        yield from (version, reward)

    def _environment(self) -> Iterator[Metric]:
        """Yield metrics of the run's environment: the queue as last reported, the disk, and the
        partitions.
        """
        queued = GaugeMetricFamily(
            "relax_prompt_groups_queued",
            "Unfinished prompt groups on the queue, including those in flight.",
        )
        if self.num_queued is not None:
            queued.add_metric([], self.num_queued)
        free = GaugeMetricFamily(
            "relax_disk_free_ratio",
            "Free share of the disk that holds the run's directory, on the controller's machine.",
        )
        if self._config.run.directory.exists():
            usage = shutil.disk_usage(self._config.run.directory)
            free.add_metric([], usage.free / usage.total)
        partitions = GaugeMetricFamily(
            "relax_partitions",
            "Unhealthy partitions of the run's topics, by problem.",
            labels=["state"],
        )
        for state, count in self.partitions.items():
            partitions.add_metric([state], count)
        yield from (queued, free, partitions)


def _count_steps_since_checkpoint(state: RunState) -> int:
    """Return how many train steps were committed since the newest checkpoint."""
    for behind, step in enumerate(reversed(state.steps)):
        if step.checkpoint is not None:
            return behind
    return state.num_steps
