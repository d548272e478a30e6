"""The router's policies: circuit breaker, choice of an engine, deadline of a weight update."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from relax_events.errors import RelaxError, WeightsError

MIN_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0


class CircuitBreaker:
    """Counts consecutive failures of an engine, without a finished sample in between.

    closed --engine lost--> open: no requests; a pause, longer each time --engine opened-->
    half open: one prompt group --sample finished--> closed
    """

    def __init__(self) -> None:
        self.num_failures = 0

    @property
    def is_half_open(self) -> bool:
        """Whether the engine has failed, and has not finished a sample since."""
        return self.num_failures > 0

    def record_failure(self) -> float:
        """Count a failure; return the seconds until the next attempt, 0 after the first failure."""
        self.num_failures += 1
        doublings = self.num_failures - 2
        return (
            0.0
            if doublings < 0
            else min(MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS * 2.0 ** min(doublings, 30))
        )

    def record_success(self) -> None:
        """Reset the count: a sample has finished."""
        self.num_failures = 0


LOAD_FACTOR = 1.25
"""Samples that an engine may have, as a multiple of the mean, before prompt groups go to the next
one in order.
"""


def rank_engines(key: str, names: Iterable[str]) -> list[str]:
    """Order the engines for a prompt group by rendezvous hashing: if an engine is removed, only its
    prompt groups move.

    Source: rendezvous hashing, Thaler and Ravishankar, "Using name-based mappings to increase hit
    rates" (1998).
    """
    return sorted(
        names,
        key=lambda name: (hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest(), name),
        reverse=True,
    )


def max_samples_per_engine(num_samples: int, *, num_new: int, num_engines: int) -> int:
    """Return the maximum number of samples of an engine after the new ones are assigned.

    At least one engine always has room for them.

    Args:
        num_samples: Samples in all engines.
        num_new: Samples of the prompt group to assign.
        num_engines: Number of serving engines.
    Source: consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam (arXiv
    1608.01350).
    """
    return max(num_new, math.ceil(LOAD_FACTOR * (num_samples + num_new) / num_engines))


GRACE_SECONDS = 5.0
"""The router waits twice the fastest engine's time, plus this, for the others to start or to load a
version; then it continues without them.
"""


def wait_for_most(loads: Collection[Future[None]]) -> set[Future[None]]:
    """Wait until one load has succeeded, then that time once more plus `GRACE_SECONDS`; return the
    unfinished loads.
    """
    started = time.monotonic()
    left = set(loads)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        if any(load.exception() is None for load in done):
            return wait(left, timeout=time.monotonic() - started + GRACE_SECONDS).not_done
    return set()


def choose_error(policy_version: int, errors: Sequence[BaseException | None]) -> BaseException:
    """Choose the error to raise if no engine loaded a version.

    An unexpected error comes first, then a rejection of the weights, then the loss of all engines.
    """
    unexpected = [
        error for error in errors if error is not None and not isinstance(error, RelaxError)
    ]
    rejections = [error for error in errors if isinstance(error, WeightsError)]
    lost = WeightsError(
        f"policy version {policy_version} is not served: every engine was lost while loading "
        f"it ({errors[0]})"
    )
    return next(iter([*unexpected, *rejections]), lost)
