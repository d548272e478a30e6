"""A run as a fold of its log: state, view, status, ledger, samples and their lineage."""

from relax_events.config import RunConfig, load_run_config
from relax_events.history.ledger import read_ledger
from relax_events.history.lineage.reader import sample_lineage
from relax_events.history.lineage.version import version_lineage
from relax_events.history.live_run import RunFollower
from relax_events.history.runs.listing import RunLister, read_run
from relax_events.history.samples.detail import token_rows
from relax_events.history.samples.reader import read_sample_events
from relax_events.history.samples.view import SampleView
from relax_events.projections.alarms import find_alarms
from relax_events.projections.base import apply_events
from relax_events.projections.health import HealthState
from relax_events.projections.ledger import Ledger
from relax_events.projections.run_state import RUN_STATE_TOPICS, RunState
from relax_events.projections.run_status import (
    RunStatus,
    compute_silence_limit,
    decide_status,
    find_live_workers,
)
from relax_events.projections.run_view import RunView, WorkerTable, read_alarm_settings
from relax_events.projections.step_rates import StepCurves, compute_rates
from relax_events.session.resume import settings_history

__all__ = [
    "RUN_STATE_TOPICS",
    "HealthState",
    "Ledger",
    "RunConfig",
    "RunFollower",
    "RunLister",
    "RunState",
    "RunStatus",
    "RunView",
    "SampleView",
    "StepCurves",
    "WorkerTable",
    "apply_events",
    "compute_rates",
    "compute_silence_limit",
    "decide_status",
    "find_alarms",
    "find_live_workers",
    "load_run_config",
    "read_alarm_settings",
    "read_ledger",
    "read_run",
    "read_sample_events",
    "sample_lineage",
    "settings_history",
    "token_rows",
    "version_lineage",
]
