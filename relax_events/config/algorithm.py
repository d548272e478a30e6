"""The section `algorithm`: the objective, whose forms are values of few keys (ADR 76)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from relax_events.config.algorithm_spec import (
    AlgorithmSpec,
    LearnsFrom,
    find_algorithm,
    is_from_log,
    is_path,
)
from relax_events.config.base import Section
from relax_events.config.external_values import Code, Names
from relax_events.config.resume_rules import IN_FLIGHT, never
from relax_events.errors import ConfigError

NOT_SHARED = (
    "baseline", "normalise_std", "reward_weights",
    "clip_low", "clip_high", "dual_clip", "gate_positive", "gate_negative",
    "gamma", "gae_lambda", "turn_gamma", "length_adaptive_alpha", "bootstrap_truncated",
    "dpo_beta", "label_smoothing", "length_normalised", "nll_coefficient",
    "trust_radius", "ratio_cap",
)  # fmt: skip
"""Settings that only some algorithms have; they are null for the others."""
CORRECTION_RANGES = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mask": (0.5, 2.0)}
"""What the corrections with a range take when the run file names none."""

KlEstimator = Literal[
    "k1", "k2", "k3", "abs", "low_variance", "k1+", "k3+", "abs+", "low_variance+"
]
Baseline = Literal["group", "leave_one_out", "none"]
Deviation = bool | Literal["leave_one_out"]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class AlgorithmConfig(Section):
    """The policy-gradient objective. Omitted settings are those of the algorithm's paper, see
    [algorithms](algorithms.md); the defaults below are grpo's. A setting that the algorithm does
    not use is refused, and null in the run description.
    """

    name: Annotated[Code, never("samples under way were made ready for another algorithm")] = "grpo"
    """Installed algorithm, or `path/to/file.py:NAME`; `relax algorithms` prints the installed
    ones."""
    baseline: Baseline | None = "group"
    """What is subtracted from a reward: the mean of the prompt group, the mean of its other samples
    (`leave_one_out`), or nothing. `whiten_advantages` subtracts the mean of the step."""
    normalise_std: Deviation | None = True
    """Divide rewards less their baseline by the prompt group's standard deviation, or by that of
    its other samples (`leave_one_out`; not where these are equal)."""
    std_correction: Literal[0, 1] | None = None
    """Bessel correction of standard deviations: 1 divides by n - 1, 0 by n. Default: 1 within a
    prompt group and over a step's rewards, 0 over a step's tokens or samples."""
    reward_weights: Annotated[dict[str, float], Names.NOTHING] | None = None
    """Weight of each reward component, where components are normalised separately; empty uses all
    with weight 1."""
    overlong_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of `engine.sampling.max_new_tokens` over which a completion's reward falls linearly; 0
    disables the penalty."""
    overlong_penalty: NonNegative = 1.0
    """Reward penalty reached at `engine.sampling.max_new_tokens`."""
    truncated_samples: Literal["train", "mask", "drop"] = "train"
    """Samples truncated by their length: `train` them as any other; `mask` their loss but count
    their reward in the prompt group's statistics; or `drop` them from both. A prompt group of only
    such samples is then filtered."""
    min_samples_per_group: Annotated[int, Field(ge=0)] = 0
    """Samples with a reward that a prompt group needs to be trained, with the statistics of those;
    with fewer it fails. Samples that were lost, or whose reward function failed, have none. 0 is
    half of `run.samples_per_prompt`, rounded up, and at least 2."""
    filter_uniform_rewards: bool = False
    """Drop prompt groups whose rewards are all equal and issue replacements (dynamic sampling)."""
    whiten_advantages: Literal["none", "mean", "tokens", "samples", "rewards"] = "none"
    """Scale a step's advantages to mean 0 and deviation 1, over its loss `tokens` or its `samples`;
    subtract their `mean` over the samples alone; or divide them by the deviation of the step's
    `rewards`, without centring. The trainer then
    waits for the whole step before its first backward pass."""
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = 0.2
    """The probability ratio is clipped below at 1 - clip_low; with gmpo its logarithm at
    -clip_low."""
    clip_high: NonNegative | None = 0.2
    """The probability ratio is clipped above at 1 + clip_high; with gmpo its logarithm at
    clip_high."""
    dual_clip: NonNegative | None = 0.0
    """Dual clip: upper bound, above 1, of the ratio for negative advantages; 0 disables it."""
    gate_positive: Positive | None = None
    """Temperature of the soft gate where the advantage is positive."""
    gate_negative: Positive | None = None
    """Temperature of the soft gate where the advantage is negative."""
    trust_radius: Positive | None = None
    """Maximum distance of the policy from the sampling policy at a token before the token is
    masked: a difference of probabilities with dppo_tv, nats with dppo_kl."""
    ratio_cap: Annotated[float, Field(ge=1)] | None = None
    """Upper bound of the importance weight of a token."""
    gamma: Annotated[float, Field(ge=0, le=1)] | None = None
    """Discount of rewards per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lambda of GAE: 0 is the one-step TD error, 1 the Monte Carlo return minus the value.
    Algorithms with this need the critic role."""
    critic_gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lambda of the returns that the critic learns; `gae_lambda` by default. VAPO uses 1."""
    turn_gamma: Annotated[float, Field(ge=0, le=1)] | None = None
    """Discount of rewards per turn. Above 0, bi-level GAE: advantages pass from turn to turn with
    this discount first, then over each turn's tokens with `gamma`. 0 ignores turns. With
    `turn_rewards`."""
    length_adaptive_alpha: NonNegative | None = None
    """Above 0, the policy's lambda is 1 - 1 / (length_adaptive_alpha * loss tokens of the sample)
    instead of `gae_lambda`; VAPO uses 0.05."""
    bootstrap_truncated: bool | None = None
    """For samples truncated by their length, bootstrap with the critic's value at the last loss
    token instead of 0."""
    dpo_beta: Positive | None = None
    """Beta of DPO and IPO: strength of the KL constraint to the reference model."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """Assumed share of preference pairs with swapped labels."""
    length_normalised: bool | None = None
    """Use the mean of a completion's token log-probabilities instead of the sum, so that long
    completions weigh no more than short ones."""
    nll_coefficient: NonNegative | None = None
    """Weight of the chosen completion's negative log-likelihood, added to the preference loss; 0
    disables it."""
    aggregation: Literal["token_mean", "sample_mean", "constant_length"] = "token_mean"
    """Mean over all tokens of the step; over tokens of a sample first and then over samples; or the
    sum over a sample's tokens divided by `length_normaliser`, and then the mean over samples. A
    critic's loss has the same mean."""
    length_normaliser: Annotated[int, Field(ge=0)] = 0
    """Tokens by which `constant_length` divides; 0 is `engine.sampling.max_new_tokens`."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL estimate."""
    kl_base: Annotated[
        Literal["reference", "rollout"],
        never(f"{IN_FLIGHT}, and lack the reference's log-probabilities or bring idle ones"),
    ] = "reference"
    """Whether it is the KL to the reference model, which needs the reference role, or to the policy
    that sampled, by the log-probabilities that the engine returned; the latter in the loss."""
    kl_estimator: KlEstimator = "k3"
    """Schulman's estimators of KL(policy || base), with d = log(policy / base) at a sampled
    token: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d; `abs` is |d|, `low_variance` k3
    within -10 and 10. With `+` the value is as before and the gradient that of k2
    (straight-through), for the loss."""
    kl_bound: NonNegative = 0.0
    """The estimate is kept within -kl_bound and kl_bound nats; 0 is 10 for `low_variance`, no bound
    for the others."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Whether the KL estimate is a term of the loss, or subtracted from the reward."""
    kl_unbiased: bool = False
    """Multiply the loss's KL estimate by the ratio of the policy to the sampling policy, which
    makes its gradient unbiased."""
    reference_every: Annotated[
        int, Field(ge=0), never("the versions that it names may be deleted")
    ] = 0
    """Versions between refreshes of the reference model; 0 keeps the model of `model.path`. A
    sample's reference is then the newest version divisible by this that is not newer than the
    sample; a fork begins with the version that it starts from. The reference reads these versions
    from the object store, which keeps them as long as they are needed."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the policy's entropy bonus."""
    load_balancing_coefficient: NonNegative = 0.0
    """Weight of the load-balancing loss of a mixture of experts. It is computed for each path
    of a sample alone, prompt included, and weighted as the path's loss tokens are."""
    distill_coefficient: NonNegative = 0.0
    """Weight of the divergence from the teacher; above 0 needs the teacher role and
    `teacher.model_path`."""
    distill_placement: Literal["loss", "advantage"] = "loss"
    """Whether the divergence is a term of the loss, or its estimate at each sampled token is
    subtracted from that token's advantage."""
    distill_tokens: Literal["sampled", "teacher_topk", "student_topk", "union"] = "sampled"
    """Tokens at which policy and teacher are compared: the sampled one; the teacher's most probable
    ones; the policy's most probable ones at sampling time; or both (`union`)."""
    distill_top_k: Annotated[int, Field(ge=0)] = 0
    """Number of most probable tokens, of each model with `union`; 0 for `sampled`."""
    distill_divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """KL(policy || teacher), KL(teacher || policy), or the Jensen-Shannon divergence of the two."""
    distill_mixture: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The teacher's share of the mixture with which `jsd` compares both. The limits are the forward
    KL at 0 and the reverse KL at 1."""
    distill_tail: Literal["tail", "renormalise", "truncate"] = "tail"
    """Probability outside the most probable tokens: one more bin, renormalised away, or left out of
    the comparison."""
    old_logprobs: Annotated[
        Literal["rollout", "actor", "trainer"],
        never(f"{IN_FLIGHT}, and lack the log-probabilities or bring idle ones"),
    ] = "rollout"
    """Old policy of the ratio: the engine's log-probabilities; the actor-forward role's; or the
    trainer's own before the step. With the last the ratio is 1, and a correction covers the
    difference of engine and trainer."""
    correction: Literal["none", "decoupled", "tis", "icepop", "mask"] = "none"
    """Importance correction by w, the ratio of the old policy to the engine's: multiply the policy
    loss by w (`decoupled`), by w clamped to a range (`tis`), by w inside the range and 0 outside
    (`icepop`), or by 1 inside and 0 outside (`mask`)."""
    correction_level: Literal["token", "sequence", "sequence_mean"] = "token"
    """Whether w is per token, or one for the whole sample: the product over its tokens, or their
    geometric mean."""
    correction_low: NonNegative | None = None
    """Lower end of the range; by default 0 for tis, 0.5 for icepop and mask."""
    correction_high: NonNegative | None = None
    """Upper end of the range; by default 2 for tis and mask, 5 for icepop."""
    max_token_staleness: Annotated[int, Field(ge=0)] | None = None
    """Tokens whose policy version is further behind the trainer carry no policy gradient, also
    where the sample's other tokens do: for samples that several versions generated
    (`run.weight_update_mode`). Below `run.max_staleness`; omitted, no token is masked for its
    version."""
    rejection: Literal["none", "k1", "k2", "k3", "tv"] = "none"
    """Estimator that rejects samples: those whose old policy diverges too far from the engine's
    carry no policy gradient, independent of `correction`. Schulman's estimate at each token, or
    with `tv` the difference of the token's probabilities, reduced by `rejection_over`."""
    rejection_over: Literal["token", "mean", "sum", "max"] = "mean"
    """Whether the estimate is the mean, the sum or the maximum over a sample's tokens; or each
    `token` is rejected by its own estimate."""
    rejection_low: Positive | None = None
    """With k1, a ratio: samples below it are rejected; by default 1 / rejection_high."""
    rejection_high: Positive | None = None
    """Samples above it are rejected: in nats with k2 and k3, a probability with tv; with k1 a
    ratio, of the token (`token`), of the product over the tokens (`sum`) or of their geometric mean
    (`mean`)."""
    veto_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Samples with a token whose w is below this carry no policy gradient; 0 disables it."""
    veto_high: NonNegative = 0.0
    """Samples with a token whose w is above this carry no policy gradient; 0 disables it."""
    opsm_threshold: NonNegative = 0.0
    """Samples with negative advantage whose log-probability is this far below the engine's, in nats
    per token, carry no gradient; 0 disables it."""
    m2_threshold: NonNegative = 0.0
    """Mask the tokens farthest from the engine's policy until the mean squared log-ratio of the
    step's other tokens is at most this; 0 disables it, the paper uses 0.04. Needs a forward pass
    over the whole step before the first backward pass."""
    options: Annotated[dict[str, float | int | bool | str], Names.QUANTITIES] = Field(
        default_factory=dict
    )
    """Settings declared by a custom algorithm."""

    _is_from_log: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _take_own_defaults(cls, settings: Any, info: ValidationInfo) -> Any:
        """Merge the given settings into the algorithm's defaults; a run description is complete
        and needs no file to be read.
        """
        name = settings.get("name", "grpo") if isinstance(settings, Mapping) else None
        if (
            not isinstance(name, str)
            or is_from_log(name, info)
            or (cls.model_fields.keys() <= settings.keys() and _file_is_missing(name))
        ):
            return settings
        try:
            spec = find_algorithm(name)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if not isinstance(settings.get("options"), Mapping | None) or not isinstance(
            settings.get("correction", ""), str
        ):
            return settings  # of the wrong type: reported for each key below
        unused = {key: None for key in NOT_SHARED if key not in spec.settings}
        _refuse_unknown(spec)
        _refuse_unused(spec, settings, unused)
        tree = (
            unused
            | dict(spec.settings)
            | {key: value for key, value in settings.items() if value is not None}
        )
        return (
            tree
            | {"options": dict(spec.options) | dict(settings.get("options") or {})}
            | _correction_range(tree)
        )

    @model_validator(mode="after")
    def _note_its_origin(self, info: ValidationInfo) -> AlgorithmConfig:
        self._is_from_log = is_from_log(self.name, info)
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> AlgorithmConfig:
        self._check_correction()
        self._check_rejection()
        if self.dual_clip is not None and 0 < self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip must be above 1, or 0 for none, got {self.dual_clip}; the paper takes 3"
            )
        if self.turn_gamma and self.length_adaptive_alpha:
            raise ValueError(
                f"turn_gamma = {self.turn_gamma} has one lambda for all lengths, gae_lambda; "
                "leave length_adaptive_alpha out"
            )
        self._check_critic()
        self._check_whitening()
        if self.reference_every and not (self.is_unread or self.needs_reference):
            raise ValueError(
                f"reference_every = {self.reference_every} refreshes a reference model, and there "
                "is none; set kl_coefficient with kl_base = 'reference', or leave reference_every "
                "out"
            )
        if self.kl_unbiased and self.kl_placement == "reward":
            raise ValueError(
                "kl_unbiased = true corrects the gradient of a KL estimate in the loss; set "
                "kl_placement = 'loss'"
            )
        if self.kl_base == "rollout" and self.kl_placement == "reward":
            raise ValueError(
                "kl_base = 'rollout' holds the trained policy near the one that sampled, which a "
                "reward can't; set kl_placement = 'loss', or kl_base = 'reference'"
            )
        if self.kl_placement == "reward" and self.kl_estimator.endswith("+"):
            raise ValueError(
                f"kl_estimator = {self.kl_estimator!r} is a value with another gradient, and a "
                f"reward has none; set kl_estimator = {self.kl_estimator[:-1]!r}"
            )
        return self

    def _check_correction(self) -> None:
        if self.correction != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                f"correction = {self.correction!r} weighs the old policy against the engine's, but "
                "old_logprobs = 'rollout' makes them the same; set old_logprobs to actor or "
                "trainer"
            )
        if (
            self.correction_low is not None
            and self.correction_high is not None
            and self.correction_low > self.correction_high
        ):
            raise ValueError(
                f"correction_low must be at most correction_high = {self.correction_high}, "
                f"got {self.correction_low}"
            )

    def _check_critic(self) -> None:
        if self.critic_gae_lambda is not None and not self.needs_critic:
            raise ValueError(
                f"critic_gae_lambda = {self.critic_gae_lambda} is not used by {self.name}, "
                "which has no critic; leave it out"
            )
        if self.needs_critic and self.has_distill_advantage:
            raise ValueError(
                "distill_placement = 'advantage' would make the critic learn the teacher's "
                f"judgement as if it were reward; set distill_placement = 'loss' with {self.name}"
            )

    def _check_whitening(self) -> None:
        if self.whiten_advantages == "rewards" and (
            self.overlong_ratio or self.has_reward_kl or self.has_distill_advantage
        ):
            raise ValueError(
                "whiten_advantages = 'rewards' takes the deviation of rewards as they were "
                "scored, but overlong_ratio, KL in the reward and distill_placement = 'advantage' "
                "change advantages besides; set whiten_advantages = 'samples', or leave those out"
            )
        if self.whiten_advantages == "rewards" and self.normalise_std:
            raise ValueError(
                "whiten_advantages = 'rewards' divides by the step's deviation instead of the "
                "prompt group's; also set normalise_std = false"
            )
        if self.baseline == "none" and self.normalise_std:
            raise ValueError(
                "normalise_std divides by 1e-6 where the rewards of a prompt group are equal, and "
                "baseline = 'none' leaves these as they are; set normalise_std = false"
            )
        if self.std_correction is not None and self._divides_by_no_deviation:
            raise ValueError(
                f"std_correction = {self.std_correction} is not used where nothing is divided by a "
                "deviation; set normalise_std or whiten_advantages, or leave std_correction out"
            )

    def _check_rejection(self) -> None:
        low, high = self.rejection_low, self.rejection_high
        if self.rejects and self.old_logprobs == "rollout":
            raise ValueError(
                "rejection, veto_low and veto_high compare the old policy with the engine's, but "
                "old_logprobs = 'rollout' makes them the same; set old_logprobs to actor or "
                "trainer"
            )
        if 0 < self.veto_high <= 1:
            raise ValueError(f"veto_high must be above 1, or 0 for none, got {self.veto_high}")
        if self.rejection == "none":
            for key, value in (("rejection_low", low), ("rejection_high", high)):
                if value is not None:
                    raise ValueError(
                        f"{key} = {value} is not used by rejection = 'none'; set rejection "
                        f"to k1, k2, k3 or tv, or leave {key} out"
                    )
            return
        if high is None:
            example = (
                "1.001 with the mean of k1, 0.005 with the mean of k3"
                if self.rejection_over == "mean"
                else "2"
            )
            raise ValueError(
                f"rejection = {self.rejection!r} needs the bound that it rejects beyond; set "
                f"rejection_high, for example {example}"
            )
        if self.rejection != "k1":
            if low is not None:
                raise ValueError(
                    f"rejection_low = {low} is not used by rejection = {self.rejection!r}, "
                    "which is never negative; leave it out"
                )
            return
        if self.rejection_over == "max":
            raise ValueError(
                "rejection_over = 'max' is not defined for k1, which may be negative; set "
                "veto_low and veto_high, or take k2 or k3"
            )
        if high <= 1 or (low is not None and low >= 1):
            raise ValueError(
                "with rejection = 'k1' rejection_low must be below 1 and rejection_high "
                f"above it, got {low} and {high}"
            )

    @model_validator(mode="after")
    def _distillation_is_defined(self) -> AlgorithmConfig:
        tokens, top_k = self.distill_tokens, self.distill_top_k
        if (tokens == "sampled") != (top_k == 0):
            rule = "must be 0" if tokens == "sampled" else "must be at least 1"
            raise ValueError(
                f"distill_top_k {rule} with distill_tokens = {tokens!r}, got {top_k}; set "
                "distill_top_k or distill_tokens"
            )
        if self.distill_placement == "advantage" and (tokens, self.distill_divergence) != (
            "sampled",
            "reverse_kl",
        ):
            raise ValueError(
                "distill_placement = 'advantage' takes the reverse KL of the sampled tokens, got "
                f"{self.distill_divergence} of {tokens}; set distill_placement = 'loss'"
            )
        return self

    @property
    def spec(self) -> AlgorithmSpec:
        """The algorithm that the settings are of.

        Raises:
            ConfigError: It is not here; the text says what is missing. Or only a log names its
                file.
        """
        if self._is_from_log:
            raise ConfigError(
                f"algorithm {self.name} is code that a log names and this run file does not; "
                "it is not run"
            )
        return find_algorithm(self.name)

    @property
    def is_unread(self) -> bool:
        """Whether the algorithm's file is gone, or only a log names it: then it is not run."""
        return self._is_from_log or _file_is_missing(self.name)

    @property
    def learns_from(self) -> LearnsFrom:
        """What the algorithm learns from: see its spec. Where its file is unread, rewards."""
        return "rewards" if self.is_unread else self.spec.learns_from

    @property
    def has_rewards(self) -> bool:
        """Whether samples are generated and rewarded, not brought by the data."""
        return self.learns_from == "rewards"

    def count_needed_samples(self, samples_per_prompt: int) -> int:
        """Return how many samples of a prompt group must be usable for it to be trained."""
        if not self.has_rewards or self.needs_whole_groups:
            return samples_per_prompt
        return self.min_samples_per_group or max(2, math.ceil(samples_per_prompt / 2))

    @property
    def _divides_by_no_deviation(self) -> bool:
        takes_it = self.is_unread or (
            "std_correction" in self.spec.advantage_settings and self.normalise_std is not False
        )
        return self.whiten_advantages in ("none", "mean") and not takes_it

    @property
    def needs_reference(self) -> bool:
        """Whether the reference role is needed."""
        return (
            self.kl_coefficient > 0 and self.kl_base == "reference"
        ) or self._loss_takes_reference

    @property
    def has_reference_in_loss(self) -> bool:
        """Whether the trainer needs the reference's log-probabilities of each sample."""
        is_of_reference = self.has_loss_kl and self.kl_base == "reference"
        return is_of_reference or self._loss_takes_reference

    @property
    def _loss_takes_reference(self) -> bool:
        return not self.is_unread and self.spec.reference

    @property
    def needs_whole_groups(self) -> bool:
        """Whether a micro-batch must hold all samples of a prompt group, side by side."""
        return not self.is_unread and self.spec.whole_prompt_groups

    @property
    def has_loss_kl(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_coefficient > 0 and self.kl_placement == "loss"

    @property
    def has_reward_kl(self) -> bool:
        """Whether the reward is lessened by a KL estimate."""
        return self.kl_coefficient > 0 and self.kl_placement == "reward"

    @property
    def kl_limit(self) -> float:
        """The largest absolute value of a KL estimate, in nats."""
        is_bounded = self.kl_estimator.startswith("low_variance")
        return self.kl_bound or (10.0 if is_bounded else math.inf)

    @property
    def needs_critic(self) -> bool:
        """Whether advantages are computed from a critic's values, token by token."""
        return self.gae_lambda is not None

    @property
    def of_critic(self) -> AlgorithmConfig | None:
        """What the critic's returns are computed by, where it differs from what the policy's
        advantages are.
        """
        critic_lambda = (
            self.gae_lambda if self.critic_gae_lambda is None else self.critic_gae_lambda
        )
        if critic_lambda == self.gae_lambda and not self.length_adaptive_alpha:
            return None
        return self.model_copy(
            update={
                "gae_lambda": critic_lambda,
                "length_adaptive_alpha": 0.0
                if self.length_adaptive_alpha
                else self.length_adaptive_alpha,
            }
        )

    @property
    def distills(self) -> bool:
        """Whether the policy learns from a teacher."""
        return self.distill_coefficient > 0

    @property
    def has_distill_loss(self) -> bool:
        """Whether the loss has a divergence from the teacher."""
        return self.distills and self.distill_placement == "loss"

    @property
    def has_distill_advantage(self) -> bool:
        """Whether advantages are lessened by how much less the teacher likes a token."""
        return self.distills and self.distill_placement == "advantage"

    @property
    def has_topk_loss(self) -> bool:
        """Whether the loss compares policy and teacher over several tokens."""
        return self.has_distill_loss and self.distill_tokens != "sampled"

    @property
    def num_rollout_top_tokens(self) -> int:
        """How many most probable tokens the engine has to give with each token that it samples."""
        return (
            self.distill_top_k
            if self.has_topk_loss and self.distill_tokens in ("student_topk", "union")
            else 0
        )

    @property
    def num_compared_tokens(self) -> int:
        """At how many token ids the loss compares policy and teacher, for each sampled token.

        A `union` has always twice `distill_top_k`: in place of ids that both models name, the
        teacher gives its next ones.
        """
        return 2 * self.distill_top_k if self.distill_tokens == "union" else self.distill_top_k

    @property
    def rejects(self) -> bool:
        """Whether whole samples may be left out for how far the engine's policy was from the old
        one.
        """
        return self.rejection != "none" or self.veto_low > 0 or self.veto_high > 0

    @property
    def needs_whole_step(self) -> bool:
        """Whether the trainer must know a step's samples before it can train the first of them."""
        return self.whiten_advantages != "none" or self.m2_threshold > 0

    def keywords(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return settings by name, as an algorithm's functions take them."""
        return {
            name: self.options[name] if name in self.options else getattr(self, name)
            for name in names
        }


def _file_is_missing(name: str) -> bool:
    return is_path(name) and not Path(name.rpartition(":")[0]).is_file()


def _refuse_unknown(spec: AlgorithmSpec) -> None:
    """Refuse a spec that names unknown settings, before one of its functions reads them."""
    for name in (*spec.settings, *spec.excluded, *spec.advantage_settings, *spec.loss_settings):
        if name not in AlgorithmConfig.model_fields and name not in spec.options:
            raise ValueError(
                f"the spec of {spec.name} names {name!r}, which is neither a setting nor one "
                "of its options; fix the spec"
            )


def _refuse_unused(
    spec: AlgorithmSpec, settings: Mapping[str, Any], unused: Mapping[str, None]
) -> None:
    for key in unused:
        if settings.get(key) is not None:
            uses = (
                ", ".join(name for name in NOT_SHARED if name not in unused) or "none of its kind"
            )
            raise ValueError(
                f"{key} = {settings[key]!r} is not used by {spec.name}, which has {uses}; leave "
                f"{key} out"
            )
    for key, reason in spec.excluded.items():
        if (
            settings.get(
                key, inert := spec.settings.get(key, AlgorithmConfig.model_fields[key].default)
            )
            != inert
        ):
            raise ValueError(
                f"{key} = {settings[key]!r} is not for {spec.name}: {reason}; leave {key} out"
            )
    for key in settings.get("options") or {}:
        if key not in spec.options:
            raise ValueError(
                f"options.{key} is not an option of {spec.name}, which has "
                f"{', '.join(spec.options) or 'none'}; leave it out"
            )


def _correction_range(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the range of the correction; refuse one where the correction has none."""
    kind, keys = tree.get("correction", "none"), ("correction_low", "correction_high")
    if kind in CORRECTION_RANGES:
        return {
            key: usual if tree.get(key) is None else tree[key]
            for key, usual in zip(keys, CORRECTION_RANGES[kind], strict=True)
        }
    for key in keys:
        if tree.get(key) is not None:
            raise ValueError(
                f"{key} = {tree[key]!r} is not used by correction = {kind!r}, which has no "
                f"range; leave {key} out"
            )
    return {}
