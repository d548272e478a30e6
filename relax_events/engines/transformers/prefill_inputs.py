"""Group waiting samples by prefill, and build the input arrays of a prefill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from relax_events.engines.requests import SampleState
from relax_events.media.model_inputs import MediaSequence

MAX_PREFILL_TOKENS = 8192
"""Tokens, padding included, of one prefill forward; a longer prompt is prefilled alone."""
PrefixGroup = list[SampleState]
"""Samples that continue the same tokens and media, and share one prefill."""


def group_prefills(
    samples: Iterable[SampleState], *, prompt_block: int, together: bool
) -> Iterator[list[PrefixGroup]]:
    """Yield samples by prefill: equal sequences once, equal padded lengths together.

    Args:
        samples: The samples, in order of submission.
        prompt_block: Prompts are padded to a multiple of this many tokens.
        together: Whether different sequences may be in one prefill.
    """
    by_length: defaultdict[int, dict[tuple[bytes, ...], PrefixGroup]] = defaultdict(dict)
    for sample in samples:
        sequence = sample.sequence
        content = (
            sequence.tobytes(),
            sample.is_input.tobytes(),
            *(piece.reference.digest for piece in sample.media),
        )
        by_length[round_up(len(sequence), prompt_block)].setdefault(content, []).append(sample)
    for length, by_content in by_length.items():
        size = max(1, MAX_PREFILL_TOKENS // length) if together else 1
        groups = list(by_content.values())
        yield from (groups[start : start + size] for start in range(0, len(groups), size))


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """The sequences of a prefill, padded to one length."""

    token_ids: Int64[np.ndarray, "rows length"]
    lengths: Int64[np.ndarray, " rows"]
    """Tokens of each row, without padding."""
    media: Sequence[MediaSequence]
    """Media inputs of each row; empty if no row has media."""

    @classmethod
    def from_groups(cls, groups: Sequence[PrefixGroup], *, prompt_block: int) -> PrefillInputs:
        """Build the inputs of prefix groups of equal padded length, one row each."""
        arrays = [samples[0].sequence for samples in groups]
        lengths = np.array([len(array) for array in arrays])
        ids = np.zeros((len(arrays), round_up(int(lengths.max()), prompt_block)), np.int64)
        for row, array in enumerate(arrays):
            ids[row, : len(array)] = array
        if not any(samples[0].media for samples in groups):
            return cls(ids, lengths, [])
        media = [
            _build_media_sequence(samples[0], row * ids.shape[1])
            for row, samples in enumerate(groups)
        ]
        return cls(ids, lengths, media)


def _build_media_sequence(sample: SampleState, first_cell: int) -> MediaSequence:
    tokens = sample.sequence
    is_input = np.append(sample.is_input, np.zeros(len(sample.tokens), bool))
    return MediaSequence(
        f"sample {sample.sample_id}",
        tokens,
        is_input,
        sample.media,
        first_cell + np.arange(len(tokens)),
    )


def round_up(count: int, block: int) -> int:
    """Return the next multiple of a block."""
    return -(-count // block) * block
