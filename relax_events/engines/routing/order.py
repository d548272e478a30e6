"""Which engine a prompt group goes to, and which ones after that."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

BOUND = 1.25
"""Samples that an engine may have, as a multiple of the mean, before prompt groups go to the next one."""


def preferred(key: str, names: Iterable[str]) -> list[str]:
    """Order engines for a prompt group, the same wherever it is asked: when one goes, only the groups that had it first go elsewhere.

    Source: rendezvous hashing, Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998).
    """
    return sorted(names, key=lambda name: (hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest(), name), reverse=True)


def most_samples(num_samples: int, *, num_new: int, num_engines: int) -> int:
    """Return how many samples an engine may have once the new ones are placed; some engine always has room for them.

    Args:
        num_samples: In all engines.
        num_new: Of a prompt group that is to be placed.
        num_engines: That serve.
    Source: consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam (arXiv 1608.01350).
    """
    return max(num_new, math.ceil(BOUND * (num_samples + num_new) / num_engines))
