"""A worker that dies at every start aborts its run with its error: on the console, on the log, and
in the next `relax run`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import FaultRun

from relax_events.history.runs.listing import read_run

ALWAYS_DIES = """
from relax_events.training.backend.torch_backend import TorchBackend


class NoRoom(TorchBackend):
    def accumulate(self, *arguments, **settings):
        raise MemoryError("no room for 7.42 GiB")
"""


@pytest.mark.long
def test_run_ends_with_the_error_of_a_worker_that_crashes_at_every_start(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    (tmp_path / "no_room.py").write_text(ALWAYS_DIES)
    run = start_run(
        run={"num_steps": 5},
        trainer={"backend": f"{tmp_path / 'no_room.py'}:NoRoom"},
        workers={"max_restarts": 2},
    )
    assert run.wait_until_ended(run.start()) == 1
    shown = run.output.read_text()
    assert (
        shown.count("trainer-0 died: MemoryError: no room for 7.42 GiB; it is restarted; log: ")
        == 2
    )
    reason = (
        "trainer-0 died 3 times in a row without a committed step: MemoryError: no room for 7.42 "
        "GiB; log: "
    )
    assert f"error: {reason}" in shown
    run.wait_until_gone(run.worker_processes())
    run.follow_for(1.0)
    assert run.state.ended is not None
    assert run.state.ended.reason.startswith(reason)
    report = run.report()
    assert (report["succeeded"], report["steps"], report["ledger_problems"]) == (False, 0, [])
    assert report["reason"].startswith(reason)
    listed = read_run(run.connection, run.config.run.id)
    assert (listed.status, listed.possible_writers) == ("ended", []), (
        "the run can be deleted at once"
    )
    (run.config.run_directory / "report.json").unlink()
    assert run.wait_until_ended(run.start("report", run.run_file)) == 0
    assert (
        f"run {run.config.run.id} did not reach its goal at step 0 of 5: {reason}"
        in run.output.read_text()
    )
    assert run.report()["reason"] == report["reason"]
