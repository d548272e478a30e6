"""Retries a request while the broker is unavailable."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerUnavailable

ResultT = TypeVar("ResultT")


def is_unavailable(error: BrokerError) -> bool:
    """Return whether an error is BrokerUnavailable, which a retry may cure."""
    return isinstance(error, BrokerUnavailable)


def retry_while_unavailable(
    request: Callable[[], ResultT],
    deadline: Deadline,
    *,
    pause_seconds: float,
    should_retry: Callable[[BrokerError], bool] = is_unavailable,
) -> ResultT:
    """Send a request until it succeeds or the deadline has passed.

    Args:
        request: Sends the request once.
        deadline: The time after which an error is raised instead of retried.
        pause_seconds: The pause between two attempts.
        should_retry: Whether an error is transient; all others are raised at once.
    Raises:
        BrokerError: The error of the last attempt.
    """
    while True:
        try:
            return request()
        except BrokerError as error:
            if not should_retry(error) or deadline.passed:
                raise
        time.sleep(pause_seconds)
