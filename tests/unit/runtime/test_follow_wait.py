"""How long a worker's fetch from the control log waits for a record."""

from __future__ import annotations

from relax_events.runtime.worker import compute_follow_wait


def test_workers_of_a_small_run_wait_half_a_second() -> None:
    assert [compute_follow_wait(number).ms for number in (1, 9, 50)] == [500] * 3


def test_fetches_of_a_large_run_do_not_grow_with_it() -> None:
    assert [100 / compute_follow_wait(100).ms, 400 / compute_follow_wait(400).ms] == [0.1, 0.1]


def test_no_worker_waits_longer_than_five_seconds() -> None:
    assert compute_follow_wait(10_000).ms == 5000
