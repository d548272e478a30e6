"""The trackio tracker, configured by TRACKIO_DIR; TRACKIO_SERVER_URL or TRACKIO_SPACE_ID name a
server.
"""

from __future__ import annotations

import trackio

from relax_events.config import RunConfig
from relax_events.telemetry.trackers.protocol import DeliveryProgress, StepMetrics


class TrackioTracker:
    """Resumes the trackio run with our run's id, in the project of the run file. Without a server
    the metrics go to a SQLite file of this machine; `trackio show` displays them.
    """

    remembers = True

    def __init__(self, config: RunConfig, memory: DeliveryProgress) -> None:
        """Open the run without automatic logging of this machine."""
        del memory
        self._run = trackio.init(
            project=config.telemetry.tracker_project,
            name=config.run.id,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step_metrics: StepMetrics) -> None:
        """Log the metrics as `series/name`, at their step."""
        named = {
            f"{step_metrics.series}/{name}": value for name, value in step_metrics.values.items()
        }
        self._run.log(named, step=step_metrics.step)

    def close(self) -> None:
        """Send pending metrics and finish the run."""
        self._run.finish()
