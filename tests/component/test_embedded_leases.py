"""Leases on a broker: files whose locks the system keeps."""

import subprocess
import sys
from pathlib import Path

from relax_events.kafka.embedded.directory import UserLock, list_users

HOLDER = """
import pathlib, sys
from relax_events.kafka.embedded.directory import UserLock
lock = UserLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_no_lease_is_held_when_the_broker_was_never_used(tmp_path: Path) -> None:
    assert list_users(tmp_path / "node") == []


def test_each_lease_counts_until_it_is_released(tmp_path: Path) -> None:
    first, second = UserLock(tmp_path), UserLock(tmp_path)
    assert len(list_users(tmp_path)) == 2
    first.release()
    first.release()
    assert len(list_users(tmp_path)) == 1
    second.release()
    assert list_users(tmp_path) == []
    assert list((tmp_path / "leases").iterdir()) == []


def test_lease_is_free_when_its_holder_was_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        assert holder.stdout.readline() == b"held\n"
        assert list_users(tmp_path) == [holder.pid]
        holder.kill()
        holder.wait(10)
    assert list_users(tmp_path) == []
    own = UserLock(tmp_path)
    assert len(list((tmp_path / "leases").iterdir())) == 1, (
        "the file of the one who was killed is gone"
    )
    own.release()


def test_a_program_that_a_holder_starts_does_not_hold_its_lease(tmp_path: Path) -> None:
    lease = UserLock(tmp_path)
    child = subprocess.Popen(["sleep", "60"])
    try:
        lease.release()
        assert list_users(tmp_path) == []
    finally:
        child.kill()
        child.wait(10)
