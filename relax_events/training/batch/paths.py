"""The paths of samples: an episode that branched is one sample of several token sequences.

    sample   p p a a u b b | p p a a v c c          path_lengths 7 7
    mask     0 0 1 1 0 1 1 | 0 0 0 0 0 1 1          the shared turn a is trained in the first path

Each path is laid out as a sequence of its own, so it attends to nothing of the others. Everything
else is counted by sample: the reward, the advantage, and the weight of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_events.algorithms.paths import count_before_loss, find_trained_tokens, path_slices
from relax_events.errors import PoisonSample
from relax_events.events.immutable import immutable
from relax_events.events.parts import MediaRef
from relax_events.training.batch.row_layout import TokenSequence, read_array


@immutable(frozen=True, slots=True)
class SamplePath:
    """A path of a sample; see `TokenSequence`.

    Attributes:
        num_prompt_tokens: Tokens before its first loss token.
        is_sampled: True for each token that the policy sampled, on this path or on one before.
        media: Its media files, in the order of their placeholders.
    """

    sample_id: str
    prompt_group_id: str
    num_prompt_tokens: int
    tokens: NDArray[np.generic]
    loss_mask: NDArray[np.generic]
    is_sampled: NDArray[np.bool_]
    routed_experts: NDArray[np.generic] | None
    temperature: float
    media: Sequence[MediaRef] = ()
    path_lengths: tuple[int, ...] = ()

    @property
    def prompt_media(self) -> Sequence[MediaRef]:
        """All of its media: two paths with the same prompt are taken for others if they differ in
        one.
        """
        return self.media


def split_paths(samples: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Return the token sequences of samples in order; a sample of a single path is one itself.

    Raises:
        PoisonSample: The paths of a sample don't add up to its tokens; the text names it.
    """
    return [path for sample in samples for path in _split_sample(sample)]


def count_paths(samples: Sequence[TokenSequence]) -> NDArray[np.int64]:
    """Return the number of paths of each sample."""
    return np.array([len(sample.path_lengths) or 1 for sample in samples], np.int64)


def longest_path(sample: TokenSequence) -> int:
    """Return the tokens of a sample's longest path."""
    return max(sample.path_lengths, default=len(read_array(sample, "tokens")))


def sums_by_sample(
    values: NDArray[np.int64], samples: Sequence[TokenSequence]
) -> NDArray[np.int64]:
    """Add up a number of each path by sample."""
    counts = count_paths(samples)
    sums: NDArray[np.int64] = np.add.reduceat(values, np.cumsum(counts) - counts)
    return sums


def _split_sample(sample: TokenSequence) -> Sequence[TokenSequence]:
    if not (lengths := sample.path_lengths):
        return [sample]
    tokens, mask = read_array(sample, "tokens"), read_array(sample, "loss_mask")
    if min(lengths) < 1 or sum(lengths) != len(tokens):
        raise PoisonSample(
            f"sample {sample.sample_id}: path_lengths must be positive and add up to "
            f"{len(tokens)} tokens, got {list(lengths)}"
        )
    cells = path_slices(lengths, num_tokens=len(tokens))
    is_sampled = find_trained_tokens(tokens, mask, cells) >= 0
    experts = None if sample.routed_experts is None else read_array(sample, "routed_experts")
    media = getattr(sample, "path_media", None) or [()] * len(lengths)
    return [
        SamplePath(
            sample.sample_id,
            sample.prompt_group_id,
            count_before_loss(mask[path]),
            tokens[path],
            mask[path],
            is_sampled[path],
            None if experts is None else experts[path.start : path.stop - 1],
            sample.temperature,
            own_media,
        )
        for own_media, path in zip(media, cells, strict=True)
    ]


def sampled_tokens(sequence: TokenSequence) -> NDArray[np.bool_]:
    """Return which tokens of a sequence the policy sampled; only the others may be media."""
    if isinstance(sequence, SamplePath):
        return sequence.is_sampled
    return read_array(sequence, "loss_mask").astype(bool)
