"""Order prompts in an endless stream: map a position to a dataset row, with a new permutation every
epoch, without a table of rows.
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
class DatasetRow:
    """A row of a dataset; both indices count from 0."""

    dataset: int
    index: int


class PromptOrder:
    """The dataset row at each position of an endless stream.

    The order depends only on the seed, so a restarted prompter resumes from a position on the log
    and needs no other state. A fixed cycle interleaves the datasets evenly by weight. Each dataset
    has its own epochs, with every row once in each. Memory does not grow with the rows.
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
            num_rows: Number of rows of each dataset.
            seed: Seed of the order; each epoch derives its own.
            shuffle: False keeps each dataset's own order in every epoch.
            weights: Weight of each dataset, in any unit.
        """
        self._num_rows, self._seed, self._shuffle = tuple(num_rows), seed, shuffle
        self._counts = count_turns(weights)
        self._cycle = interleave(self._counts)

    def dataset_row(self, row_number: int) -> DatasetRow:
        """Return the row at a position, counted from 0 over all epochs.

        Raises:
            IndexError: The position is negative.
        """
        if row_number < 0:
            raise IndexError(f"row_number must be >= 0, got {row_number}")
        turn, position = divmod(row_number, len(self._cycle))
        dataset, rank = self._cycle[position]
        epoch, position = divmod(turn * self._counts[dataset] + rank, self._num_rows[dataset])
        if not self._shuffle:
            return DatasetRow(dataset, position)
        seed = f"{self._seed}/{dataset}" if dataset else self._seed
        return DatasetRow(
            dataset, permute(position, size=self._num_rows[dataset], key=f"{seed}:{epoch}")
        )

    def data_row(self, row_number: int) -> int:
        """Return the row at a position as one number that counts through all datasets."""
        row = self.dataset_row(row_number)
        return sum(self._num_rows[: row.dataset]) + row.index


class PromptStream:
    """The prompts of one or several sources in the order of a run."""

    def __init__(
        self, *sources: PromptSource, seed: int, shuffle: bool, weights: Sequence[float] = (1.0,)
    ) -> None:
        """Order sources; see `PromptOrder`."""
        self._sources = sources
        self.order = PromptOrder(
            [source.num_rows for source in sources], seed=seed, shuffle=shuffle, weights=weights
        )

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(source.num_rows for source in self._sources)

    def __getitem__(self, row_number: int) -> PromptRow:
        """Read the prompt at a position, counted from 0 over all epochs."""
        row = self.order.dataset_row(row_number)
        return self._sources[row.dataset].row(row.index)


def count_turns(weights: Sequence[float]) -> list[int]:
    """Return the number of positions of each dataset in a cycle: at least one, and proportional to
    the weights, exactly if 10,000 positions are enough.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    unit = lcm(*(fraction.denominator for fraction in exact))
    counts = [int(fraction * unit) for fraction in exact]
    counts = [count // gcd(*counts) for count in counts]
    if (total := sum(counts)) <= MAX_CYCLE:
        return counts
    return [max(1, round(count * MAX_CYCLE / total)) for count in counts]


def interleave(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Interleave datasets evenly in a cycle: (dataset, index within the dataset's positions), in
    order.
    """
    positions = [
        (Fraction(2 * rank + 1, 2 * count), dataset, rank)
        for dataset, count in enumerate(counts)
        for rank in range(count)
    ]
    return [(dataset, rank) for _, dataset, rank in sorted(positions)]


def permute(position: int, *, size: int, key: str) -> int:
    """Map a position by a pseudo-random permutation of `range(size)`.

    A Feistel network permutes the next power of four; values beyond `size` are permuted again
    (cycle walking), at most four times on average.

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
