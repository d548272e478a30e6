"""TensorBoard: event files in the run's folder, written without torch."""

from __future__ import annotations

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from relax_events.config import RunConfig
from relax_events.telemetry.trackers.memory import Memory
from relax_events.telemetry.trackers.protocol import MICROS, Figures


class TensorBoardTracker:
    """Writes `<run>/tensorboard` anew from the log at each start, since what lies in event files can't be added to."""

    remembers = False

    def __init__(self, config: RunConfig, memory: Memory) -> None:
        """Take away what an earlier process wrote, and begin a file."""
        del memory
        folder = config.run_directory / "tensorboard"
        for former in folder.glob("events.out.tfevents.*"):
            former.unlink()
        self._writer = EventFileWriter(str(folder))

    def write(self, figures: Figures) -> None:
        """Write a scalar for each figure, as `series/name`."""
        values = [Summary.Value(tag=f"{figures.series}/{name}", simple_value=value) for name, value in figures.values.items()]
        self._writer.add_event(Event(wall_time=figures.at / MICROS, step=figures.step, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush the file."""
        self._writer.close()
