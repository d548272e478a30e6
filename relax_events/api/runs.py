"""A run as a fold of its log: state, view, status, ledger, samples and their lineage."""

from relax_events.history.ledger import read_ledger
from relax_events.history.lineage.reader import sample_lineage
from relax_events.history.lineage.version import version_lineage
from relax_events.history.live_run import RunFollower
from relax_events.history.runs.listing import RunLister, read_run
from relax_events.history.samples.reader import read_sample_events
from relax_events.history.samples.view import SampleView
from relax_events.projections.base import apply_events
from relax_events.projections.ledger import Ledger
from relax_events.projections.run_state import RunState
from relax_events.projections.run_status import RunStatus, decide_status
from relax_events.projections.run_view import RunView

__all__ = [
    "Ledger",
    "RunFollower",
    "RunLister",
    "RunState",
    "RunStatus",
    "RunView",
    "SampleView",
    "apply_events",
    "decide_status",
    "read_ledger",
    "read_run",
    "read_sample_events",
    "sample_lineage",
    "version_lineage",
]
