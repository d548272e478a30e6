"""The run as a whole, for Prometheus: what no worker knows of itself, read off the control log when it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relax_events.config import RunConfig
from relax_events.control.run_state import RunState
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import TrainStepCommitted, WorkerBeat

SILENT = "silent"
GONE = (SILENT, WorkerState.STOPPED.value)
LIVE = tuple(state.value for state in WorkerState if state is not WorkerState.STOPPED)
MICROS = 1e6


class RunMetrics(Collector):
    """Register it with the metrics of the worker that keeps the state up to date; it may be asked from another thread.

    What is not known yet has no sample. Labels are bounded by the run file: roles, phases, the algorithm's figures, datasets.
    """

    def __init__(self, config: RunConfig, state: RunState) -> None:
        self._config, self._state = config, state

    def collect(self) -> Iterator[Metric]:
        """Give every metric family, from what the state holds now."""
        config, state = self._config, self._state
        yield counted("relax_train_steps", "Train steps that were committed, in all of the run.", state.num_steps)
        yield gauge("relax_train_steps_goal", "Train steps at which the run has reached its goal.", config.num_train_steps)
        yield gauge("relax_run_ended", "1 when the run has reached its goal or was given up, else 0.", int(state.ended is not None))
        yield gauge("relax_published_policy_version", "The newest policy version; it is that of the starting weights at first.", state.policy_version)
        yield gauge("relax_staleness_bound_versions", "Policy versions that a sample may be behind when it is trained.", config.run.max_staleness)
        failed = "Prompt groups that failed one after the other, since one was trained last."
        yield gauge("relax_prompt_groups_failed_in_a_row", failed, state.failed_in_a_row)
        yield gauge("relax_prompt_groups_failed_bound", "So many failures in a row end the run.", config.run.max_failed_groups)
        yield gauge("relax_checkpoint_every_steps", "Train steps between checkpoints.", config.trainer.checkpoint_every)
        behind = next((behind for behind, step in enumerate(reversed(state.steps)) if step.checkpoint is not None), state.num_steps)
        yield gauge("relax_checkpoint_behind_steps", "Train steps since the newest checkpoint, which recovery would replay.", behind)
        yield from self._newest_step(state.steps[-1:])
        yield from self._workers(list(state.workers.values()))
        yield from self._evaluations()

    def _newest_step(self, steps: Iterable[TrainStepCommitted]) -> Iterator[Metric]:
        committed = GaugeMetricFamily("relax_train_step_timestamp_seconds", "When the newest train step was committed.")
        figures = GaugeMetricFamily("relax_train_step_figure", "Figures of the newest train step, by name.", labels=["figure"])
        phases = GaugeMetricFamily("relax_train_step_phase_seconds", "Time that the newest train step took, by phase.", labels=["phase"])
        staleness = GaugeMetricFamily("relax_staleness_max_versions", "Policy versions that the oldest sample of the newest train step was behind.")
        for step in steps:
            committed.add_metric([], step.committed_at / MICROS)
            staleness.add_metric([], max((age for age, count in enumerate(step.staleness_counts) if count), default=0))
            for name, value in step.figures.items():
                figures.add_metric([name], value)
            for name, value in step.phase_seconds.items():
                phases.add_metric([name], value)
        yield from (committed, staleness, figures, phases)

    def _workers(self, beats: Iterable[WorkerBeat]) -> Iterator[Metric]:
        """Count workers by what they said last; one that said nothing for `workers.hung_seconds` is silent, unless it had stopped."""
        limit = now_micros() - int(self._config.workers.hung_seconds * MICROS)
        standings = [(beat, standing_of(beat, limit=limit)) for beat in beats]
        counts = Counter((beat.role, standing) for beat, standing in standings)
        family = GaugeMetricFamily("relax_workers", "Workers by role and by what they said last.", labels=["role", "state"])
        for role in sorted({*self._config.roles(), *(role for role, _ in counts)}):
            for state in (*LIVE, *GONE):
                family.add_metric([role, state], counts[role, state])
        served = [beat.policy_version for beat, standing in standings if beat.role == "rollout" and standing in LIVE and beat.policy_version >= 0]
        behind = GaugeMetricFamily("relax_engine_behind_versions", "Policy versions that the slowest live engine is behind the newest.")
        if served:
            behind.add_metric([], self._state.policy_version - min(served))
        yield from (family, behind)

    def _evaluations(self) -> Iterator[Metric]:
        """Give the newest evaluation of each dataset."""
        newest = {event.dataset: event for event in sorted(dict(self._state.evaluations).values(), key=lambda event: event.policy_version)}
        version = GaugeMetricFamily("relax_evaluation_policy_version", "Policy version that was evaluated last.", labels=["dataset"])
        reward = GaugeMetricFamily("relax_evaluation_reward_mean", "Mean reward of the newest evaluation.", labels=["dataset"])
        for dataset, event in newest.items():
            version.add_metric([dataset], event.policy_version)
            if event.reward_mean is not None:
                reward.add_metric([dataset], event.reward_mean)
        yield from (version, reward)


def standing_of(beat: WorkerBeat, *, limit: int) -> str:
    """Return a worker's state, or that it has been silent since before `limit`, microseconds since the epoch."""
    return SILENT if beat.beat_at < limit and beat.state is not WorkerState.STOPPED else beat.state.value


def gauge(name: str, text: str, value: float) -> Metric:
    """Make a family of one sample."""
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def counted(name: str, text: str, value: float) -> Metric:
    """Make a counter of one sample; its name gets `_total` when it is served."""
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family
