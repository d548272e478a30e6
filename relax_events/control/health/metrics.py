"""The health manager's figures, for Prometheus: read off its state when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relax_events.config import RunConfig
from relax_events.control.health.decisions import Limits, symptoms
from relax_events.control.health.state import HealthState, Symptom, Tier
from relax_events.events.parts import now_micros

OF_WORKERS = (Symptom.SILENT, Symptom.OVERDUE, Symptom.STUCK, Symptom.SLOW_START)


class HealthMetrics(Collector):
    """Labels are bounded by the roles of the run file and by the symptoms; what was done is counted since the run was last taken up."""

    def __init__(self, state: HealthState, config: RunConfig) -> None:
        self._state, self._limits, self._roles = state, Limits.of(config), list(config.roles())

    def collect(self) -> Iterator[Metric]:
        """Give every metric family."""
        acts = list(self._state.acts)
        restarted = Counter((act.role, act.symptom) for act in acts if act.tier is Tier.RESTART)
        found = symptoms(self._state, self._limits, now=now_micros())
        troubled = Counter((self._state.heard[worker_id].beat.role, symptom) for worker_id, symptom in found.items())
        labels = ["role", "symptom"]
        restarts = CounterMetricFamily("relax_health_restarts", "Workers that the health manager had start again, by what was wrong.", labels=labels)
        sick = GaugeMetricFamily("relax_health_troubled_workers", "Workers with which something is wrong now.", labels=labels)
        for role in sorted({*self._roles, *(role for role, _ in (*restarted, *troubled))}):
            for symptom in OF_WORKERS:
                restarts.add_metric([role, symptom], restarted[role, symptom])
                sick.add_metric([role, symptom], troubled[role, symptom])
        starts = CounterMetricFamily("relax_worker_starts", "Workers that were started, by whoever, while the controller was there.", labels=["role"])
        for role in sorted({*self._roles, *self._state.starts}):
            starts.add_metric([role], self._state.starts[role])
        yield from (restarts, sick, starts)
        num_restores = len({act.at for act in acts if act.tier is Tier.RESTORE})
        yield CounterMetricFamily("relax_health_restores", "Times that all workers of the pipeline were made to begin anew.", value=num_restores)
        yield GaugeMetricFamily("relax_health_given_up", "1 when the health manager has ended the run, else 0.", value=int(self._state.is_given_up))
