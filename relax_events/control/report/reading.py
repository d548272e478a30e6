"""Reads what a report tells of a whole run: a run that goes on keeps only the newest of it in memory."""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.control.run_log import RunLog
from relax_events.control.run_state import RunState
from relax_events.events.types import MetricsReported, PolicyEvaluated, RunCommanded, RunDescribed, TrainStepCommitted
from relax_events.topics.plan import METRICS


def read_state(config: RunConfig) -> RunState:
    """Return every step of a run, without its samples, every evaluation, its run files, how it ended, and what is left of the critic's figures.

    Raises:
        BrokerUnavailable: The log could not be read.
    """
    state = RunState(keeps_all=True)
    with RunLog(config, name="report") as log:
        for version in sorted(log.versions):
            state.note(log.versions[version].event)
        for step in log.control("control.train-steps", TrainStepCommitted):
            state.note(step.event)
        for evaluation in log.control("control.evaluations", PolicyEvaluated):
            state.note(evaluation.event)
        for entity in filter(log.plan.has, METRICS.values()):
            for report in log.control(entity, MetricsReported):
                state.note(report.event)
        for kind in (RunDescribed, RunCommanded):
            for told in log.control("control.commands", kind):
                state.note(told.event)
    return state
