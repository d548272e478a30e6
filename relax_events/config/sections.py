"""The sections of a run file. Every key is documented where it is declared; `docs/reference/config.md` is made from here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

RUN_ID_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$"
GUARDED_CLIENT_KEYS = frozenset(
    {"enable.idempotence", "isolation.level", "check.crcs", "enable.auto.commit", "acks", "auto.offset.reset", "transactional.id", "group.id"}
)
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A frozen table of a run file that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class RunSection(Section):
    """What is trained for how long, and how stale a sample may be."""

    id: Annotated[str, Field(pattern=RUN_ID_PATTERN)]
    """Names the run: its topics start with `relax.<id>.`, its files lie in `<directory>/runs/<id>`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds data order, sampling and initialisation."""
    num_steps: Positive = 100
    """Optimizer steps until the run has reached its goal."""
    groups_per_step: Positive = 16
    """Prompt groups in one train step."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Samples drawn for each prompt."""
    mode: Literal["sync", "async"] = "async"
    """`sync`: engine and trainer alternate on the same devices, strictly on-policy. `async`: both work all the time."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """How many policy versions a sample may be behind the trainer; 0 is strictly on-policy."""
    on_new_version: Literal["finish", "swap", "restart"] = "finish"
    """What an engine does with running samples when a version arrives: finish them first, swap the weights under them
    (approximate: the kept cache is of the old weights), or recompute their prefix under the new weights."""
    batch_order: Literal["in_order", "ready_first"] = "in_order"
    """`in_order`: step s trains the prompt groups issued for it. `ready_first`: whatever in the window is complete."""
    max_failed_groups: Positive = 64
    """The run stops with an error after so many prompt groups failed in a row."""
    directory: Path = Path(".relax")
    """Where runs, models and the embedded broker keep their files."""

    @model_validator(mode="after")
    def _sync_is_on_policy(self) -> RunSection:
        if self.mode == "sync" and self.max_staleness:
            raise ValueError(f"mode = 'sync' is on-policy, got max_staleness = {self.max_staleness}; set run.max_staleness = 0 or run.mode = 'async'")
        return self


class BrokerConfig(Section):
    """Where the log is, and how its clients behave."""

    bootstrap_servers: str = "embedded"
    """`embedded` starts a real broker on this machine; otherwise `host:port,host:port`."""
    shards: Positive = 2
    """Partitions for each policy-version slot: how many workers of a role, or trainer ranks, can share one version."""
    queue_partitions: Positive = 4
    """Partitions of the prompt queue; bounds the rollout workers of the consumer-group way."""
    replication_factor: Positive = 1
    """Copies of each partition."""
    lease: Literal["share_group", "consumer_group"] = "share_group"
    """How rollout workers divide the prompt queue; `consumer_group` is for brokers without share groups."""
    lease_seconds: Seconds = 900.0
    """How long a prompt group may take before another worker may have it (share groups)."""
    session_timeout_seconds: Seconds = 6.0
    """After how long the broker gives a silent member's partitions to another."""
    request_timeout_seconds: Seconds = 30.0
    """Deadline of every single call to the broker."""
    linger_ms: Annotated[float, Field(ge=0)] = 2.0
    """How long a producer waits to fill a record batch, in milliseconds."""
    compression: Literal["none", "lz4", "zstd"] = "none"
    """Compression of sample topics."""
    client: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Raw librdkafka settings, for security and tuning. Keys that carry a promise of ours are refused."""

    @field_validator("client")
    @classmethod
    def _promises_stay(cls, client: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(GUARDED_CLIENT_KEYS & client.keys()):
            raise ValueError(f"{taken[0]} carries a delivery promise and can't be overridden; remove it from broker.client")
        return client


class ObjectsConfig(Section):
    """Where large things lie: weights, checkpoints, media, big tensors."""

    uri: str = ""
    """`file:///path`, `s3://bucket/prefix`, `gs://bucket/prefix` or `memory://`; empty means `<run directory>/objects`."""
    inline_max_bytes: Positive = 262_144
    """Tensors above this travel by reference (claim check) rather than inside the record."""


class TinyModelConfig(Section):
    """A small model of a real architecture, made on this machine with random weights and a tokenizer of its own."""

    family: Literal["qwen3", "qwen3_moe"] = "qwen3"
    """Architecture."""
    hidden_size: Annotated[int, Field(ge=32, multiple_of=32)] = 64
    """Width of the model."""
    num_layers: Positive = 2
    """Decoder layers."""
    vocab_size: Annotated[int, Field(ge=256)] = 256
    """Byte symbols and learnt merges; 256 leaves one token per byte."""
    corpus_rows: Positive = 1000
    """Prompts and answers of the data that the tokenizer is trained on."""


class ModelConfig(Section):
    """The policy's initial weights and tokenizer."""

    path: Path
    """A folder in Hugging Face layout: config, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in engine and trainer."""
    device: str = "auto"
    """`auto` takes a GPU where there is one, else the CPU."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of the model."""
    tiny: TinyModelConfig | None = None
    """How `relax models prepare` makes the model where `path` does not exist; without it the folder must be there."""


class SamplingConfig(Section):
    """How the next token is drawn."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits; log-probabilities are those of the tempered distribution."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keeps the smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keeps the k most probable tokens; 0 keeps all."""
    max_new_tokens: Positive = 32
    """Ends a sample with finish reason `length`."""


class EngineConfig(Section):
    """The inference engine of a rollout worker."""

    name: str = "transformers"
    """Entry point in the group `relax_events.engines`."""
    max_prompt_groups: Positive = 32
    """Prompt groups that one worker holds at a time (leases)."""
    max_running_samples: Positive = 256
    """Samples decoded side by side."""
    max_context_tokens: Positive = 512
    """Prompt and completion together; longer prompts fail with a reason."""
    threads: Annotated[int, Field(ge=0)] = 1
    """CPU threads of the engine; 0 leaves the choice to torch."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts."""


class DataConfig(Section):
    """The prompts."""

    source: str
    """`jsonl:<path>`, or `reasoning_gym:<task>` for generated problems with their own verifier."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column that holds the reference answer for the reward."""
    system_prompt: str = ""
    """Put before every prompt as a system message, when not empty."""
    chat_template: bool = True
    """Render by the tokenizer's chat template; false takes the prompt as it stands."""
    size: Positive = 1000
    """Number of generated problems (generated sources only)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the problem generator (generated sources only)."""
    shuffle: bool = True
    """A new order each epoch, derived from the run's seed."""


class RewardConfig(Section):
    """How a sample is scored."""

    function: str = "exact_match"
    """A name of the reward hub, or `path/to/file.py:function`."""
    timeout_seconds: Seconds = 10.0
    """A call that takes longer is killed and counted as failed."""
    processes: Positive = 1
    """Child processes that run the function."""
    memory_bytes: Positive = 4 * 1024**3
    """Address space that one child process may take."""


class AlgorithmConfig(Section):
    """The policy-gradient objective."""

    name: Literal["grpo"] = "grpo"
    """Advantage and loss family."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    normalise_std: bool = True
    """Divide centred rewards by the group's standard deviation."""
    aggregation: Literal["token_mean", "sample_mean"] = "token_mean"
    """Mean over all tokens of the step, or over tokens of a sample first and then over samples."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL estimate against the reference model; above 0 the reference role is needed."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy || reference)."""
    old_logprobs: Literal["rollout", "actor"] = "rollout"
    """Whose log-probabilities stand below the ratio: the engine's, or the actor-forward role's."""
    filter_uniform_rewards: bool = False
    """Drop prompt groups whose rewards are all equal and issue others in their place (dynamic sampling)."""


class TrainerConfig(Section):
    """The optimizer and what surrounds it."""

    backend: str = "torch"
    """Entry point in the group `relax_events.trainer_backends`."""
    ranks: Positive = 1
    """Data-parallel processes; above 1 they are started by torchrun."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """AdamW's learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate grows linearly from 0."""
    schedule: Literal["constant", "linear"] = "constant"
    """What follows the warm-up: the same rate to the end, or a linear fall that would reach 0 at `run.num_steps`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    max_tokens_per_micro_batch: Positive = 8192
    """Token budget of one packed micro-batch."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints; between them recovery replays the log."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept."""
    threads: Annotated[int, Field(ge=0)] = 1
    """CPU threads of a rank; 0 leaves the choice to torch."""
    collective_timeout_seconds: Seconds = 120.0
    """Deadline of a collective between ranks."""


class WorkersConfig(Section):
    """How many processes of each role `relax run` starts, and how it tends them."""

    rollout: Positive = 1
    """Rollout workers."""
    reward: Positive = 1
    """Reward workers."""
    reference: Positive = 1
    """Reference workers (when the algorithm needs them)."""
    actor_forward: Positive = 1
    """Actor-forward workers (when the algorithm needs them)."""
    advantage: Positive = 1
    """Advantage workers."""
    drain_seconds: Seconds = 20.0
    """How long a worker may take to finish its work after SIGTERM."""
    beat_seconds: Seconds = 1.0
    """Interval of heartbeats."""
    hung_seconds: Seconds = 60.0
    """A worker whose work loop has not beaten for so long is killed and started again."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Restarts of one worker within a minute before the run is given up."""


class WarmStartConfig(Section):
    """A short supervised start, where reinforcement learning from random weights finds nothing to reinforce."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Supervised steps at most; 0 means none."""
    target_loss: Annotated[float, Field(ge=0)] = 0.0
    """End the warm start once the loss per answer token, in nats, is below this: what is left is for reinforcement learning."""
    batch_size: Positive = 64
    """Problems in a supervised step."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """AdamW's learning rate in the supervised steps."""


class TelemetryConfig(Section):
    """Logs and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log event that is written."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """`auto` writes for people on a terminal and JSON elsewhere."""
    metrics_host: str = "127.0.0.1"
    """Address on which a worker serves `/metrics`, `/healthz` and `/readyz`."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the same; 0 takes a free one and logs it. Above 0 it is that of the first worker on a machine: `relax run` gives the
    others the ports behind it, and so do the ranks of a trainer."""
    tensorboard: bool = False
    """The metrics role writes TensorBoard files into the run's directory (extra `trackers`)."""

    def port_of(self, place: int) -> int:
        """Return the port of the worker that is so many places behind the first on its machine; 0 stays 0."""
        return self.metrics_port + place if self.metrics_port else 0


class RunConfig(Section):
    """One training run."""

    run: RunSection
    model: ModelConfig
    data: DataConfig
    broker: BrokerConfig = BrokerConfig()
    objects: ObjectsConfig = ObjectsConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    workers: WorkersConfig = WorkersConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _ranks_have_shards(self) -> RunConfig:
        if self.trainer.ranks > self.broker.shards:
            ranks = self.trainer.ranks
            need = f"trainer.ranks = {ranks} needs broker.shards >= {ranks}, got {self.broker.shards}"
            raise ValueError(f"every rank reads shards of its own: {need}; set broker.shards or trainer.ranks")
        return self

    @property
    def run_directory(self) -> Path:
        """Where this run keeps its logs, reports and, unless told otherwise, its objects."""
        return self.run.directory / "runs" / self.run.id

    @property
    def objects_uri(self) -> str:
        """The object store, with the default filled in."""
        return self.objects.uri or (self.run_directory.resolve() / "objects").as_uri()

    def roles(self) -> dict[str, int]:
        """Every role that this run needs, with the number of its workers."""
        counts = {"controller": 1, "metrics": 1, "prompter": 1, "rollout": self.workers.rollout, "reward": self.workers.reward}
        if self.algorithm.kl_coefficient > 0:
            counts["reference"] = self.workers.reference
        if self.algorithm.old_logprobs == "actor":
            counts["actor-forward"] = self.workers.actor_forward
        return counts | {"advantage": self.workers.advantage, "trainer": 1}
