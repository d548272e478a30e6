"""The page's server gives way to its run: its threads' priority, and its session's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, threading
from pathlib import Path
from relax_events.packages.dashboard.server import give_way

release = threading.Event()
before = threading.Thread(target=release.wait)
before.start()
give_way(7)
after = threading.Thread(target=release.wait)
after.start()
threads = [int(one.name) for one in Path("/proc/self/task").iterdir()]
print(*(os.getpriority(os.PRIO_PROCESS, one) for one in threads))
release.set()
group = Path("/proc/self/autogroup")
print(group.read_text() if group.exists() else "")
"""


def run_program(*, leads_session: bool) -> tuple[set[str], str]:
    """Return the priorities of a process's threads once it gave way, and what its session has."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        start_new_session=leads_session,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    priorities, group = done.stdout.splitlines()[:2]
    return set(priorities.split()), group


def test_all_threads_and_a_session_of_its_own_have_a_low_priority() -> None:
    priorities, group = run_program(leads_session=True)
    assert len(priorities) == 1
    (priority,) = priorities
    assert 7 <= int(priority) <= 19
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel does not group processes by session")
    assert group.endswith(f"nice {priority}")


def test_others_of_a_shared_session_keep_their_share() -> None:
    priorities, group = run_program(leads_session=False)
    assert len(priorities) == 1
    own = Path("/proc/self/autogroup")
    assert group == (own.read_text().strip() if own.exists() else "")
