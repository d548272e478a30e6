"""The events: one slotted dataclass for each Avro record of the same name in `schemas/`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from relax_events.events.immutable import immutable
from relax_events.events.parts import (
    Array,
    ChatMessage,
    CheckpointRef,
    Command,
    FinishReason,
    GenerationKey,
    MediaRef,
    ObjectRef,
    Outcome,
    SampleEvent,
    SampleKey,
    TopicOffset,
    VersionSegment,
    WorkerState,
    now_micros,
)
from relax_events.events.tensors import dense


@immutable(frozen=True, slots=True, kw_only=True)
class PromptGroupIssued:
    """A prompt was admitted for rollout."""

    prompt_group_id: str
    train_step: int
    group_index: int
    attempt: int
    row: int
    required_policy_version: int
    samples_per_prompt: int
    messages: list[ChatMessage]
    answer: str = ""
    metadata: str = "{}"
    tools: str = ""
    completions: list[list[ChatMessage]] = field(default_factory=list)
    skipped_rows: dict[str, str] = field(default_factory=dict)
    seed: int
    issued_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class SampleRolledOut(SampleEvent):
    """A sample was generated."""

    key: SampleKey
    version_segments: list[VersionSegment]
    tokens: Array
    loss_mask: Array
    rollout_logprobs: Array
    num_prompt_tokens: int
    temperature: float
    finish_reason: FinishReason
    completion: str
    messages: list[ChatMessage]
    turns: list[ChatMessage] = field(default_factory=list)
    answer: str = ""
    metadata: str = "{}"
    routed_experts: Array | None = None
    topk_ids: Array | None = None
    path_lengths: list[int] = field(default_factory=list)
    path_media: list[list[MediaRef]] = field(default_factory=list)
    environment_rewards: Array | None = None
    worker_id: str = ""
    rolled_out_at: int = field(default_factory=now_micros)

    @property
    def prompt_media(self) -> Sequence[MediaRef]:
        """The media files among the first `num_prompt_tokens` tokens."""
        parts = (part for message in self.messages for part in message.parts)
        return [part.media for part in parts if part.media is not None]


@immutable(frozen=True, slots=True, kw_only=True)
class PromptGroupRolledOut:
    """Samples of one prompt group were generated together: the same as a `SampleRolledOut` of
    each.
    """

    key: GenerationKey
    lengths: Array
    tokens: Array
    loss_mask: Array
    rollout_logprobs: Array
    num_prompt_tokens: int
    temperature: float
    messages: list[ChatMessage]
    answer: str = ""
    metadata: str = "{}"
    worker_id: str = ""
    sample_index: list[int]
    min_policy_version: list[int]
    max_policy_version: list[int]
    version_segments: list[list[VersionSegment]]
    finish_reason: list[FinishReason]
    completion: list[str]
    turns: list[list[ChatMessage]] = field(default_factory=list)
    rolled_out_at: list[int]


UNREAD_BY_REWARDS = ("rollout_logprobs", "topk_ids", "routed_experts")
"""Arrays of a rolled-out sample that no reward function is given."""


@immutable(frozen=True, slots=True, kw_only=True)
class SampleScored(SampleEvent):
    """A sample was given a reward, or scoring failed (`reward` None, `error` set)."""

    key: SampleKey
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    turn_rewards: Array | None = None
    token_rewards: Array | None = None
    reward_name: str
    reward_digest: str = ""
    error: str | None = None
    judge_response: str = ""
    seconds: float = 0.0
    scored_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class PromptGroupScored:
    """Samples of one prompt group were scored: the same as a `SampleScored` of each."""

    key: GenerationKey
    reward_name: str
    reward_digest: str = ""
    sample_index: list[int]
    min_policy_version: list[int]
    max_policy_version: list[int]
    reward: list[float | None] = field(default_factory=list)
    components: list[dict[str, float]] = field(default_factory=list)
    error: list[str | None] = field(default_factory=list)
    judge_response: list[str] = field(default_factory=list)
    seconds: Array | None = None
    scored_at: list[int]


@immutable(frozen=True, slots=True, kw_only=True)
class LogprobsComputed(SampleEvent):
    """A model other than the engine computed log-probabilities, or values, for a sample."""

    key: SampleKey
    model_role: str
    model_version: int
    values: Array
    topk_ids: Array | None = None
    topk_logprobs: Array | None = None
    computed_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class PromptGroupEvaluated:
    """A model other than the engine computed log-probabilities, or values, for samples of one
    prompt group: the same as a `LogprobsComputed` of each.
    """

    key: GenerationKey
    model_role: str
    model_version: int
    lengths: Array
    values: Array
    sample_index: list[int]
    min_policy_version: list[int]
    max_policy_version: list[int]
    computed_at: list[int]


@immutable(frozen=True, slots=True, kw_only=True)
class SampleReady(SampleEvent):
    """Everything the trainer needs for one sample."""

    key: SampleKey
    tokens: Array
    loss_mask: Array
    rollout_logprobs: Array
    actor_logprobs: Array | None = None
    ref_logprobs: Array | None = None
    values: Array | None = None
    teacher_logprobs: Array | None = None
    topk_ids: Array | None = None
    topk_teacher_logprobs: Array | None = None
    advantages: Array
    reward: float
    components: dict[str, float] = field(default_factory=dict)
    turn_rewards: Array | None = None
    token_rewards: Array | None = None
    temperature: float
    num_prompt_tokens: int
    finish_reason: FinishReason
    media: list[MediaRef] = field(default_factory=list)
    num_prompt_media: int = 0
    routed_experts: Array | None = None
    path_lengths: list[int] = field(default_factory=list)
    path_media: list[list[MediaRef]] = field(default_factory=list)
    version_segments: list[VersionSegment] = field(default_factory=list)
    ready_at: int = field(default_factory=now_micros)

    @property
    def prompt_media(self) -> Sequence[MediaRef]:
        """The media files among the first `num_prompt_tokens` tokens; none in records from before
        they were counted.
        """
        return self.media[: self.num_prompt_media]


@immutable(frozen=True, slots=True, kw_only=True)
class PromptGroupReady:
    """Everything the trainer needs for samples of one prompt group: the same as a `SampleReady` of
    each.
    """

    key: GenerationKey
    lengths: Array
    tokens: Array
    loss_mask: Array
    rollout_logprobs: Array
    actor_logprobs: Array | None = None
    ref_logprobs: Array | None = None
    values: Array | None = None
    teacher_logprobs: Array | None = None
    advantages: Array
    temperature: float
    num_prompt_tokens: int
    sample_index: list[int]
    min_policy_version: list[int]
    max_policy_version: list[int]
    reward: Array
    components: list[dict[str, float]] = field(default_factory=list)
    finish_reason: list[FinishReason]
    version_segments: list[list[VersionSegment]] = field(default_factory=list)
    ready_at: list[int]


@immutable(frozen=True, slots=True, kw_only=True)
class PromptGroupEnded:
    """A prompt group ended: trained, or dropped with a reason."""

    prompt_group_id: str
    train_step: int
    group_index: int
    attempt: int
    row: int
    outcome: Outcome
    reason: str = ""
    policy_version: int
    trainer_version: int
    mean_reward: float | None = None
    ended_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class PolicyVersionPublished:
    """New weights are available."""

    policy_version: int
    artifact: ObjectRef
    transports: list[str]
    start_offsets: list[TopicOffset]
    control_offsets: list[TopicOffset] = field(default_factory=list)
    num_steps_before: int = 0
    outcome_counts_before: dict[str, int] = field(default_factory=dict)
    published_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class PrompterStateSaved:
    """The prompter's state at a position of the log, from which a restarted prompter resumes."""

    positions: list[TopicOffset]
    next_step: int
    next_row: int
    later_rows: list[int]
    in_flight: dict[str, int]
    num_trained: dict[str, int]
    reward_history_rows: Array
    reward_history_values: Array
    saved_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class BroadcastMembership:
    """The workers that receive new weights directly from the trainer, and where others join."""

    membership_version: int
    transport: str
    address: str
    join_token: str
    worker_ids: list[str]
    updated_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class TrainStepCommitted:
    """A train step was committed: its samples in trained order, and its metrics.

    `update_skipped` means that loss or gradient was not finite: the samples count as trained,
    and the new version has the weights of the one before.
    """

    train_step: int
    policy_version: int
    prompt_group_ids: list[str]
    sample_ids: list[str]
    partitions: Array
    offsets: Array
    ranks: Array
    micro_batches: Array
    consumed: list[TopicOffset]
    staleness_counts: list[int]
    metrics: dict[str, float]
    phase_seconds: dict[str, float]
    weights_digest: bytes
    checkpoint: CheckpointRef | None = None
    update_skipped: bool = False
    committed_at: int = field(default_factory=now_micros)

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Partition and offset on advantage.samples of each sample's record, in trained order;
        samples of one record have the same.
        """
        partitions, offsets = (
            dense(column, what="positions of a train step").tolist()
            for column in (self.partitions, self.offsets)
        )
        return list(zip(partitions, offsets, strict=True))


@immutable(frozen=True, slots=True, kw_only=True)
class RunCommanded:
    """The controller sends a command to all workers, one role or one worker."""

    command: Command
    role: str | None = None
    worker_id: str | None = None
    reason: str
    succeeded: bool = False
    arguments: dict[str, str] = field(default_factory=dict)
    commanded_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class RunDescribed:
    """Configuration of the run: its run file and its parent run."""

    run_id: str
    config: str
    config_digest: str
    package_version: str
    parent_run: str | None = None
    parent_version: int | None = None
    from_version: int | None = None
    store_marker: str = ""
    described_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class WorkerHeartbeat:
    """A worker's main loop is alive, or inside a long call that the heartbeat names."""

    worker_id: str
    role: str
    host: str
    pid: int
    state: WorkerState
    num_processed: int
    num_in_flight: int
    policy_version: int = -1
    metrics_port: int = 0
    last_progress_at: int
    busy_since: int | None = None
    activity: str = ""
    activity_since: int | None = None
    activity_deadline_at: int | None = None
    prompt_groups_in_flight: list[str] = field(default_factory=list)
    prompt_groups_written: list[str] = field(default_factory=list)
    sent_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class MetricsReported:
    """Metrics of a worker over an interval."""

    worker_id: str
    role: str
    policy_version: int = -1
    values: dict[str, float]
    reported_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class PolicyEvaluated:
    """A policy version was evaluated on a whole dataset."""

    policy_version: int
    dataset: str
    num_prompts: int
    samples_per_prompt: int
    reward_mean: float | None = None
    reward_stderr: float | None = None
    pass_at_k: dict[str, float] = field(default_factory=dict)
    completion_tokens_mean: float | None = None
    num_truncated: int = 0
    num_unscored: int = 0
    num_failed_prompts: int = 0
    reward_name: str = ""
    reward_digest: str = ""
    weights_digest: bytes
    seconds: float = 0.0
    evaluated_at: int = field(default_factory=now_micros)


@immutable(frozen=True, slots=True, kw_only=True)
class ChangeRequested:
    """Someone asked for a change of the run: who, what, and what became of it."""

    identity: str
    caller: str
    address: str = ""
    command: str
    arguments: str
    outcome: str
    answer: str = ""
    requested_at: int = field(default_factory=now_micros)


Event = (
    PromptGroupIssued
    | SampleRolledOut
    | PromptGroupRolledOut
    | SampleScored
    | PromptGroupScored
    | LogprobsComputed
    | PromptGroupEvaluated
    | SampleReady
    | PromptGroupReady
    | PromptGroupEnded
    | PolicyVersionPublished
    | PrompterStateSaved
    | BroadcastMembership
    | TrainStepCommitted
    | PolicyEvaluated
    | RunCommanded
    | RunDescribed
    | ChangeRequested
    | WorkerHeartbeat
    | MetricsReported
)
