"""What the trainer asks of a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol

from relax_events.events.types import SampleReady, SampleRolledOut

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from relax_events.config import RunConfig
    from relax_events.weights.manifest import Weights


OF_ENGINE = frozenset((
    "policy_loss", "kl_estimate", "clip_low_fraction", "clip_high_fraction", "clip_fraction", "mean_ratio", "mismatch_kl", "mismatch_mean_abs",
    "mismatch_max_abs", "effective_sample_ratio", "correction_mean", "correction_clip_fraction", "masked_fraction",
))  # fmt: skip
"""Figures that compare the policy with the one that drew the samples, or say by what of it the loss differs from the policy's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Figures of one train step over all ranks. Means are over loss tokens, save those that the algorithm's aggregation rules.

    `mismatch_*` compares the engine's log-probabilities with the trainer's: at staleness 0 it shows engine and trainer disagreeing on the
    same weights, beyond that also how far the policy has moved. `effective_sample_ratio` is what is left of the loss tokens when each
    is weighed by the ratio of the two: 1 on-policy. `correction_*` are the weights of the algorithm's correction, 1 without one, and the
    share of tokens outside its range; `masked_fraction` of the tokens carry no policy gradient because of it or of a mask. `own` are those
    that the algorithm's spec names.
    """

    loss: float
    policy_loss: float
    kl_estimate: float
    entropy: float
    clip_low_fraction: float
    clip_high_fraction: float
    clip_fraction: float
    mean_ratio: float
    mismatch_kl: float
    mismatch_mean_abs: float
    mismatch_max_abs: float
    effective_sample_ratio: float
    correction_mean: float
    correction_clip_fraction: float
    masked_fraction: float
    grad_norm: float
    learning_rate: float
    num_loss_tokens: int
    num_tokens: int
    num_samples: int
    own: Mapping[str, float] = field(default_factory=dict)

    def as_figures(self, *, of_engine: bool = True) -> dict[str, float]:
        """Give the figures as TrainStepCommitted carries them; without `of_engine`, as where none drew the samples, only those that say something."""
        figures = {name: float(value) for name, value in asdict(self).items() if name != "own"} | dict(self.own)
        return figures if of_engine else {name: value for name, value in figures.items() if name not in OF_ENGINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """All that a backend needs to go on where it was. Tensors are keyed `model.<name>`, `exp_avg.<name>`, `optimizer.<...>`, `rng.<...>`."""

    policy_version: int
    tensors: Mapping[str, Tensor]


class Scorer(Protocol):
    """Forward-only log-probabilities, for the roles reference and actor-forward: of the initial weights until it is given others."""

    def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
        """Give the tempered log-probability of every loss token, in nats, and 0 elsewhere: an array for each sample, as long as its tokens.

        Raises:
            PoisonSample: A sample can't be scored; the text names it.
        """

    def load_weights(self, weights: Weights) -> None:
        """Go over to another policy version; on an error the old one stays.

        Raises:
            WeightsError: The weights don't fit the model.
        """


class TrainerBackend(Protocol):
    """Trains the policy. Takes samples, not tensors, so that a backend lays them out for its own parallelism.

    `accumulate` is local to a rank, may be called any number of times (also zero) between two steps, and the result of a step depends
    neither on how samples were cut into micro-batches nor on which rank had them. All other methods are collective: every rank calls them
    at the same point.
    """

    policy_version: int

    @property
    def vocab_size(self) -> int:
        """Bound of the token ids that the model takes."""

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch, adding unnormalised gradients and figures to the step's.

        Where the algorithm needs to know the whole step first, the micro-batch is kept, and run by `step`.

        Raises:
            PoisonSample: A sample can't be trained on; nothing was added, and the rest of the step is unharmed.
        """

    def step(self) -> StepFigures:
        """Reduce over ranks, normalise over the whole step, clip, update the weights, and count up `policy_version`.

        Raises:
            RunFailed: Loss or gradient is not finite, or the step holds no loss token. Raised on every rank, before the update: the weights are
                the old ones, and what was accumulated is dropped.
        """

    def weights(self) -> dict[str, Tensor]:
        """Snapshot the full weights on the CPU, in Hugging Face names and the model's dtype; later steps don't change it."""

    def state(self) -> TrainerState:
        """Show the state of weights, optimizer and generators. The tensors are live: copy them before the next step."""

    def load_state(self, state: TrainerState) -> None:
        """Go on from a state; what was accumulated is dropped.

        Raises:
            WeightsError: A tensor is missing, unknown or of another shape; nothing was changed.
        """

    @staticmethod
    def open_scorer(config: RunConfig) -> Scorer:
        """Load the initial model for scoring alone, with the model code that this backend trains.

        Raises:
            ConfigError: The model can't be loaded.
        """
        ...
