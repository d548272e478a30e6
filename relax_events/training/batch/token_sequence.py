"""Defines the token arrays that trainer and scorers read from a sample, including the token ids at
which policy and teacher are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import NDArray

from relax_events.errors import PoisonSample
from relax_events.events.parts import Array
from relax_events.events.tensors import dense
from relax_events.events.types import SampleReady, SampleRolledOut


class TokenSequence(Protocol):
    """What packing needs of a sample; SampleRolledOut and SampleReady have it."""

    @property
    def sample_id(self) -> str:
        """The sample's name, for errors."""

    @property
    def prompt_group_id(self) -> str:
        """Its prompt group."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def tokens(self) -> Array:
        """Prompt and completion, int32."""

    @property
    def loss_mask(self) -> Array:
        """1 where the policy generated the token."""

    @property
    def routed_experts(self) -> Array | None:
        """The experts of all tokens but the last; see `events.routed_experts`."""

    @property
    def temperature(self) -> float:
        """Divides the logits."""


def read_array(sample: TokenSequence, field: str) -> NDArray[np.generic]:
    """Return an array field; the caller must have fetched stored arrays."""
    return dense(getattr(sample, field), what=f"sample {sample.sample_id}: {field}")


@dataclass(frozen=True, slots=True)
class TokenSets:
    """The ids of a micro-batch in packed order, with the teacher's log-probabilities of them, in
    nats.
    """

    ids: Int64[np.ndarray, "loss_tokens ids"]
    teacher_logprobs: Float32[np.ndarray, "loss_tokens ids"]

    @classmethod
    def from_samples(
        cls, samples: Sequence[SampleReady], *, num_ids: int, vocab_size: int
    ) -> TokenSets:
        """Concatenate the sets of samples.

        Args:
            samples: In packed order.
            num_ids: Ids at each loss token; if samples were recorded with more, the most
                probable ones are used.
            vocab_size: Bound of token ids.
        Raises:
            PoisonSample: A sample lacks its set, or the set does not match the sample or the
                vocabulary; the text names it.
        """
        ids = [read_topk_ids(sample, num_ids=num_ids, vocab_size=vocab_size) for sample in samples]
        return cls(
            np.concatenate(ids).astype(np.int64),
            np.concatenate([_teacher_logprobs(sample, num_ids) for sample in samples]),
        )


def read_topk_ids(
    sample: SampleReady | SampleRolledOut, *, num_ids: int, vocab_size: int
) -> NDArray[np.generic]:
    """Return a sample's `topk_ids`, the most probable ones of them.

    Args:
        sample: The decoded event.
        num_ids: Ids at each loss token.
        vocab_size: Bound of token ids.
    Raises:
        PoisonSample: It has none, too few, or one outside the vocabulary; the text names it.
    """
    ids = _rows(sample, "topk_ids", num_ids)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        rule = f"topk_ids must be 0 to {vocab_size - 1}"
        raise PoisonSample(
            f"sample {sample.sample_id}: {rule}, got {ids.min()} to {ids.max()}; do policy "
            "and teacher share a vocabulary?"
        )
    return ids


def _teacher_logprobs(sample: SampleReady, num_ids: int) -> NDArray[np.float32]:
    values = _rows(sample, "topk_teacher_logprobs", num_ids).astype(np.float32)
    if not np.isfinite(values).all():
        raise PoisonSample(
            f"sample {sample.sample_id}: topk_teacher_logprobs must be finite, got "
            f"{values[~np.isfinite(values)][0]}"
        )
    return values


def _rows(sample: SampleReady | SampleRolledOut, field: str, num_ids: int) -> NDArray[np.generic]:
    if getattr(sample, field) is None:
        remedy = (
            "is the role that computes them running, and was the run recorded with these "
            "distill_tokens?"
        )
        raise PoisonSample(
            f"sample {sample.sample_id} has no {field}, and the algorithm needs them; {remedy}"
        )
    values, num_loss_tokens = (
        read_array(sample, field),
        int(read_array(sample, "loss_mask").astype(bool).sum()),
    )
    if values.ndim != 2 or len(values) != num_loss_tokens or values.shape[1] < num_ids:
        rule = f"{field} must be {num_loss_tokens} loss tokens by at least {num_ids} ids"
        raise PoisonSample(f"sample {sample.sample_id}: {rule}, got {values.shape}")
    return values[:, :num_ids]
