"""An embedded broker that dies is restarted, with a growing delay, while its run is supervised."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from relax_events.errors import BrokerError, EnvironmentProblem, RelaxError
from relax_events.kafka.embedded import BrokerBusy
from relax_events.launcher import broker_keeper, memory_kills
from relax_events.launcher.broker_keeper import BrokerKeeper

DEATH = BrokerError("the embedded broker in b ended by itself: Cause")


class FakeBroker:
    """A broker whose restarts have the results of a list, and which the test kills."""

    def __init__(self, *results: RelaxError | None) -> None:
        self.results = list(results)
        self.is_running, self.exit_code = True, None

    def die(self) -> None:
        self.is_running = False

    def restart(self) -> None:
        if (error := self.results.pop(0)) is not None:
            raise error
        self.is_running = True

    def explain_death(self) -> RelaxError:
        return DEATH


class Immediate(Executor):
    """Runs each call at once."""

    def submit(  # type: ignore[override]
        self, function: Callable[[], None], /, *arguments: Any, **keywords: Any
    ) -> Future[None]:
        future: Future[None] = Future()
        try:
            future.set_result(function())
        except RelaxError as error:
            future.set_exception(error)
        return future


class Pending(Executor):
    """Runs no call until the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[None], Callable[[], None]]] = []

    def submit(  # type: ignore[override]
        self, function: Callable[[], None], /, *arguments: Any, **keywords: Any
    ) -> Future[None]:
        self.calls.append((Future(), function))
        return self.calls[-1][0]

    def finish(self) -> None:
        future, function = self.calls.pop(0)
        future.set_result(function())


def keep(broker: FakeBroker, executor: Executor | None = None) -> BrokerKeeper:
    return BrokerKeeper(broker, executor=executor or Immediate())  # type: ignore[arg-type]


def tend_until(keeper: BrokerKeeper, seconds: int, *, begin: int = 0) -> list[tuple[int, str]]:
    """Return the console lines of a loop with one turn a second, each with its second."""
    return [
        (now, line)
        for now in range(begin, seconds)
        if (line := keeper.tend(float(now))) is not None
    ]


def test_broker_that_dies_while_it_restarts_is_restarted_with_a_growing_delay() -> None:
    broker = FakeBroker(DEATH, DEATH, DEATH, None)
    keeper = keep(broker)
    assert tend_until(keeper, 3) == []
    broker.die()
    lines = tend_until(keeper, 60, begin=3)
    assert broker.is_running
    assert broker.results == []
    assert [line for _, line in lines] == [
        f"the broker died and is restarted{when}: {DEATH}"
        for when in ("", " in 1 s", " in 2 s", " in 4 s")
    ]
    seconds = [second for second, _ in lines]
    assert [later - sooner for sooner, later in itertools.pairwise(seconds)] == [2, 2, 3], (
        "0, 1 and 2 seconds, in whole turns, and the turn after that one sees the result"
    )


def test_run_ends_with_the_last_cause_when_the_broker_never_serves_for_a_minute() -> None:
    last = BrokerError("the last cause")
    broker = FakeBroker(*[DEATH] * (broker_keeper.MAX_DEATHS - 2), last)
    broker.die()
    with pytest.raises(BrokerError, match=r"died 6 times .* without serving for 60 s: the last"):
        tend_until(keep(broker), 1000)
    assert broker.results == []


def test_deaths_before_a_minute_of_service_are_forgotten() -> None:
    broker = FakeBroker(*[None] * 20)
    keeper = keep(broker)
    for death in range(20):
        broker.die()
        lines = tend_until(keeper, 100 * (death + 1), begin=100 * death)
        assert [line for _, line in lines] == [f"the broker died and is restarted: {DEATH}"]


def test_restart_does_not_block_the_loop() -> None:
    broker, executor = FakeBroker(None), Pending()
    keeper = keep(broker, executor)
    broker.die()
    tend_until(keeper, 50)
    assert len(executor.calls) == 1, "one restart at a time"
    assert not broker.is_running
    executor.finish()
    assert tend_until(keeper, 200, begin=50) == []
    assert broker.is_running


def test_full_disk_or_taken_port_ends_the_run_at_once() -> None:
    broker = FakeBroker(EnvironmentProblem("the disk under b has 0 MiB free"))
    broker.die()
    keeper = keep(broker)
    with pytest.raises(EnvironmentProblem, match="0 MiB free"):
        tend_until(keeper, 10)


def test_broker_that_another_session_restarts_is_not_a_further_death() -> None:
    broker = FakeBroker(*[BrokerBusy("another process is starting it")] * 30, None)
    broker.die()
    assert len(tend_until(keep(broker), 100)) == 1
    assert broker.is_running


@pytest.mark.parametrize(("exit_code", "is_named"), [(-signal.SIGKILL, True), (1, False)])
def test_broker_killed_for_lack_of_memory_says_so(
    exit_code: int, is_named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_kills, "OWN_CGROUP", tmp_path / "none")
    monkeypatch.setattr(memory_kills, "VMSTAT", tmp_path / "vmstat")
    memory_kills.VMSTAT.write_text("oom_kill 3\n")
    broker = FakeBroker(None)
    broker.exit_code = exit_code
    keeper = keep(broker)
    memory_kills.VMSTAT.write_text("oom_kill 4\n")
    broker.die()
    line = keeper.tend(0.0)
    assert line is not None
    assert ("memory ran out" in line) == is_named
