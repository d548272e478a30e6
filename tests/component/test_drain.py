"""A worker drains once, within a deadline."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from relax_events.runtime.drain import Drain


def test_drain_starts_once_and_notifies_its_listeners() -> None:
    drain, reported = Drain(seconds=0.0), []
    drain.on_start(lambda: reported.append("early"))
    assert not drain.requested
    assert not drain.deadline_passed
    assert not drain.wait(0.01)
    drain.start()
    drain.start()
    drain.on_start(lambda: reported.append("late"))
    assert reported == ["early", "late"]
    assert drain.requested
    assert drain.wait(10)


def test_drain_is_overdue_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("relax_events.runtime.drain.time.monotonic", lambda: now[0])
    drain = Drain(seconds=20)
    drain.start()
    now[0] = 120.0
    assert not drain.deadline_passed
    now[0] = 120.1
    assert drain.deadline_passed


def test_drain_wakes_another_thread() -> None:
    drain = Drain(seconds=1)
    waiter = threading.Thread(target=drain.wait, args=(300,), daemon=True)
    waiter.start()
    drain.start()
    waiter.join(60)
    assert not waiter.is_alive()


DRAINING = """
import signal, sys
from relax_events.runtime.drain import Drain
drain = Drain(seconds=30)
drain.listen_to_signals()
drain.exit_note = "the broker keeps running"
print("ready", flush=True)
while not drain.wait(1.0):
    pass
print("draining", flush=True)
if sys.argv[1] == "hang":
    while True:
        signal.pause()
"""


@pytest.mark.parametrize(
    ("manner", "number"),
    [("end", signal.SIGTERM), ("end", signal.SIGINT), ("hang", signal.SIGTERM)],
)
def test_first_signal_drains_and_second_one_ends_at_once(manner: str, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", DRAINING, manner],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "draining\n"
        if manner == "hang":
            process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == (128 + number if manner == "hang" else 0)
        assert errors == ("\nthe broker keeps running\n" if manner == "hang" else "")
    finally:
        process.kill()
        process.communicate(timeout=10)
