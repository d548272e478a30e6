"""The endless order of prompts: position -> dataset and row, a new permutation every epoch, without
a table of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from math import gcd, lcm

from relax_events.data.rows import PromptRow, PromptSource

NUM_ROUNDS = 4
MAX_CYCLE = 10_000


@dataclass(frozen=True, slots=True)
class DataPlace:
    """A row of a dataset; both are counted from 0."""

    dataset: int
    index: int


class PromptOrder:
    """Which row of which dataset stands at each position of an endless stream.

    A position depends on nothing but the seed, so a prompter that starts again goes on where the
    log says, with no state of its own. Datasets take turns in a fixed cycle in which each has its
    share of the places, evenly spread; each dataset goes through its own epochs, every row once in
    each. Memory does not grow with the rows.
    """

    def __init__(
        self,
        num_rows: Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        """Order datasets.

        Args:
            num_rows: Of each dataset.
            seed: Of the order, with the epoch.
            shuffle: False keeps each dataset's own order in every epoch.
            weights: Of each dataset, in any unit.
        """
        self._num_rows, self._seed, self._shuffle = tuple(num_rows), seed, shuffle
        self._counts = shares(weights)
        self._cycle = interleaved(self._counts)

    def place(self, row_number: int) -> DataPlace:
        """Tell which row stands at a position, counted from 0 over all epochs.

        Raises:
            IndexError: The position is negative.
        """
        if row_number < 0:
            raise IndexError(f"row_number must be >= 0, got {row_number}")
        turn, position = divmod(row_number, len(self._cycle))
        dataset, rank = self._cycle[position]
        epoch, position = divmod(turn * self._counts[dataset] + rank, self._num_rows[dataset])
        if not self._shuffle:
            return DataPlace(dataset, position)
        seed = f"{self._seed}/{dataset}" if dataset else self._seed
        return DataPlace(
            dataset, permuted(position, size=self._num_rows[dataset], key=f"{seed}:{epoch}")
        )

    def data_row(self, row_number: int) -> int:
        """Tell the same as one number: rows are counted through all datasets, one after the
        other.
        """
        place = self.place(row_number)
        return sum(self._num_rows[: place.dataset]) + place.index


class PromptStream:
    """The prompts of one or several sources in the order of a run."""

    def __init__(
        self, *sources: PromptSource, seed: int, shuffle: bool, weights: Sequence[float] = (1.0,)
    ) -> None:
        """Order sources; see `PromptOrder`."""
        self._sources = sources
        self.order = PromptOrder(
            [source.rows for source in sources], seed=seed, shuffle=shuffle, weights=weights
        )

    @property
    def rows(self) -> int:
        """Rows of all sources."""
        return sum(source.rows for source in self._sources)

    def __getitem__(self, row_number: int) -> PromptRow:
        """Read the prompt at a position, counted from 0 over all epochs."""
        place = self.order.place(row_number)
        return self._sources[place.dataset].row(place.index)


def shares(weights: Sequence[float]) -> list[int]:
    """Return how many places each dataset has in a cycle: in exact proportion where a cycle of
    10,000 places can show it, at least one.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    unit = lcm(*(fraction.denominator for fraction in exact))
    counts = [int(fraction * unit) for fraction in exact]
    counts = [count // gcd(*counts) for count in counts]
    if (total := sum(counts)) <= MAX_CYCLE:
        return counts
    return [max(1, round(count * MAX_CYCLE / total)) for count in counts]


def interleaved(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Spread the places of each dataset evenly over a cycle: (dataset, its how-manyth place), in
    order.
    """
    places = [
        (Fraction(2 * rank + 1, 2 * count), dataset, rank)
        for dataset, count in enumerate(counts)
        for rank in range(count)
    ]
    return [(dataset, rank) for _, dataset, rank in sorted(places)]


def permuted(position: int, *, size: int, key: str) -> int:
    """Map a position to its place in a pseudo-random permutation of `range(size)`.

    A Feistel network permutes the next power of four; walking on from numbers beyond `size` keeps
    it a permutation. At most four walks are needed on average.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), sections 4 and
    5.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = _feistel(position, half_bits, key)
    while value >= size:
        value = _feistel(value, half_bits, key)
    return value


def _feistel(value: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(NUM_ROUNDS):
        digest = blake2b(f"{key}:{number}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right
