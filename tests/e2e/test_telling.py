"""What a run tells while it goes on: to people, and to TensorBoard."""

from __future__ import annotations

import pytest
from command_line import FinishedRun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.timeout(300)


def test_run_tells_of_its_begin_and_of_its_end(finished_run: FinishedRun) -> None:
    run_id = finished_run.config.run.id
    told = (finished_run.run_file.parent / "told").read_text().splitlines()
    assert told == [f"Run {run_id} began", f"Run {run_id} has reached its goal"]


def test_run_is_in_tensorboard_without_being_asked(finished_run: FinishedRun) -> None:
    shown = EventAccumulator(str(finished_run.config.run_directory / "tensorboard")).Reload()
    assert [point.step for point in shown.Scalars("train/reward_mean")] == [0, 1, 2]
