"""When an engine that was lost is tried again, and with how much.

Which engine a prompt group goes to, and which ones after that.

A version that several engines load at once: for how long to wait, and what to say when none took
it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from relax_events.errors import RelaxError, WeightsError

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


class Circuit:
    """Counts losses, one after the other, without a sample that has ended in between.

    closed --lost--> open: nothing is sent; a pause, longer each time --opened--> half open: one
    prompt group --a sample ended--> closed
    """

    def __init__(self) -> None:
        self.num_barren = 0

    @property
    def is_half_open(self) -> bool:
        """Whether the engine has yet to show that it is of use again."""
        return self.num_barren > 0

    def lose(self) -> float:
        """Note that the engine was lost; return the seconds until it is tried again, none the first
        time.
        """
        self.num_barren += 1
        doublings = self.num_barren - 2
        return (
            0.0
            if doublings < 0
            else min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(doublings, 30))
        )

    def close(self) -> None:
        """Note that a sample has ended."""
        self.num_barren = 0


BOUND = 1.25
"""Samples that an engine may have, as a multiple of the mean, before prompt groups go to the next
one."""


def preferred(key: str, names: Iterable[str]) -> list[str]:
    """Order engines for a prompt group, the same wherever it is asked: when one goes, only the
    groups that had it first go elsewhere.

    Source: rendezvous hashing, Thaler and Ravishankar, "Using name-based mappings to increase hit
    rates" (1998).
    """
    return sorted(
        names,
        key=lambda name: (hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest(), name),
        reverse=True,
    )


def most_samples(num_samples: int, *, num_new: int, num_engines: int) -> int:
    """Return how many samples an engine may have once the new ones are placed; some engine always
    has room for them.

    Args:
        num_samples: In all engines.
        num_new: Of a prompt group that is to be placed.
        num_engines: That serve.
    Source: consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam (arXiv
    1608.01350).
    """
    return max(num_new, math.ceil(BOUND * (num_samples + num_new) / num_engines))


GRACE_SECONDS = 5.0
"""How much later than twice the time of the fastest an engine may come up, or load a version,
before the others go on without it."""


def wait_for_most(loads: Collection[Future[None]]) -> set[Future[None]]:
    """Wait until one has succeeded, then as long again and a little for the rest; return those that
    are still not done.
    """
    started = time.monotonic()
    left = set(loads)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        if any(load.exception() is None for load in done):
            return wait(left, timeout=time.monotonic() - started + GRACE_SECONDS).not_done
    return set()


def refusal(policy_version: int, errors: Sequence[BaseException | None]) -> BaseException:
    """Choose what to say when no engine took a version: what nobody foresaw, else what is wrong
    with the version, else that all were lost.
    """
    unforeseen = [
        error for error in errors if error is not None and not isinstance(error, RelaxError)
    ]
    refusals = [error for error in errors if isinstance(error, WeightsError)]
    lost = WeightsError(
        f"policy version {policy_version} is not served: every engine was lost over it "
        f"({errors[0]})"
    )
    return next(iter([*unforeseen, *refusals]), lost)
