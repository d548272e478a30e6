"""The checksum that a server reports for a tensor on a GPU, computed on the host from its bytes.

The bytes, padded by zeros, are little-endian words of 32 bits. A word is combined with its place
in the tensor and mixed, in two lanes that differ in their constants. Each lane is summed over tiles
of 8,192 words; a tile's two sums, each mixed with the tensor's length, are the halves of 64 bits;
the checksum is the mixed sum of all tiles. All arithmetic wraps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TILE_WORDS = 8192
BLOCK_WORDS = 4 * TILE_WORDS
"""Words that are hashed at a time: a power of two, whose scratch arrays fit a core's cache."""
BLOCK_BYTES = 4 * BLOCK_WORDS
WORD = (1 << 32) - 1
LONG = (1 << 64) - 1
SEED = 0x243F6A88
ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
"""Of mixing a word: a shift to the right, and a factor."""
FINAL_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
Words = NDArray[np.uint32]


def _rotate(words: Words, bits: int) -> Words:
    return words << np.uint32(bits) | words >> np.uint32(32 - bits)


def _mix(words: Words, scratch: Words) -> None:
    """Mix each word, in place."""
    for shift, factor in ROUNDS:
        np.right_shift(words, np.uint32(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        if factor != 1:
            np.multiply(words, np.uint32(factor), out=words)


@dataclass(frozen=True, slots=True)
class Lane:
    """One of the two hashes of a word; the tables are of the places in the first block."""

    factor: int
    seed: int
    bits: int
    products: Words
    rotated: Words

    @classmethod
    def build(cls, *, factor: int, seed: int, bits: int) -> Lane:
        """Compute the tables, of `BLOCK_WORDS` each."""
        places = np.arange(BLOCK_WORDS, dtype=np.uint32)
        return cls(factor, seed, bits, places * np.uint32(factor), _rotate(places, bits))

    def add_tiles(self, words: Words, *, first: int, mixed: Words, scratch: Words) -> Words:
        """Return the sum of each tile of a block, whose first word has this place in the tensor; a
        multiple of `BLOCK_WORDS`, so that the places have no bit in common with the table's.
        """
        offset = (first * self.factor + self.seed) & WORD
        rotated = _rotate(np.array([first & WORD], np.uint32), self.bits)
        np.add(self.products[: len(words)], np.uint32(offset), out=mixed)
        np.bitwise_xor(mixed, self.rotated[: len(words)], out=mixed)
        np.bitwise_xor(mixed, rotated, out=mixed)
        np.bitwise_xor(mixed, words, out=mixed)
        _mix(mixed, scratch)
        sums: Words = np.add.reduceat(mixed, range(0, len(words), TILE_WORDS), dtype=np.uint32)
        return sums


LANES = (
    Lane.build(factor=0x27D4EB2D, seed=SEED, bits=15),
    Lane.build(factor=0x165667B1, seed=(SEED * 0x9E3779B1 ^ 0xDEADBEEF) & WORD, bits=13),
)


class GpuDigest:
    """The checksum of bytes that are added one after the other; used as those of hashlib."""

    def __init__(self) -> None:
        self._mixed, self._scratch = np.empty((2, BLOCK_WORDS), np.uint32)
        self._rest = np.empty(BLOCK_BYTES, np.uint8)
        self._num_rest = self._num_words = 0
        self._sums: tuple[list[Words], list[Words]] = ([], [])

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        added = np.frombuffer(data, np.uint8) if len(data) else self._rest[:0]
        if self._num_rest:
            head, added = np.split(added, [BLOCK_BYTES - self._num_rest])
            self._keep(head)
            if self._num_rest < BLOCK_BYTES:
                return
            self._add(self._rest, self._sums)
            self._num_words, self._num_rest = self._num_words + BLOCK_WORDS, 0
        num_whole = len(added) - len(added) % BLOCK_BYTES
        for start in range(0, num_whole, BLOCK_BYTES):
            self._add(added[start : start + BLOCK_BYTES], self._sums)
            self._num_words += BLOCK_WORDS
        self._keep(added[num_whole:])

    def hexdigest(self) -> str:
        """Return the checksum of the bytes so far: 16 digits."""
        sums = (list(self._sums[0]), list(self._sums[1]))
        num_words = self._num_words + -(-self._num_rest // 4)
        if num_words == 0:
            return f"{0:016x}"
        if self._num_rest:
            self._add(np.pad(self._rest[: self._num_rest], (0, -self._num_rest % 4)), sums)
        high, low = (np.concatenate(of_lane) ^ np.uint32(4 * num_words & WORD) for of_lane in sums)
        for of_lane in (high, low):
            _mix(of_lane, np.empty_like(of_lane))
        total = (int(high.sum(dtype=np.uint64)) << 32) + int(low.sum(dtype=np.uint64)) & LONG
        for shift, factor in FINAL_ROUNDS:
            total = (total ^ total >> shift) * factor & LONG
        return f"{total:016x}"

    def _keep(self, data: NDArray[np.uint8]) -> None:
        self._rest[self._num_rest : self._num_rest + len(data)] = data
        self._num_rest += len(data)

    def _add(self, data: NDArray[np.uint8], sums: tuple[list[Words], list[Words]]) -> None:
        """Hash at most a block, a multiple of 4 bytes, behind the words so far."""
        words = data.view("<u4")
        mixed, scratch = self._mixed[: len(words)], self._scratch[: len(words)]
        for lane, of_lane in zip(LANES, sums, strict=True):
            of_lane.append(
                lane.add_tiles(words, first=self._num_words, mixed=mixed, scratch=scratch)
            )
