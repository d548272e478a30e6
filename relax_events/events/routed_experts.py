"""Which experts each token of a sample went through, as events carry it: [tokens - 1, layers,
top_k].

Row t is of the forward that read token t, and so sampled token t + 1 where the policy chose it. No
forward reads the last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relax_events.errors import PoisonSample
from relax_events.events.parts import Array
from relax_events.events.tensors import dense

MAX_BYTE_EXPERTS = 256


class RoutedSample(Protocol):
    """The fields of a sample that this module reads."""

    @property
    def sample_id(self) -> str:
        """For errors."""

    @property
    def tokens(self) -> Array:
        """Prompt and completion."""

    @property
    def routed_experts(self) -> Array | None:
        """The array."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts, as far as its routing goes: its layers with experts, how many of them a
    token goes through, and of how many.
    """

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[np.uint8 | np.uint16]:
        """The smallest type that can number the experts."""
        return np.dtype(np.uint8 if self.num_experts <= MAX_BYTE_EXPERTS else np.uint16)

    @property
    def token_bytes(self) -> int:
        """What a token costs on the log, or in the object store."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def nothing(self) -> NDArray[np.generic]:
        """Return the array of a sample of which nothing has been read."""
        return np.zeros((0, self.num_layers, self.top_k), self.dtype)

    def compact(self, chosen: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return expert numbers in `dtype`."""
        return chosen.astype(self.dtype, copy=False)

    def checked(self, sample: RoutedSample) -> NDArray[np.generic]:
        """Return a sample's array, if it can be of this model.

        Raises:
            PoisonSample: It can't, or there is none; the text names the sample.
        """
        where = f"sample {sample.sample_id}"
        if sample.routed_experts is None:
            raise PoisonSample(
                f"{where} has no routed_experts, and model.routing_replay = 'rollout' needs the "
                "experts that its tokens went through; was it made under another run file?"
            )
        experts = dense(sample.routed_experts, what=f"{where}: routed_experts")
        if experts.shape != (shape := (len(sample.tokens) - 1, self.num_layers, self.top_k)):
            raise PoisonSample(
                f"{where}: routed_experts must have the shape {shape}, all tokens but the "
                f"last, got {experts.shape}"
            )
        if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < self.num_experts:
            raise PoisonSample(
                f"{where}: routed_experts must be 0 to {self.num_experts - 1}, got "
                f"{experts.min()} to {experts.max()}"
            )
        return experts
