"""The endless order of prompts: position -> row, a new permutation every epoch, without a table."""

from __future__ import annotations

from hashlib import blake2b

from relax_events.data.rows import PromptRow, PromptSource

NUM_ROUNDS = 4


class PromptStream:
    """An endless sequence over a source: epoch after epoch, each row once per epoch.

    A position depends on nothing but the seed, so a prompter that starts again goes on where the log says, with no state of its own.
    Memory does not grow with the source.
    """

    def __init__(self, source: PromptSource, *, seed: int, shuffle: bool) -> None:
        """Order a source.

        Args:
            source: The prompts.
            seed: Of the order, with the epoch.
            shuffle: False keeps the source's own order in every epoch.
        """
        self._source = source
        self._seed = seed
        self._shuffle = shuffle

    def __getitem__(self, row_number: int) -> PromptRow:
        """Read the prompt at a position, counted from 0 over all epochs."""
        return self._source.row(self.source_index(row_number))

    def source_index(self, row_number: int) -> int:
        """Tell which row of the source stands at a position; see `source_index`."""
        return source_index(row_number, num_rows=self._source.rows, seed=self._seed, shuffle=self._shuffle)


def source_index(row_number: int, *, num_rows: int, seed: int, shuffle: bool) -> int:
    """Tell which row of a source stands at a position of its stream.

    Raises:
        IndexError: The position is negative.
    """
    if row_number < 0:
        raise IndexError(f"row_number must be >= 0, got {row_number}")
    epoch, position = divmod(row_number, num_rows)
    return permuted(position, size=num_rows, key=f"{seed}:{epoch}") if shuffle else position


def permuted(position: int, *, size: int, key: str) -> int:
    """Map a position to its place in a pseudo-random permutation of `range(size)`.

    A Feistel network permutes the next power of four; walking on from numbers beyond `size` keeps it a permutation. At most
    four walks are needed on average.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), sections 4 and 5.
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
