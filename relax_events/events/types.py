"""The events, a dataclass each; the text under a field says what it means.

An event about samples is handled sample by sample: `SampleRolledOut`, `SampleScored`,
`SampleEvaluated` and `SampleReady` are what roles and readers see. On the log such events of one
generation lie together in columns, and `relax_events/events/sample_columns.py` makes the record of
several (`SamplesRolledOut`, ...) from the marks `Each`, `Tokens` and `Packed` of the fields here.
Every other event is an Avro record of the same name in `schemas/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from relax_events.events.immutable import immutable
from relax_events.events.parts import (
    Array,
    ChatMessage,
    CheckpointRef,
    Command,
    Each,
    FinishReason,
    GenerationKey,
    MediaRef,
    ObjectRef,
    Outcome,
    Packed,
    SampleEvent,
    SampleKey,
    Tokens,
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
    """Derived from train step, position and attempt; unique in the run."""
    train_step: int
    """Step for which the prompt group was issued."""
    group_index: int
    """Position among the step's prompt groups."""
    attempt: int
    """0 for the first issue, +1 for each reissue in the same batch slot."""
    row: int
    """Position in the endless, shuffled stream of prompts."""
    required_policy_version: int
    """Lowest policy version that may generate it: train step minus max_staleness."""
    samples_per_prompt: int
    """Samples to generate."""
    messages: list[ChatMessage]
    """The conversation so far."""
    answer: str = ""
    """Reference answer for the reward; may be empty."""
    metadata: str = "{}"
    """JSON object passed on to the reward."""
    tools: str = ""
    """JSON list of the tools that the chat template renders; empty when there are none."""
    completions: list[list[ChatMessage]] = field(default_factory=list)
    """Target completions of the row, one for each sample, as the messages that follow the
    conversation. When empty, supervised algorithms train on the answer."""
    skipped_rows: dict[str, str] = field(default_factory=dict)
    """Rows of the prompt stream that were skipped before this one, in decimal, with the reason."""
    seed: int
    """Seed from which each sample's seed is derived."""
    issued_at: int = field(default_factory=now_micros)
    """When it was issued (UTC)."""
    lost_worker: str | None = None
    """Empty at the first issue. The worker that held it when its heartbeats ended, where it is
    issued once more, under the same id. Null if the writer gave none."""


@immutable(frozen=True, slots=True, kw_only=True)
class SampleRolledOut(SampleEvent):
    """A sample was generated."""

    key: SampleKey
    """The sample's identity: the same in every event about it."""
    version_segments: Each[list[VersionSegment]]
    """Policy versions along the generated tokens, in order; tokens from the environment are not
    counted."""
    tokens: Tokens[Array]
    """int32 [num_tokens]: prompt and completion, including the environment's messages between
    turns."""
    loss_mask: Tokens[Array]
    """uint8 [num_tokens]: 1 where the policy generated the token."""
    rollout_logprobs: Tokens[Array]
    """float32 [num_tokens]: log-probability under the tempered policy where loss_mask is 1, else
    0."""
    num_prompt_tokens: int
    """Tokens before the first generated one."""
    temperature: float
    """Sampling temperature; the trainer divides its logits by it."""
    finish_reason: Each[FinishReason]
    """Why generation ended."""
    completion: Each[str]
    """Decoded text of the last assistant turn, without special tokens."""
    messages: list[ChatMessage]
    """The prompt's conversation."""
    turns: Each[list[ChatMessage]] = field(default_factory=list)
    """Messages after the prompt when the run has an environment: assistant turns and the
    environment's messages, ending with the last assistant turn."""
    answer: str = ""
    """Reference answer for the reward."""
    metadata: str = "{}"
    """JSON object passed on from the prompt."""
    routed_experts: Each[Array | None] = None
    """Experts that the engine chose for each token, which the trainer replays
    (model.routing_replay): [num_tokens - 1, num_layers, top_k], uint8 up to 256 experts, else
    uint16. num_layers counts the layers that have experts. Row t: experts used when token t was the
    input, that is when token t + 1 was sampled. After an engine failure, the rows are those of the
    engine that recomputed the token. Null without routing replay."""
    topk_ids: Each[Array | None] = None
    """int32 [num_loss_tokens, k]: the engine's k most probable tokens at each loss token, most
    probable first."""
    path_lengths: Each[list[int]] = field(default_factory=list)
    """Tokens of each path of an episode that branched, oldest last turn first: tokens, and every
    array along them, hold the paths one after another, each a sequence of its own that starts with
    a prompt. A token that several paths share is a loss token in the first of them alone. The last
    path is the one of `turns`. Empty for a single path."""
    truncated_paths: Each[list[int]] = field(default_factory=list)
    """Where `path_lengths` is given, the paths that were truncated, from 0: their last turn was cut
    off by its length, the context had no room after it, or, for the last path, the session had no
    turn or token left. `finish_reason` is that of the last path. Empty for a single path."""
    path_media: Each[list[list[MediaRef]]] = field(default_factory=list)
    """Where `path_lengths` is given, the media files of each path, in the order of their
    placeholders; the last are those of `messages` and `turns`. Empty for a single path, and where
    no path has media."""
    environment_rewards: Each[Array | None] = None
    """float64 [num_turns]: the reward that a stateful environment gave to each turn of the policy,
    or a harness to the whole sample, in its own unit. Null for other environments."""
    error: Each[str] = ""
    """Why the sample was lost, or late; empty for others."""
    worker_id: str = ""
    """Worker that generated the sample."""
    rolled_out_at: Each[int] = field(default_factory=now_micros)
    """When generation ended (UTC)."""

    @property
    def prompt_media(self) -> Sequence[MediaRef]:
        """The media files among the first `num_prompt_tokens` tokens."""
        parts = (part for message in self.messages for part in message.parts)
        return [part.media for part in parts if part.media is not None]


UNREAD_BY_REWARDS = ("rollout_logprobs", "topk_ids", "routed_experts")
"""Arrays of a rolled-out sample that no reward function is given."""


@immutable(frozen=True, slots=True, kw_only=True)
class SampleScored(SampleEvent):
    """A sample was given a reward, or scoring failed (`reward` None, `error` set)."""

    key: SampleKey
    """The sample's identity: the same in every event about it."""
    reward: Each[float | None] = None
    """The reward, including its per-turn and per-token parts; null when scoring failed."""
    components: Each[dict[str, float]] = field(default_factory=dict)
    """Named parts of the reward."""
    turn_rewards: Each[Array | None] = None
    """Part of the reward assigned to each turn, in order; null without per-turn rewards."""
    token_rewards: Each[Array | None] = None
    """Part of the reward assigned to each loss token; null without per-token rewards."""
    reward_name: str
    """Name of the reward function."""
    reward_digest: str = ""
    """Digest of the reward function's source, which identifies its version."""
    error: Each[str | None] = None
    """Why scoring failed."""
    judge_response: Each[str] = ""
    """Text that the LLM judge wrote; empty without a judge."""
    seconds: Packed[float] = 0.0
    """Time that the reward function took."""
    scored_at: Each[int] = field(default_factory=now_micros)
    """When it was scored (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class SampleEvaluated(SampleEvent):
    """A model other than the engine computed log-probabilities, or values, for a sample."""

    key: SampleKey
    """The sample's identity: the same in every event about it."""
    model_role: str
    """reference, actor, teacher or critic."""
    model_version: int
    """Policy version of the model's weights; 0 for the reference."""
    values: Tokens[Array]
    """float32 [num_tokens]: log-probabilities (or values) where loss_mask is 1, else 0."""
    topk_ids: Each[Array | None] = None
    """int32 [num_loss_tokens, k]: the model's k most probable tokens at each loss token, most
    probable first; null when the sample gave the tokens."""
    topk_logprobs: Each[Array | None] = None
    """float32 [num_loss_tokens, k]: log-probabilities of these tokens, or of the sample's
    topk_ids."""
    computed_at: Each[int] = field(default_factory=now_micros)
    """When they were computed (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class SampleReady(SampleEvent):
    """Everything the trainer needs for one sample."""

    key: SampleKey
    """The sample's identity: the same in every event about it."""
    tokens: Tokens[Array]
    """int32 [num_tokens]: prompt and completion."""
    loss_mask: Tokens[Array]
    """uint8 [num_tokens]: 1 where the policy generated the token."""
    rollout_logprobs: Tokens[Array]
    """float32 [num_tokens]: the engine's log-probabilities."""
    actor_logprobs: Tokens[Array | None] = None
    """float32 [num_tokens]: the actor-forward role's log-probabilities."""
    ref_logprobs: Tokens[Array | None] = None
    """float32 [num_tokens]: the reference model's log-probabilities."""
    values: Tokens[Array | None] = None
    """float32 [num_tokens]: the critic's values where loss_mask is 1, else 0."""
    teacher_logprobs: Tokens[Array | None] = None
    """float32 [num_tokens]: the teacher's log-probabilities."""
    topk_ids: Each[Array | None] = None
    """int32 [num_loss_tokens, k]: tokens at which policy and teacher are compared, most probable
    first."""
    topk_teacher_logprobs: Each[Array | None] = None
    """float32 [num_loss_tokens, k]: the teacher's log-probabilities of topk_ids."""
    advantages: Tokens[Array]
    """float32 [num_tokens]: advantage where loss_mask is 1, else 0."""
    reward: Packed[float | None]
    """The sample's reward; null, which is NaN in a record, for a sample that has no part in
    training: it was lost, or its scoring failed."""
    components: Each[dict[str, float]] = field(default_factory=dict)
    """Named parts of the reward; empty when it is a single number."""
    turn_rewards: Each[Array | None] = None
    """Part of the reward assigned to each turn, in order; null without per-turn rewards."""
    token_rewards: Each[Array | None] = None
    """Part of the reward assigned to each loss token; null without per-token rewards."""
    temperature: float
    """Sampling temperature; the trainer divides its logits by it."""
    num_prompt_tokens: int
    """Tokens before the first generated one."""
    finish_reason: Each[FinishReason]
    """Why generation ended."""
    media: Each[list[MediaRef]] = field(default_factory=list)
    """All media of the sample, in order of appearance."""
    num_prompt_media: int = 0
    """How many of `media` belong to the prompt."""
    routed_experts: Each[Array | None] = None
    """Experts that the engine chose for each token, which the trainer replays
    (model.routing_replay): [num_tokens - 1, num_layers, top_k], uint8 up to 256 experts, else
    uint16. num_layers counts the layers that have experts. Row t: experts used when token t was the
    input, that is when token t + 1 was sampled. After an engine failure, the rows are those of the
    engine that recomputed the token. Null without routing replay."""
    path_lengths: Each[list[int]] = field(default_factory=list)
    """Tokens of each path of an episode that branched, oldest last turn first: tokens, and every
    array along them, hold the paths one after another, each a sequence of its own that starts with
    a prompt. A token that several paths share is a loss token in the first of them alone. The last
    path is the one of `turns`. Empty for a single path."""
    truncated_paths: Each[list[int]] = field(default_factory=list)
    """Where `path_lengths` is given, the paths that were truncated, from 0: their last turn was cut
    off by its length, the context had no room after it, or, for the last path, the session had no
    turn or token left. `finish_reason` is that of the last path. Empty for a single path."""
    path_media: Each[list[list[MediaRef]]] = field(default_factory=list)
    """Where `path_lengths` is given, the media files of each path, in the order of their
    placeholders; `media` is empty then. Empty for a single path, and where no path has media."""
    version_segments: Each[list[VersionSegment]] = field(default_factory=list)
    """Policy versions along the loss tokens, in order. Empty where the data brought the completion:
    then each token counts as of the key's min_policy_version."""
    ready_at: Each[int] = field(default_factory=now_micros)
    """When it was ready (UTC)."""

    @property
    def prompt_media(self) -> Sequence[MediaRef]:
        """The media files among the first `num_prompt_tokens` tokens."""
        return self.media[: self.num_prompt_media]


@immutable(frozen=True, slots=True, kw_only=True)
class SampleColumns:
    """A record's samples, all of one generation. `sample_columns.py` makes the fields behind these
    from those of a sample's event.
    """

    key: GenerationKey
    """The identity of the samples' generation: the same in every event about it."""
    sample_index: list[int]
    """For each sample: position in the prompt group."""
    min_policy_version: list[int]
    """For each sample: lowest version among this sample's tokens."""
    max_policy_version: list[int]
    """For each sample: highest version among this sample's tokens."""


@immutable(frozen=True, slots=True, kw_only=True)
class PromptGroupEnded:
    """A prompt group ended: trained, or dropped with a reason."""

    prompt_group_id: str
    """Derived from train step, position and attempt; unique in the run."""
    train_step: int
    """Step for which the prompt group was issued."""
    group_index: int
    """Position among the step's prompt groups."""
    attempt: int
    """Attempt of the prompt group."""
    row: int
    """Position in the stream of prompts."""
    outcome: Outcome
    """How it ended."""
    reason: str = ""
    """Why; empty for trained."""
    policy_version: int
    """Version that owns the prompt group's slot."""
    trainer_version: int
    """Trainer's version when it ended."""
    mean_reward: float | None = None
    """Mean reward of its samples."""
    ended_at: int = field(default_factory=now_micros)
    """When it ended (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class PolicyVersionPublished:
    """New weights are available."""

    policy_version: int
    """The version, 0 for the initial weights."""
    artifact: ObjectRef
    """Manifest of the safetensors artifact."""
    transports: list[str]
    """How the tensors can be read: store, nccl, gloo."""
    start_offsets: list[TopicOffset]
    """First offset of this version's records in each partition of the sample topics."""
    control_offsets: list[TopicOffset] = field(default_factory=list)
    """End offsets of control.train-steps, control.prompt-group-outcomes and control.policy-versions
    before the transaction that published this version. A reader that starts there misses only what
    the next two fields summarise; empty when the writer gave none."""
    num_steps_before: int = 0
    """Train steps committed before that transaction."""
    outcome_counts_before: dict[str, int] = field(default_factory=dict)
    """Prompt groups that ended before that transaction, by outcome; without external prompt
    groups."""
    takes_spares: bool = False
    """Whether the trainer takes prompt groups of spare batch slots."""
    published_at: int = field(default_factory=now_micros)
    """When it was published (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class PrompterStateSaved:
    """The prompter's state at a position of the log, from which a restarted prompter resumes."""

    positions: list[TopicOffset]
    """Next offsets in prompt.groups and control.prompt-group-outcomes."""
    next_step: int
    """First train step without an issued prompt group."""
    next_row: int
    """Lowest row of the prompt stream that was neither issued nor skipped."""
    later_rows: list[int]
    """Rows above next_row that were issued or skipped."""
    in_flight: dict[str, int]
    """Rows of the prompt groups that were issued and have not ended, by prompt group id."""
    num_trained: dict[str, int]
    """Trained prompt groups by train step, for steps whose outcomes are not complete yet."""
    reward_history_rows: Array
    """[entries, 2]: dataset and row of past prompts, oldest first; empty when prompt selection does
    not use rewards."""
    reward_history_values: Array
    """[entries]: mean reward of the prompt group of each such row."""
    saved_at: int = field(default_factory=now_micros)
    """When the state was written (UTC)."""
    writer_id: str = ""
    """Random, of the prompter's process. The prompter that wrote the newest state is the run's
    prompter; another one ends."""
    open_step: int = -1
    """First train step whose batch is not trained, under the order fifo; -1 where the writer did
    not keep it."""
    ended: dict[str, int] = field(default_factory=dict)
    """Rows of the filtered and failed prompt groups of the issued steps from open_step on, by
    prompt group id."""
    returned_rows: list[int] = field(default_factory=list)
    """Rows of spares that were not trained: they are issued again next."""
    slots_used: list[int] = field(default_factory=list)
    """Batch slots that the newest trained steps took, oldest first: how many prompt groups can be
    trained follows from it."""


@immutable(frozen=True, slots=True, kw_only=True)
class BroadcastMembership:
    """The workers that receive new weights directly from the trainer, and where others join."""

    membership_version: int
    """Number of this list; a newer list replaces all older ones."""
    transport: str
    """How the tensors are sent: gloo or nccl."""
    address: str
    """Where the trainer accepts engine connections, host:port."""
    join_token: str
    """Token that an engine must present: a client that may read this topic may receive the
    weights."""
    worker_ids: list[str]
    """Workers whose engines are members, sorted."""
    updated_at: int = field(default_factory=now_micros)
    """When the list was written (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class TrainStepCommitted:
    """A train step was committed: its samples in trained order, and its metrics.

    `update_skipped` means that loss or gradient was not finite: the samples count as trained,
    and the new version has the weights of the one before. So it has after `update_held`.
    """

    train_step: int
    """The step, which turns policy version train_step into train_step + 1."""
    policy_version: int
    """Version that the step produced."""
    prompt_group_ids: list[str]
    """Trained prompt groups, in trained order."""
    sample_ids: list[str]
    """Trained samples, in trained order."""
    partitions: Array
    """int32 [num_samples]: partition of each sample's SampleReady record."""
    offsets: Array
    """int64 [num_samples]: offset of each sample's SampleReady record."""
    ranks: Array
    """int32 [num_samples]: rank that trained the sample."""
    micro_batches: Array
    """int32 [num_samples]: micro-batch of the rank in which the sample was trained."""
    consumed: list[TopicOffset]
    """Offsets in advantage.samples and prompt.end-requests below which every record has been
    decided."""
    staleness_counts: list[int]
    """Trained samples by staleness: index 0 is on-policy."""
    metrics: dict[str, float]
    """Metrics of the step by name, such as loss and mean reward."""
    phase_seconds: dict[str, float]
    """Duration of each phase of the step."""
    weights_digest: bytes
    """Digest of the produced weights, to verify recovery by replay."""
    checkpoint: CheckpointRef | None = None
    """Newest complete checkpoint."""
    update_skipped: bool = False
    """Whether the optimizer update was skipped because loss or gradient was not finite; the new
    version then has the weights of the one before."""
    update_held: bool = False
    """Whether the policy made no update because only the critic learned (`critic.warmup_steps`);
    the new version then has the weights of the one before."""
    max_cells: int = 0
    """Budget in tokens of the passes in which the step was trained, after an out-of-memory error; 0
    where it is `trainer.max_tokens_per_micro_batch`."""
    committed_at: int = field(default_factory=now_micros)
    """When the step was committed (UTC)."""

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
    """The command."""
    role: str | None = None
    """Addressed role; null for all."""
    worker_id: str | None = None
    """Addressed worker; null for all of the role."""
    reason: str
    """Why the command was sent."""
    succeeded: bool = False
    """For stop: whether the run reached its goal."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Arguments of the command."""
    commanded_at: int = field(default_factory=now_micros)
    """When the command was sent (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class RunDescribed:
    """Configuration of the run: its run file and its parent run."""

    run_id: str
    """The run that this log belongs to."""
    config: str
    """The resolved run file as JSON; of the broker section only the keys that shape topics, never
    addresses or secrets."""
    config_digest: str
    """SHA-256 of the resolved run file, hexadecimal, without the broker's address."""
    package_version: str
    """Version of Relax Events that executes the run."""
    parent_run: str | None = None
    """The run whose weights this run started from, and whose samples it trains on when it is a
    replay; null without a parent."""
    parent_version: int | None = None
    """Policy version of the parent that this run started from."""
    from_version: int | None = None
    """Policy version from which this configuration applies; null from the start of the run."""
    store_marker: str = ""
    """Value of the marker object in the run's object store, 32 hexadecimal digits: objects are
    deleted only from a store with this marker. Empty when the run gives none."""
    chat_template: str = ""
    """Text of the chat template that prompts are rendered by. Empty when they are rendered by none,
    or the writer has no model folder."""
    topic_ids: dict[str, str] = field(default_factory=dict)
    """Kafka's ids of the run's topics, by name: a topic that was created again under its name has
    another."""
    described_at: int = field(default_factory=now_micros)
    """When this was written (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class WorkerHeartbeat:
    """A worker's main loop is alive, or inside a long call that the heartbeat names."""

    worker_id: str
    """Role and ordinal, for example rollout-0."""
    role: str
    """Role of the worker."""
    host: str
    """Host name."""
    pid: int
    """Process id."""
    state: WorkerState
    """State of the main loop."""
    num_processed: int
    """Records processed since the worker started."""
    num_in_flight: int
    """Records in flight."""
    policy_version: int = -1
    """Version of the weights that the worker uses; -1 when it has none."""
    metrics_port: int = 0
    """Port of its metrics endpoint; 0 when it has none."""
    last_progress_at: int
    """When the worker last made progress: a record processed, a token generated, a step replayed
    (UTC)."""
    busy_since: int | None = None
    """Since when it has had work without making progress (UTC); null when it has none."""
    activity: str = ""
    """The long call that the main loop is inside, for example publish weights; empty otherwise."""
    activity_since: int | None = None
    """When that call began (UTC); null otherwise."""
    activity_deadline_at: int | None = None
    """When that call counts as hung (UTC); null otherwise."""
    prompt_groups_in_flight: list[str] = field(default_factory=list)
    """Prompt groups that a rollout worker has leased and not yet written."""
    prompt_groups_written: list[str] = field(default_factory=list)
    """The newest prompt groups whose samples, or whose failure, a rollout worker has written."""
    sent_at: int = field(default_factory=now_micros)
    """When the heartbeat was sent (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class MetricsReported:
    """Metrics of a worker over an interval."""

    worker_id: str
    """Worker that reports."""
    role: str
    """Role of the worker."""
    policy_version: int = -1
    """Newest policy version that the worker knows."""
    values: dict[str, float]
    """Metrics by name."""
    reported_at: int = field(default_factory=now_micros)
    """When they were reported (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class PolicyEvaluated:
    """A policy version was evaluated on a whole dataset."""

    policy_version: int
    """Version whose weights generated every sample."""
    dataset: str
    """Name of the dataset in the run file."""
    num_prompts: int
    """Prompts of the dataset, including those that failed."""
    samples_per_prompt: int
    """Samples generated for each prompt."""
    reward_mean: float | None = None
    """Mean over prompts of the mean reward of their scored samples; null when nothing was
    scored."""
    reward_stderr: float | None = None
    """Standard error of that mean over prompts; null with fewer than two."""
    pass_at_k: dict[str, float] = field(default_factory=dict)
    """By k in decimal: unbiased estimate of the chance that one of k samples passes, mean over
    prompts."""
    completion_tokens_mean: float | None = None
    """Mean length of the completions, in tokens; null when there are none."""
    num_truncated: int = 0
    """Samples that ended at the length limit."""
    num_unscored: int = 0
    """Samples on which the reward function failed; no metric includes them."""
    num_failed_prompts: int = 0
    """Prompts that could not be rendered or generated; no metric includes them."""
    reward_name: str = ""
    """Reward function."""
    reward_digest: str = ""
    """Digest of the reward function, where known."""
    weights_digest: bytes
    """Digest of the weights, from the train step that published them."""
    seconds: float = 0.0
    """Duration of the evaluation."""
    evaluated_at: int = field(default_factory=now_micros)
    """When it ended (UTC)."""


@immutable(frozen=True, slots=True, kw_only=True)
class ChangeRequested:
    """Someone asked for a change of the run: who, what, and what became of it."""

    identity: str
    """How the caller was known: token for the API, account for a command that writes to the log."""
    caller: str
    """Account and host, account@host; through the API what the client says of itself."""
    address: str = ""
    """Where a call came from; empty for a command."""
    command: str
    """The route or the command, such as POST /rollout/scale_out."""
    arguments: str
    """Its arguments as JSON, shortened to 4000 characters."""
    outcome: str
    """accepted, refused or failed."""
    answer: str = ""
    """The answer to the caller, shortened to 1000 characters."""
    requested_at: int = field(default_factory=now_micros)
    """When it was answered (UTC)."""


Sample = SampleRolledOut | SampleScored | SampleEvaluated | SampleReady
Event = (
    PromptGroupIssued
    | SampleRolledOut
    | SampleScored
    | SampleEvaluated
    | SampleReady
    | SampleColumns
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
