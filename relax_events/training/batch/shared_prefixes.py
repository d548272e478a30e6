"""Finds what the token sequences of a micro-batch have in common, and lays them out so that it is
computed once: the prompts of a prompt group, turns that the branches of an episode share, a system
prompt that prompt groups have in common. Pure functions of arrays, numpy alone.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from relax_events.errors import PoisonSample
from relax_events.events.parts import MediaRef
from relax_events.events.routed_experts import ExpertShape
from relax_events.media.token_layout import MediaLayout
from relax_events.objects.store import list_media
from relax_events.training.batch.paths import sampled_tokens
from relax_events.training.batch.prefix_tree import PrefixTree
from relax_events.training.batch.row_layout import RowLayout, TokenSequence, read_array

MIN_TOKENS, MIN_TOKENS_CPU = 16, 8
"""Shorter common prefixes cost more than they save: a GPU calls its attention for each sequence
that branches off, a CPU for many short ones together.
"""
MEDIA_STEP = 2**40
"""Added to a media token for each media file of a micro-batch; token ids are below it."""


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """How a model finds common prefixes.

    Attributes:
        media: Layout of media in its sequences; None for text models.
        min_tokens: Shorter common prefixes are computed for each sequence.
    """

    media: MediaLayout | None = None
    min_tokens: int = MIN_TOKENS


def layout_shared_prefixes(
    paths: Sequence[TokenSequence],
    lengths: NDArray[np.int64],
    sharing: PrefixSharing,
    *,
    experts: ExpertShape | None = None,
) -> RowLayout | None:
    """Lay out sequences in one row that holds each common prefix once; None where no two have one.

    Args:
        paths: At least one.
        lengths: Tokens of each.
        sharing: What counts as common.
        experts: Where the engine's routing is replayed: tokens are the same only if they went
            through the same experts. A sample that continued under other weights may have another
            routing of its prompt.
    """
    symbols = _symbols(paths, sharing.media, experts)
    keys = [path_symbols.tobytes() for path_symbols in symbols]
    order = sorted(range(len(paths)), key=keys.__getitem__)
    cells: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * len(paths)
    ends, forks, last = [], [], 0
    before = order[0]
    for index in order:
        shared = 0 if index == before else _shared_length(symbols[before], symbols[index])
        shared = shared if shared >= sharing.min_tokens else 0
        end = last + int(lengths[index]) - shared
        cells[index] = np.concatenate([cells[before][:shared], np.arange(last, end)])
        if end > last:
            ends.append(end)
            forks.append(int(cells[index][shared - 1]) if shared else -1)
        last, before = end, index
    if last == lengths.sum():
        return None
    tree = PrefixTree(np.array(ends), np.array(forks))
    return RowLayout(np.concatenate(cells), num_rows=1, row_length=last, tree=tree)


def cut_paths(
    paths: Sequence[TokenSequence],
    *,
    max_cells: int,
    share_rows: bool,
    sharing: PrefixSharing | None = None,
    experts: ExpertShape | None = None,
) -> list[slice]:
    """Cut token sequences into consecutive slices of at most so many cells each; a sequence that
    has more is a slice of its own.

    Args:
        paths: In trained order: the forks of an episode are neighbours.
        max_cells: Budget of a slice. A shared prefix counts once; the padding of rows in which
            several sequences stand does not count.
        share_rows: Whether several may stand in one row; otherwise each has one as long as the
            longest of its slice.
        sharing: What counts as common; None where each prefix is computed for each sequence.
        experts: See `layout_shared_prefixes`.
    """
    prefixes = None
    if sharing is not None:
        prefixes = _SlicePrefixes(_symbols(paths, sharing.media, experts), sharing.min_tokens)
    slices: list[slice] = []
    start = num_tokens = num_shared = longest = 0
    for index, path in enumerate(paths):
        length = len(read_array(path, "tokens"))
        num_tokens, longest = num_tokens + length, max(longest, length)
        num_shared += 0 if prefixes is None else prefixes.add(index)
        is_one_row = share_rows or num_shared > 0
        num_cells = num_tokens - num_shared if is_one_row else (index + 1 - start) * longest
        if index > start and num_cells > max_cells:
            slices.append(slice(start, index))
            start, num_tokens, num_shared, longest = index, length, 0, length
            if prefixes is not None:
                prefixes.begin(index)
    return [*slices, slice(start, len(paths))]


class _SlicePrefixes:
    """What each sequence has in common with the earlier ones of its slice."""

    def __init__(self, symbols: Sequence[NDArray[np.int64]], min_tokens: int) -> None:
        self._symbols, self._min_tokens = symbols, min_tokens
        self._sorted: list[tuple[bytes, int]] = []

    def begin(self, index: int) -> None:
        """Begin a slice with a sequence."""
        self._sorted.clear()
        self.add(index)

    def add(self, index: int) -> int:
        """Add a sequence; return the tokens that it adds no cell for: by order, its longest common
        prefix is with one of its two neighbours.
        """
        row = self._symbols[index].tobytes(), index
        at = bisect(self._sorted, row)
        neighbours = self._sorted[max(at - 1, 0) : at + 1]
        self._sorted.insert(at, row)
        shared = max(
            (_shared_length(self._symbols[index], self._symbols[other]) for _, other in neighbours),
            default=0,
        )
        return shared if shared >= self._min_tokens else 0


def _shared_length(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    limit = min(len(one), len(other))
    differs = (one[:limit] != other[:limit]).any(1)
    first = int(differs.argmax()) if limit else 0
    return first if limit and differs[first] else limit


def _symbols(
    paths: Sequence[TokenSequence], media: MediaLayout | None, experts: ExpertShape | None
) -> list[NDArray[np.int64]]:
    """Return for each token of each sequence numbers that are equal where the model computes the
    same.
    """
    files: dict[Any, int] = {}
    symbols = []
    for path in paths:
        tokens = read_array(path, "tokens").astype(np.int64)
        if references := list_media(path):
            tokens += _media_numbers(path, references, media, files) * MEDIA_STEP
        columns = [tokens[:, None]]
        if experts is not None:
            columns.append(_pack_experts(experts.compact(experts.checked(path)), len(tokens)))
        symbols.append(columns[0] if len(columns) == 1 else np.concatenate(columns, 1))
    return symbols


def _media_numbers(
    path: TokenSequence,
    references: Sequence[MediaRef],
    media: MediaLayout | None,
    files: dict[Any, int],
) -> NDArray[np.int64]:
    """Return the number of the media file of each media token, from 1; 0 for text."""

    def number(key: object) -> int:
        return files.setdefault(key, len(files) + 1)

    tokens = read_array(path, "tokens")
    if media is None:  # where they stand is not known
        digests = tuple((one.digest, one.media_type) for one in references)
        return np.full(len(tokens), number(digests))
    numbers = np.zeros(len(tokens), np.int64)
    try:
        indices = media.find_media_tokens(tokens, ~sampled_tokens(path), references)
    except PoisonSample as error:
        raise PoisonSample(f"sample {path.sample_id}: {error}") from None
    numbers[indices] = np.repeat(
        [number((one.digest, one.media_type)) for one in references],
        [sum(map(len, media.blocks(one))) for one in references],
    )
    return numbers


def _pack_experts(
    experts: NDArray[np.generic], num_tokens: int
) -> Int64[np.ndarray, "tokens numbers"]:
    """Return the experts of each token as whole numbers of 8 bytes; -1 for the last token, which
    has none.
    """
    width = int(np.prod(experts.shape[1:]))
    rows = np.ascontiguousarray(experts.reshape(len(experts), width)).view(np.uint8)
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    numbers = np.full((num_tokens, padded.shape[1] // 8), -1, np.int64)
    numbers[:-1] = padded.view(np.int64)
    return numbers
