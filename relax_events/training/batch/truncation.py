"""Masks the loss of what an algorithm does not train: samples without a reward, truncated ones, and
truncated paths of episodes that branched. Numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool
from numpy.typing import NDArray

from relax_events.algorithms.paths import find_trained_tokens, path_slices
from relax_events.config import AlgorithmConfig
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.events.types import SampleReady
from relax_events.training.batch.row_layout import read_array


def mask_excluded(
    samples: Sequence[SampleReady], *, algorithm: AlgorithmConfig
) -> Sequence[SampleReady]:
    """Return the samples without loss tokens in those that have no reward, and in truncated ones
    unless the algorithm trains them.

    Of an episode that branched only the truncated paths are masked, without the turns that a whole
    path shares. An algorithm that drops truncated samples masks the others' truncated paths.

    Raises:
        PoisonSample: See `mask_loss`.
    """
    return [mask_loss(sample, _find_trained(sample, algorithm)) for sample in samples]


def _find_trained(
    sample: SampleReady, algorithm: AlgorithmConfig
) -> Bool[np.ndarray, " tokens"] | None:
    """Return which tokens of a sample are trained, if they are loss tokens; None for all."""
    num_tokens = len(sample.tokens)
    is_truncated = sample.finish_reason is FinishReason.LENGTH
    if sample.reward is None:
        return np.zeros(num_tokens, bool)
    if algorithm.truncated_samples == "train" or not (is_truncated or sample.truncated_paths):
        return None
    if is_truncated and (algorithm.truncated_samples == "drop" or not sample.truncated_paths):
        return np.zeros(num_tokens, bool)  # or of a release that did not name truncated paths
    paths = path_slices(sample.path_lengths, num_tokens=num_tokens)
    tokens, mask = read_array(sample, "tokens"), read_array(sample, "loss_mask")
    trained_by = find_trained_tokens(tokens, mask, paths)
    is_trained = np.zeros(num_tokens, bool)
    for number, path in enumerate(paths):
        if number not in sample.truncated_paths:
            is_trained[trained_by[path][trained_by[path] >= 0]] = True
    return is_trained


def mask_loss(sample: SampleReady, is_trained: Bool[np.ndarray, " tokens"] | None) -> SampleReady:
    """Return a sample without the loss tokens that are not trained: their mask is 0, and their
    token sets and version segments are removed.

    Args:
        sample: Its arrays are fetched.
        is_trained: For each token; only those of loss tokens matter. None keeps all.
    Raises:
        PoisonSample: The sample has token sets, and not one for each loss token.
    """
    if is_trained is None:
        return sample
    mask = read_array(sample, "loss_mask")
    kept = is_trained[mask.astype(bool)]
    if kept.all():
        return sample
    return replace(
        sample,
        loss_mask=np.where(is_trained, mask, 0).astype(mask.dtype),
        topk_ids=_cut_sets(sample, "topk_ids", kept),
        topk_teacher_logprobs=_cut_sets(sample, "topk_teacher_logprobs", kept),
        version_segments=_cut_segments(sample.version_segments, kept),
    )


def _cut_sets(
    sample: SampleReady, field: str, kept: Bool[np.ndarray, " loss_tokens"]
) -> NDArray[np.generic] | None:
    if getattr(sample, field) is None:
        return None
    sets = read_array(sample, field)
    if len(sets) != len(kept):
        raise PoisonSample(
            f"sample {sample.sample_id}: {field} must be {len(kept)} loss tokens by the ids of "
            f"each, got {sets.shape}"
        )
    rows: NDArray[np.generic] = sets[kept]
    return rows


def _cut_segments(
    segments: Sequence[VersionSegment], kept: Bool[np.ndarray, " loss_tokens"]
) -> list[VersionSegment]:
    """Return the segments of the loss tokens that are kept; `kept` has one for each token of the
    segments.
    """
    cut, begin = [], 0
    for segment in segments:
        end = begin + segment.num_tokens
        if number := int(np.count_nonzero(kept[begin:end])):
            cut.append(replace(segment, num_tokens=number))
        begin = end
    return cut
