"""Experiment trackers, to which a run's metrics are sent: one protocol, a module per tracker, and a
thread per tracker.
"""

from relax_events.telemetry.trackers.dispatch import (
    open_tracker_queue,
    open_tracker_queues,
    require_trackers,
)
from relax_events.telemetry.trackers.protocol import DeliveryProgress, StepMetrics, Tracker

__all__ = [
    "DeliveryProgress",
    "StepMetrics",
    "Tracker",
    "open_tracker_queue",
    "open_tracker_queues",
    "require_trackers",
]
