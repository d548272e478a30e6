"""What an experiment tracker of your own implements, and what it is given."""

from relax_events.config import RunConfig
from relax_events.telemetry.trackers.protocol import DeliveryProgress, StepMetrics, Tracker

__all__ = ["DeliveryProgress", "RunConfig", "StepMetrics", "Tracker"]
