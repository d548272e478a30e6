"""Prompt groups of rollout workers that have become silent, as heartbeats show it."""

from __future__ import annotations

from typing import Any

import pytest

from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat
from relax_events.projections.held_groups import HeldPromptGroups

pytestmark = pytest.mark.unit
WANTED = {"a", "b", "c", "d"}


def heartbeat(worker_id: str, *listed: str, **changes: Any) -> WorkerHeartbeat:
    values: dict[str, Any] = {
        "host": "one",
        "pid": 10,
        "state": WorkerState.WORKING,
        "num_processed": 0,
        "num_in_flight": len(listed),
        "last_progress_at": 0,
    }
    return WorkerHeartbeat(
        worker_id=worker_id,
        role="rollout",
        prompt_groups_in_flight=list(listed),
        **values | changes,
    )


def ask(held: HeldPromptGroups, now: float) -> dict[str, list[str]]:
    return held.take_lost(now=now, silent_seconds=10.0, awaited=WANTED)


def lost(held: HeldPromptGroups, since: float, until: float) -> dict[str, list[str]]:
    """Return what is lost in a time in which nothing is heard."""
    found = [ask(held, since + 2.0 * step) for step in range(int((until - since) / 2.0) + 1)]
    return {name: groups for one in [*found, ask(held, until)] for name, groups in one.items()}


def test_silent_worker_loses_what_it_listed_last_and_once() -> None:
    held = HeldPromptGroups()
    held.apply(heartbeat("rollout-0", "a", "b", "c", "ended"), now=0.0)
    held.apply(heartbeat("rollout-0", "b", "c", "ended"), now=5.0)
    assert lost(held, 5.0, 15.0) == {}
    assert ask(held, 15.1) == {"rollout-0": ["b", "c"]}
    assert lost(held, 16.0, 100.0) == {}
    held.apply(heartbeat("rollout-0", "b"), now=101.0)  # it still lives
    assert lost(held, 101.0, 111.0) == {}
    assert ask(held, 111.1) == {"rollout-0": ["b"]}


def test_long_work_loses_nothing_while_heartbeats_come() -> None:
    held = HeldPromptGroups()
    for second in range(1000):
        held.apply(heartbeat("rollout-0", "a"), now=float(second))
        assert ask(held, second + 0.5) == {}


def test_what_another_worker_has_is_not_lost() -> None:
    held = HeldPromptGroups()
    held.apply(heartbeat("rollout-0", "a", "b", "c"), now=0.0)
    held.apply(heartbeat("rollout-1", "a", prompt_groups_written=["b"]), now=1.0)
    held.apply(heartbeat("rollout-1", prompt_groups_written=["a"]), now=9.0)
    assert lost(held, 0.0, 30.0) == {"rollout-0": ["c"]}


def test_workers_count_until_they_stop_or_are_silent() -> None:
    held = HeldPromptGroups()
    held.apply(heartbeat("rollout-0"), now=0.0)
    held.apply(heartbeat("rollout-1"), now=0.0)
    held.apply(heartbeat("rollout-2"), now=0.0)
    held.apply(heartbeat("rollout-1", state=WorkerState.STOPPED), now=9.0)
    held.apply(heartbeat("rollout-2"), now=9.0)
    assert held.count_workers(now=10.0, silent_seconds=10.0) == 2
    assert held.count_workers(now=10.1, silent_seconds=10.0) == 1


def test_worker_that_stopped_has_returned_everything() -> None:
    held = HeldPromptGroups()
    held.apply(heartbeat("rollout-0", "a"), now=0.0)
    held.apply(heartbeat("rollout-0", "a", state=WorkerState.STOPPED), now=1.0)
    assert lost(held, 1.0, 100.0) == {}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pid": 11}, {}),  # on its host the old process is dead, and its connections closed
        ({"host": "two"}, {"rollout-0": ["a"]}),
        ({"host": "two", "pid": 11}, {"rollout-0": ["a"]}),
        ({"num_processed": 0}, {"rollout-0": ["a"]}),  # a container's process is always the first
    ],
)
def test_successor_of_a_lost_host_does_not_hide_its_prompt_groups(
    changes: dict[str, Any], expected: dict[str, list[str]]
) -> None:
    held = HeldPromptGroups()
    held.apply(heartbeat("rollout-0", "a", num_processed=7), now=0.0)
    for second in range(1, 12):
        new = {"num_processed": 8} | changes
        held.apply(heartbeat("rollout-0", "d", **new), now=float(second))
        assert ask(held, float(second)) == (expected if second == 11 else {})
    assert lost(held, 11.0, 30.0) == {"rollout-0": ["d"]}


def test_silence_does_not_count_while_heartbeats_can_not_be_received() -> None:
    held = HeldPromptGroups()
    held.apply(heartbeat("rollout-0", "a"), now=0.0)
    assert lost(held, 0.0, 9.0) == {}
    held.postpone(now=10.0)
    assert lost(held, 10.0, 20.0) == {}
    assert ask(held, 100.0) == {}, "the caller was stopped meanwhile"
    assert lost(held, 100.0, 110.0) == {}
    assert ask(held, 110.1) == {"rollout-0": ["a"]}
