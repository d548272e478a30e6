"""The interface between the trainer and its backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from relax_events.events.types import SampleReady, SampleRolledOut

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from relax_events.config import RunConfig
    from relax_events.events.routed_experts import ExpertShape
    from relax_events.training.backend.state import StateSource, TrainerState
    from relax_events.training.ranks import Ranks
    from relax_events.weights.manifest import Weights


ENGINE_METRICS = frozenset((
    "policy_loss", "kl_estimate", "mean_ratio",
    "clip_low_fraction", "clip_high_fraction", "clip_fraction",
    "mismatch_kl", "mismatch_mean_abs", "mismatch_max_abs", "effective_sample_ratio",
    "correction_mean", "correction_clip_fraction", "masked_fraction",
    "distill_loss", "teacher_kl",
    "num_rejected_by_veto", "num_rejected_by_divergence", "is_stopped_by_kl",
    "first_epoch_policy_kl", "last_epoch_policy_kl", "last_epoch_clip_fraction",
))  # fmt: skip
"""Metrics that compare the policy with the policy that generated the samples, or that describe
off-policy corrections of the loss."""


class WorstToken(NamedTuple):
    """A token in which engine and trainer differ much.

    Attributes:
        difference: Of its log-probabilities, absolute, in nats.
        sample_id: Of its sample.
        number: Of the token among those of the sample that are trained, from 0.
    """

    difference: float
    sample_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one train step over all ranks. Means are over loss tokens, except the means
    that follow the algorithm's aggregation.

    `mismatch_*` compares the engine's log-probabilities with the trainer's: at staleness 0 it is
    their numerical difference on the same weights, above that also how far the policy has moved.
    `effective_sample_ratio` is the effective sample size under the ratio of the two, relative to
    the loss tokens: 1 on-policy. `correction_mean` is the mean weight of the algorithm's
    correction, 1 without one; `correction_clip_fraction` is the share of tokens outside its range;
    `masked_fraction` the share without a policy gradient because of a correction or a mask.
    `num_rejected_by_*` count samples that rejection excluded; they are included in `num_samples`.
    `distill_loss` is the divergence from the teacher in the loss, before its coefficient;
    `teacher_kl` estimates KL(engine's policy || teacher) from the sampled tokens, and so may be
    slightly negative. `load_balancing_loss` is that of a mixture of experts before its coefficient,
    0 where the loss has none. `algorithm_metrics` are the metrics that the algorithm's spec names.

    With several optimizer steps, means are over all of them, except `mismatch_*` and
    `effective_sample_ratio`, which are of the first one, before the weights moved; counts are those
    of the first pass. `algorithm_metrics` then also has the number of optimizer steps
    (`num_optimizer_steps`), how many were skipped because they were not finite
    (`num_mini_batches_not_finite`), whether `trainer.max_kl` ended them (`is_stopped_by_kl`), and
    the KL estimate (k3) of the policy against the old one in the first and the last pass, and the
    clipped tokens in the last (`first_epoch_policy_kl`, `last_epoch_policy_kl`,
    `last_epoch_clip_fraction`).
    """

    loss: float
    policy_loss: float
    kl_estimate: float
    distill_loss: float
    teacher_kl: float
    load_balancing_loss: float
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
    num_rejected_by_veto: int
    num_rejected_by_divergence: int
    grad_norm: float
    learning_rate: float
    num_loss_tokens: int
    num_tokens: int
    num_samples: int
    algorithm_metrics: Mapping[str, float] = field(default_factory=dict)
    worst_tokens: Sequence[WorstToken] = ()
    """Of this rank: those in which engine and trainer differ most, the worst first."""

    def to_metrics(self, *, of_engine: bool = True) -> dict[str, float]:
        """Return the metrics as TrainStepCommitted has them; without `of_engine`, where no engine
        generated the samples, only the metrics that don't compare with one.
        """
        metrics = {
            name: float(value)
            for name, value in asdict(self).items()
            if name not in ("algorithm_metrics", "worst_tokens")
        } | dict(self.algorithm_metrics)
        return (
            metrics
            if of_engine
            else {name: value for name, value in metrics.items() if name not in ENGINE_METRICS}
        )


IdsOf = Literal["sample", "model", "both"]


@dataclass(frozen=True, slots=True)
class SampleScores:
    """A model's log-probabilities for a sample: of its tokens and, if requested, of several token
    ids at each loss token.

    Attributes:
        logprobs: Of the tokens, as `Scorer.score` returns them.
        ids: The token ids, each model's most probable first; None where the sample has them.
        id_logprobs: Of the ids, in nats.
    """

    logprobs: NDArray[np.float32]
    ids: NDArray[np.int32] | None = None
    id_logprobs: NDArray[np.float32] | None = None


class TokenScorer(Protocol):
    """Computes a number for every loss token of a sample."""

    def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
        """Return a number for every loss token and 0 elsewhere: an array for each sample, as long
        as its tokens.

        Raises:
            PoisonSample: A sample can't be scored; the text names it.
            OutOfMemory: A path does not fit the device alone, also in a pass of its own; the error
                names its sample, whose prompt group ends. The others can be scored again.
        """


class TopTokenScorer(TokenScorer, Protocol):
    """Log-probabilities of sampled tokens, and of several token ids at each of them."""

    def score_topk(
        self, samples: Sequence[SampleRolledOut], *, num_ids: int, ids_of: IdsOf
    ) -> list[SampleScores]:
        """Return the same and the log-probabilities of several token ids at each loss token.

        Args:
            samples: In any number.
            num_ids: Ids at each loss token, of each of both.
            ids_of: Whose ids: the sample's `topk_ids`, the model's most probable ones, or the
                sample's and after them the model's most probable ones among all others.
        Raises:
            PoisonSample: A sample can't be scored, or lacks the ids; the text names it.
        """


class Scorer(TopTokenScorer, Protocol):
    """Forward-only log-probabilities, for the roles reference, actor-forward and teacher: of the
    initial weights until others are loaded.
    """

    def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
        """Return the tempered log-probability of every loss token, in nats, and 0 elsewhere: an
        array for each sample, as long as its tokens.

        Raises:
            PoisonSample: A sample can't be scored; the text names it.
        """

    def load_weights(self, weights: Weights) -> None:
        """Load another policy version; on an error the old one stays.

        Raises:
            WeightsError: The weights don't fit the model.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueMetrics:
    """Metrics of one step of the critic, means over its loss tokens. `explained_variance` is that
    of the returns by the recorded values.
    """

    value_loss: float
    value_clip_fraction: float
    explained_variance: float
    value_mean: float
    return_mean: float
    value_grad_norm: float
    value_learning_rate: float


class Critic(TokenScorer, Protocol):
    """A value model that learns from recorded steps. Its `policy_version` is the version
    that the last learned step produced.

    The result of a step does not depend on how samples were cut into micro-batches.

    Where several ranks hold it, every method is collective, and all ranks pass the same samples.
    """

    policy_version: int
    max_cells: int
    """Budget of a pass of the model, in tokens; see `TrainerBackend`."""

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch, adding unnormalised gradients and metrics to
        the step's.

        Raises:
            PoisonSample: A sample can't be learned from, or carries no values; nothing was added.
            OutOfMemory: A pass did not fit the device; the step has to be discarded.
        """

    def step(self) -> ValueMetrics:
        """Normalise over the whole step, clip, update the weights, and count up `policy_version`.

        With several optimizer steps, each normalises over its mini-batch, and one that is not
        finite is skipped.

        Raises:
            StepNotFinite: Loss or gradient is not finite, in all of them. The weights are
                unchanged.
            RunFailed: The step holds no loss token; likewise.
            OutOfMemory: A pass did not fit the device. The weights may be changed.
        """

    def discard(self) -> None:
        """Discard the accumulated gradients."""

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        """Set a callback that `step` calls after each long part of it."""

    def skip_step(self) -> None:
        """Discard the accumulated gradients and increment `policy_version`; weights and optimizer
        do not change.
        """

    def state(self) -> TrainerState:
        """Return the state of weights and optimizer. The tensors are live: copy them before the
        next step.
        """

    def load_state(self, state: StateSource) -> None:
        """Resume from a state; accumulated gradients are discarded.

        Raises:
            WeightsError: A tensor is missing, unknown or of another shape; nothing was changed.
        """


class TrainerBackend(Protocol):
    """Trains the policy. Takes samples, not tensors, so that a backend lays them out for its own
    parallelism.

    `accumulate` and `discard` are local to a rank, may be called any number of times (also zero)
    between two steps, and the result of a step depends neither on how samples were cut into
    micro-batches nor on which rank had them. A backend whose forward pass is collective keeps the
    micro-batches until `step`, where all ranks run the same number, some of them empty. All other
    methods are collective: every rank calls them at the same point.
    """

    policy_version: int
    max_cells: int
    """Budget of a pass of the model, in tokens: at first `trainer.max_tokens_per_micro_batch`. It
    holds for micro-batches that come after it was set."""

    @property
    def vocab_size(self) -> int:
        """Bound of the token ids that the model takes."""

    @property
    def experts(self) -> ExpertShape | None:
        """The expert layers whose routing is replayed from the samples (`model.routing_replay`);
        None where the model routes by itself.
        """

    @property
    def attention_cost(self) -> float:
        """Cost of a pair of tokens in attention, relative to that of a token in all matrices: by it
        the ranks are balanced.
        """

    @property
    def is_collective(self) -> bool:
        """Whether all data-parallel ranks run each micro-batch together: then they call
        `accumulate` equally often, some with an empty micro-batch, and `discard` together.
        """

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch, adding unnormalised gradients and metrics to
        the step's. An empty one adds nothing.

        Where the algorithm needs statistics of the whole step first, the step is several optimizer
        steps, or the forward pass is collective, the micro-batch is checked, kept and run by
        `step`.

        Raises:
            PoisonSample: A sample can't be trained on; nothing was added, and the rest of the step
                is unaffected.
            OutOfMemory: A pass did not fit the device; the step has to be discarded.
        """

    def check(self, micro_batch: Sequence[SampleReady]) -> None:
        """Check a micro-batch of a step that only the critic learns from: nothing runs, and nothing
        is added. Local to a rank.

        Raises:
            PoisonSample: A sample can't be trained on.
        """

    def discard(self) -> None:
        """Discard the gradients accumulated since the last step. Local to a rank, as `accumulate`
        is.
        """

    def step(self) -> StepMetrics:
        """Reduce over ranks, normalise over the whole step, clip, update the weights, and count up
        `policy_version`.

        Where a train step is several optimizer steps (`trainer.num_epochs`,
        `trainer.num_mini_batches`), each normalises over its mini-batch, and one that is not finite
        is skipped. The mini-batches depend on the run's seed, the version and the samples alone,
        for any number of ranks.

        Raises:
            StepNotFinite: Loss or gradient is not finite, in all of them.
            RunFailed: The step holds no loss token. Both are raised on every rank, before an
                update: the weights are unchanged, the accumulated gradients are discarded.
        """

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        """Set a callback that `step` calls after each long part of it. Local to a rank."""

    def skip_step(self) -> None:
        """Drop what was accumulated and count up `policy_version`: weights and optimizer stay as
        they are. All ranks must call it.
        """

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield the weights in parts, so that neither a device nor a host holds a second copy.

        Every rank iterates to the end. Rank 0 gets whole tensors, on any device, in Hugging Face
        names and the model's dtype; the others get empty parts. A part may be the model's own
        memory: copy it before the next step, and before the next part is asked for.

        Args:
            max_bytes: Of a part; a larger tensor is a part by itself.
        """

    def state(self) -> TrainerState:
        """Return what this rank holds of weights, optimizer and generators. The tensors are live:
        copy them before the next step.
        """

    def load_state(self, state: StateSource) -> None:
        """Resume from a state; accumulated gradients are discarded.

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

    @staticmethod
    def open_critic(config: RunConfig, ranks: Ranks) -> Critic:
        """Load the critic of a run as it is before the run's first step; collective.

        Args:
            config: The run.
            ranks: This process and its peers, of which there are `RunConfig.critic_ranks`.
        Raises:
            ConfigError: The model can't be loaded.
        """
        ...


@runtime_checkable
class OffloadingBackend(Protocol):
    """A `TrainerBackend` that can leave its device to others between two calls. Both methods are
    local to a rank; in between no other method is called.
    """

    def move_away(self) -> int:
        """Free the device's memory of parameters, gradients and optimizer; return how many bytes
        that are.

        Raises:
            EnvironmentProblem: There is no room for them elsewhere.
        """
        ...

    def bring_back(self) -> None:
        """Restore the state that `move_away` found, bit for bit."""
        ...
