"""The TensorBoard tracker: event files in the run's folder, written without torch."""

from __future__ import annotations

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from relax_events.config import RunConfig
from relax_events.telemetry.trackers.protocol import MICROS, DeliveryProgress, StepMetrics


class TensorBoardTracker:
    """Writes event files into `<run>/tensorboard`, one for each process of the metrics role;
    TensorBoard reads them all.
    """

    remembers = True

    def __init__(self, config: RunConfig, memory: DeliveryProgress) -> None:
        """Create an event file."""
        del memory
        self._writer = EventFileWriter(str(config.run_directory / "tensorboard"))

    def write(self, step_metrics: StepMetrics) -> None:
        """Write a scalar for each metric, as `series/name`."""
        values = [
            Summary.Value(tag=f"{step_metrics.series}/{name}", simple_value=value)
            for name, value in step_metrics.values.items()
        ]
        self._writer.add_event(
            Event(
                wall_time=step_metrics.at / MICROS,
                step=step_metrics.step,
                summary=Summary(value=values),
            )
        )

    def close(self) -> None:
        """Flush the file."""
        self._writer.close()
