"""The object store's disk fills up: the trainer reports it and waits for space; where a file size
limit is hit, it is restarted until it can write. Where the logs lie on it, their lines are lost and
nothing else.
"""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import WORKER_SECONDS, FaultRun, assert_ledger_balances

BLOCK_BYTES = 4096
NO_SPACE, TOO_LARGE = "No space left on device", "File too large"


class SmallDisk:
    """A file system of a few megabytes, or, where this process may not mount one, a limit on the
    size of the trainer's files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder],
            capture_output=True,
            check=False,
        )
        self.is_mounted = mounted.returncode == 0

    @property
    def complaint(self) -> str:
        """The operating system's error when it is full."""
        return NO_SPACE if self.is_mounted else TOO_LARGE

    def fill(self, run: FaultRun) -> None:
        """Leave no room for the next weights."""
        if self.is_mounted:
            subprocess.run(
                ["dd", "if=/dev/zero", f"of={self._filler}", "bs=4096"],
                check=False,
                capture_output=True,
            )
        else:
            largest = max(
                path.stat().st_size for path in self.folder.glob("*/weights/*/*.safetensors")
            )
            resource.prlimit(
                run.pid("trainer-0"), resource.RLIMIT_FSIZE, (largest - 1, resource.RLIM_INFINITY)
            )

    def free(self) -> None:
        """Make room again; the trainer's limit went with its process."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Take the file system away."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", self.folder], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Yield an empty disk for the object store."""
    folder = tmp_path / "disk"
    folder.mkdir()
    opened = SmallDisk(folder)
    yield opened
    opened.close()


@pytest.mark.long
def test_trainer_reports_a_full_disk_and_continues_once_space_is_free(
    start_run: Callable[..., FaultRun], disk: SmallDisk
) -> None:
    run = start_run(run={"num_steps": 16}, objects={"uri": disk.folder.as_uri()})
    run.start()
    run.wait_until_steps(4)
    disk.fill(run)
    if disk.is_mounted:
        run.wait_until(
            lambda: bool(run.logged("trainer-0", "objects.unavailable")), "the trainer waits"
        )
        complaint = run.logged("trainer-0", "objects.unavailable")[0]["error"]
    else:
        run.wait_until(lambda: bool(run.logged("run", "worker.died")), "the trainer gives up")
        log = (run.folder / "logs" / "trainer-0.log").read_text()
        (complaint,) = {line for line in log.splitlines() if line.startswith("error: ")}
        assert "Traceback" not in log
    disk.free()
    run.recovers_within(WORKER_SECONDS)
    assert disk.complaint in complaint
    assert str(disk.folder) in complaint, "it names the folder that is full"

    assert run.wait_until_ended(run.process) == 0
    assert assert_ledger_balances(run)["rollouts_regenerated"] == 0
    died = {line["worker_id"] for line in run.logged("run", "worker.died")}
    assert died == (set() if disk.is_mounted else {"trainer-0"}), (
        "a full disk is the trainer's trouble alone, and is waited for"
    )


@pytest.mark.long
def test_run_whose_logs_are_on_a_full_disk_ends_no_process_and_counts_the_lost_lines(
    start_run: Callable[..., FaultRun], disk: SmallDisk
) -> None:
    if not disk.is_mounted:
        pytest.skip("a disk of its own needs the right to mount one")
    run = start_run(run={"num_steps": 12})
    (run.folder / "logs").symlink_to(disk.folder)
    run.start()
    run.wait_until_steps(2)
    disk.fill(run)
    for path in disk.folder.glob("*.log"):  # the last block of each has room for some lines
        with path.open("ab") as file:
            file.write(b"\n" * (-path.stat().st_size % BLOCK_BYTES))
    run.wait_until_ready_again("reward-0", killed=run.kill("reward-0"))
    disk.free()
    assert run.wait_until_ended(run.process) == 0
    assert {line["worker_id"] for line in run.logged("run", "worker.died")} <= {"reward-0"}
    texts = {path.name: path.read_text() for path in [run.output, *disk.folder.glob("*.log")]}
    assert "num_lines_lost" in texts["reward-0.log"]
    assert [name for name, text in texts.items() if "Traceback" in text] == []
