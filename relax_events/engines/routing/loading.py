"""A version that several engines load at once: for how long to wait, and what to say when none took it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from relax_events.errors import RelaxError, WeightsError

GRACE_SECONDS = 5.0
"""How much later than twice the time of the fastest an engine may come up, or load a version, before the others go on without it."""


def wait_for_most(loads: Collection[Future[None]]) -> set[Future[None]]:
    """Wait until one has succeeded, then as long again and a little for the rest; return those that are still not done."""
    started = time.monotonic()
    left = set(loads)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        if any(load.exception() is None for load in done):
            return wait(left, timeout=time.monotonic() - started + GRACE_SECONDS).not_done
    return set()


def refusal(policy_version: int, errors: Sequence[BaseException | None]) -> BaseException:
    """Choose what to say when no engine took a version: what nobody foresaw, else what is wrong with the version, else that all were lost."""
    unforeseen = [error for error in errors if error is not None and not isinstance(error, RelaxError)]
    refusals = [error for error in errors if isinstance(error, WeightsError)]
    lost = WeightsError(f"policy version {policy_version} is not served: every engine was lost over it ({errors[0]})")
    return next(iter([*unforeseen, *refusals]), lost)
