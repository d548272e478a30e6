"""Where a run's figures go besides its folder: one protocol, a file for each tracker, and a thread
that keeps each away from the worker.
"""

from relax_events.telemetry.trackers.dispatch import feed_tracker, open_feeds, require_trackers
from relax_events.telemetry.trackers.progress import Memory
from relax_events.telemetry.trackers.protocol import Figures, Tracker

__all__ = ["Figures", "Memory", "Tracker", "feed_tracker", "open_feeds", "require_trackers"]
