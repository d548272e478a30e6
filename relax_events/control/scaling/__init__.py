"""Workers that come and go while the run goes on. A state machine whose state is the control log (ADR 16)."""

from relax_events.control.scaling.admission import Asked, Conflicting, Plan, Refused, Unknown, plan
from relax_events.control.scaling.bounds import Bounds
from relax_events.control.scaling.decisions import decide
from relax_events.control.scaling.requests import Kind, ScaleRequest, Status
from relax_events.control.scaling.state import Departure, ElasticWorker, ScaleState, Standing

__all__ = [
    "Asked",
    "Bounds",
    "Conflicting",
    "Departure",
    "ElasticWorker",
    "Kind",
    "Plan",
    "Refused",
    "ScaleRequest",
    "ScaleState",
    "Standing",
    "Status",
    "Unknown",
    "decide",
    "plan",
]
