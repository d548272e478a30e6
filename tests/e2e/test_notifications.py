"""Output of a run while it runs: notifications, and metrics in TensorBoard."""

from __future__ import annotations

import stat

import pytest
from command_line import FinishedRun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.timeout(300)


def test_run_notifies_of_its_start_and_end(finished_run: FinishedRun) -> None:
    run_id = finished_run.config.run.id
    reported = (finished_run.run_file.parent / "notifications").read_text().splitlines()
    assert reported == [f"Run {run_id} began", f"Run {run_id} has reached its goal"]


def test_run_is_in_tensorboard_by_default(finished_run: FinishedRun) -> None:
    shown = EventAccumulator(str(finished_run.config.run_directory / "tensorboard")).Reload()
    assert [point.step for point in shown.Scalars("train/reward_mean")] == [0, 1, 2]


def test_all_files_of_a_run_are_accessible_only_to_its_user(finished_run: FinishedRun) -> None:
    """The commands that made it began with a file mode mask of 022."""
    folder = finished_run.config.run_directory
    modes = {
        path.relative_to(folder): stat.S_IMODE(path.lstat().st_mode)
        for path in folder.rglob("*")
        if not path.is_symlink()
    }
    assert len(modes) > 20
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
