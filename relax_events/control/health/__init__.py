"""The health manager: what is wrong with whom, and what is done about it. A state machine whose state is the control log (ADR 13)."""

from relax_events.control.health.decisions import Limits, decide, symptoms
from relax_events.control.health.metrics import HealthMetrics
from relax_events.control.health.state import HealthState, Symptom, Tier

__all__ = ["HealthMetrics", "HealthState", "Limits", "Symptom", "Tier", "decide", "symptoms"]
