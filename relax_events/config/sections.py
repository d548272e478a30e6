"""The sections of a run file. Every key is documented where it is declared; `docs/reference/config.md` is made from here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

RUN_ID_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$"
GUARDED_CLIENT_KEYS = frozenset(
    {"enable.idempotence", "isolation.level", "check.crcs", "enable.auto.commit", "acks", "auto.offset.reset", "transactional.id", "group.id"}
)
SECRET_CLIENT_KEYS = frozenset(
    {
        "sasl.password",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "sasl.oauthbearer.assertion.private.key.pem",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
    }
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
    """Optimizer steps until the run has reached its goal; a fork counts on from its source's."""
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
    retain_versions: Annotated[int, Field(ge=0)] = 0
    """How many of the newest policy versions keep their records on the log; 0 keeps all, so that every version can be replayed."""
    directory: Path = Path(".relax")
    """Where runs, models and the embedded broker keep their files."""

    @model_validator(mode="after")
    def _sync_is_on_policy(self) -> RunSection:
        if self.mode == "sync" and self.max_staleness:
            raise ValueError(f"mode = 'sync' is on-policy, got max_staleness = {self.max_staleness}; set run.max_staleness = 0 or run.mode = 'async'")
        return self

    @model_validator(mode="after")
    def _window_is_retained(self) -> RunSection:
        if 0 < self.retain_versions <= self.max_staleness:
            rule = f"retain_versions must be 0 or above max_staleness = {self.max_staleness}"
            raise ValueError(f"{rule}, got {self.retain_versions}: the trainer still reads those versions; set run.retain_versions")
        return self


def secret_remedy(key: str) -> str:
    """Say where a secret librdkafka setting belongs."""
    if key == "sasl.password":
        return "write it into a file and name that in broker.password_file, or set BROKER_PASSWORD in the environment"
    return f"write it into a file and name that in broker.secret_files: {{ {key!r} = \"/path/to/file\" }}"


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
    credentials: Path | None = None
    """Folder made by `relax broker secure`. Every process takes its own principal's password from it, and the embedded broker lets
    nobody else in. Empty means no security, or what the next four keys say."""
    principal: str = ""
    """Whom to be among the folder's principals; empty means the worker's role, and `operator` for all other commands."""
    username: str = ""
    """User of SASL/SCRAM-SHA-512 over TLS; its password is in `password_file`, or in the environment as `BROKER_PASSWORD`."""
    password_file: Path | None = None
    """File that holds nothing but the password."""
    ca_file: Path | None = None
    """PEM file of the authority that signed the brokers' certificates; empty means those that this machine trusts."""
    secret_files: dict[str, Path] = Field(default_factory=dict)
    """librdkafka settings that are secrets, each in a file of its own, for example `"ssl.key.password" = "/run/secrets/key"`."""
    schema_registry: str = ""
    """Address of a schema registry with Confluent's interface, `http://host:port/path`, whose schema ids then frame the records; empty
    means Avro's single-object encoding. Records of both kinds are read either way."""
    schema_registry_login_file: Path | None = None
    """File that holds `user:password` for the registry, which may also stand in the environment as `SCHEMA_REGISTRY_LOGIN`."""
    client: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Raw librdkafka settings, for security and tuning. Keys that carry a promise of ours are refused, and so are secrets."""

    @field_validator("secret_files")
    @classmethod
    def _only_secrets(cls, secret_files: dict[str, Path]) -> dict[str, Path]:
        if strange := sorted(secret_files.keys() - SECRET_CLIENT_KEYS):
            raise ValueError(f"{strange[0]} is no secret setting of librdkafka, which are {', '.join(sorted(SECRET_CLIENT_KEYS))}; use broker.client")
        return secret_files

    @field_validator("schema_registry")
    @classmethod
    def _is_an_address_without_login(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://[^\s@]+", url):
            shown = re.sub(r"//[^/]*@", "//...@", url)
            raise ValueError(f"must be http(s)://host:port/path without a login, got {shown!r}; a login goes into broker.schema_registry_login_file")
        return url

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
    allowed_roots: tuple[str, ...] = ()
    """Where media that a record refers to may lie besides the run's own store, for example `s3://pictures/`; empty means nowhere."""
    moved_from: tuple[str, ...] = ()
    """Stores whose objects were copied into this one, as `relax topics import` names them: references to those are found here."""
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
    """Entry point in the group `relax_events.engines`, or `path/to/file.py:Class`."""
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

    name: Literal["grpo", "gspo"] = "grpo"
    """Advantage and loss family. `grpo` has a ratio for each token; `gspo` one for each sample, with `aggregation = "sample_mean"` and
    clip ranges around 3e-4 and 4e-4."""
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
    """Entry point in the group `relax_events.trainer_backends`, or `path/to/file.py:Class`."""
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


class SourceSection(Section):
    """The run that this one goes back to: for its weights, and for its rollouts when it replays them. Empty for a run of its own.

    Versions are counted on from the source's, so a run from version 30 begins with train step 30.
    """

    run: Annotated[str, Field(pattern=rf"{RUN_ID_PATTERN}|^$")] = ""
    """Id of the source, on the same cluster."""
    rollouts: Literal["recorded", "live"] = "recorded"
    """`recorded`: a replay, which trains the batches that the source's log names. `live`: a fork, which generates its own."""
    from_version: Annotated[int, Field(ge=0)] = 0
    """The source's policy version to start from; its first one is the model of `model.path`."""
    until_version: Annotated[int, Field(ge=-1)] = -1
    """Version at which a replay has reached its goal; -1 is the end of the source's log."""
    follow: bool = False
    """A second learner: a replay that goes on as the source goes on, and ends after it."""
    scores: str = ""
    """Train a replay on these scores of a rescoring instead of the recorded rewards."""
    from_row: Annotated[int, Field(ge=0)] = 0
    """Row of the prompt stream with which a fork goes on."""

    @model_validator(mode="after")
    def _is_possible(self) -> SourceSection:
        if 0 <= self.until_version <= self.from_version:
            raise ValueError(f"source.until_version must be above source.from_version = {self.from_version}, got {self.until_version}; or -1 for all")
        if self.scores and self.follow:
            raise ValueError(f"source.scores = {self.scores!r} are those of a rescoring, which has to be there before; set source.follow = false")
        return self


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
    source: SourceSection = SourceSection()
    workers: WorkersConfig = WorkersConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _ranks_have_shards(self) -> RunConfig:
        if self.trainer.ranks > self.broker.shards:
            ranks = self.trainer.ranks
            need = f"trainer.ranks = {ranks} needs broker.shards >= {ranks}, got {self.broker.shards}"
            raise ValueError(f"every rank reads shards of its own: {need}; set broker.shards or trainer.ranks")
        return self

    @model_validator(mode="after")
    def _source_leads_here(self) -> RunConfig:
        source, run = self.source, self.run
        if source.run == run.id:
            raise ValueError(f"source.run must be another run than run.id = {run.id!r}; give this one an id of its own")
        if source.run and not self.is_replay and run.num_steps <= source.from_version:
            raise ValueError(f"a fork counts on from version {source.from_version}, so run.num_steps must be above it, got {run.num_steps}")
        return self

    @property
    def is_replay(self) -> bool:
        """Whether this run trains another run's rollouts and generates none."""
        return bool(self.source.run) and self.source.rollouts == "recorded"

    @property
    def first_version(self) -> int:
        """The policy version that the run begins with."""
        return self.source.from_version if self.source.run else 0

    @property
    def last_version(self) -> int:
        """The policy version with which the run has reached its goal."""
        return self.source.until_version if self.is_replay and self.source.until_version >= 0 else self.run.num_steps

    @property
    def num_train_steps(self) -> int:
        """Train steps between the two."""
        return max(self.last_version - self.first_version, 0)

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
        if self.is_replay:
            return {"controller": 1, "metrics": 1, "trainer": 1}
        counts = {"controller": 1, "metrics": 1, "prompter": 1, "rollout": self.workers.rollout, "reward": self.workers.reward}
        if self.algorithm.kl_coefficient > 0:
            counts["reference"] = self.workers.reference
        if self.algorithm.old_logprobs == "actor":
            counts["actor-forward"] = self.workers.actor_forward
        return counts | {"advantage": self.workers.advantage, "trainer": 1}
