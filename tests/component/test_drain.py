"""A worker drains once, within a deadline."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from engine_requests import make_engine
from instants import interrupt_everywhere

from relax_events.engines.protocol import Engine
from relax_events.episodes.call_engine import CallEngine
from relax_events.runtime.device_turn import DeviceTurn
from relax_events.runtime.drain import Drain
from relax_events.training.shared_device import wait_for_turn


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


def test_signal_at_any_instant_of_a_wait_starts_the_drain() -> None:
    drains: list[Drain] = []

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        drain = Drain(seconds=30)
        drains.append(drain)
        return lambda: drain.wait(0.001), lambda: drain._on_signal(signal.SIGTERM, None)

    assert interrupt_everywhere(prepare) > 5
    assert all(drain.requested and drain.wait(60) for drain in drains[:-1])


class LateTurn(DeviceTurn):
    """A turn that begins as soon as it has not begun at once."""

    def __init__(self) -> None:
        """Need no lock."""

    def ask(self, on_begin: Callable[[], None] = lambda: None) -> bool:
        """Ask."""
        on_begin()
        return False

    @property
    def has_begun(self) -> bool:
        """Never; only the drain ends the wait."""
        return False


def test_signal_at_any_instant_of_a_wait_for_the_device_starts_the_drain() -> None:
    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        drain = Drain(seconds=30)
        return lambda: wait_for_turn(LateTurn(), drain), drain.start

    assert interrupt_everywhere(prepare) > 5


class Idle(CallEngine):
    """No call is on its way."""

    _is_waiting = False


@pytest.mark.parametrize("make", [make_engine, lambda: Idle(make_engine())], ids=["own", "called"])
def test_signal_at_any_instant_of_a_poll_interrupts_the_engine(make: Callable[[], Engine]) -> None:
    engine = make()
    assert (
        interrupt_everywhere(lambda: (lambda: engine.poll(timeout_seconds=0.0), engine.interrupt))
        > 5
    )


DRAINING = """
import signal, sys, time
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
        time.sleep(0.1)  # a signal just before an endless wait would be met after it
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
        _, errors = process.communicate(timeout=100)
        assert process.returncode == (128 + number if manner == "hang" else 0)
        assert errors == ("\nthe broker keeps running\n" if manner == "hang" else "")
    finally:
        process.kill()
        process.communicate(timeout=100)
