"""A sample as the trainer's and scorers' models see it: tokens, and which of them the policy chose."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relax_events.events.parts import Array
from relax_events.events.tensors import dense


class TokenSequence(Protocol):
    """What packing needs of a sample; SampleRolledOut and SampleReady have it."""

    @property
    def sample_id(self) -> str:
        """The sample's name, for errors."""

    @property
    def prompt_group_id(self) -> str:
        """Whose prompt it is."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def tokens(self) -> Array:
        """Prompt and completion, int32."""

    @property
    def loss_mask(self) -> Array:
        """1 where the policy chose the token."""

    @property
    def routed_experts(self) -> Array | None:
        """Which experts the tokens went through, all but the last; see `events.routed_experts`."""

    @property
    def temperature(self) -> float:
        """Divides the logits."""


def plain(sample: TokenSequence, field: str) -> NDArray[np.generic]:
    """Return an array field; one that still lies in the object store is a mistake of the caller."""
    return dense(getattr(sample, field), what=f"sample {sample.sample_id}: {field}")
