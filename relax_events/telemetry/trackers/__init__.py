"""Where a run's figures go besides its folder: one protocol, a file for each tracker, and a thread
that keeps each away from the worker.
"""

from relax_events.telemetry.trackers.dispatch import open_tracker_queue, open_tracker_queues, require_trackers
from relax_events.telemetry.trackers.progress import DeliveryProgress
from relax_events.telemetry.trackers.protocol import StepMetrics, Tracker

__all__ = ["StepMetrics", "DeliveryProgress", "Tracker", "open_tracker_queue", "open_tracker_queues", "require_trackers"]
