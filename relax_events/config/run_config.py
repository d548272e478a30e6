"""A run file: all its sections, and the sections of the run itself. `docs/reference/config.md` is
made from their docstrings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from relax_events.config.algorithm import AlgorithmConfig
from relax_events.config.algorithm_spec import with_group_size
from relax_events.config.base import DERIVED, OrDerived, Positive, Seconds, Section
from relax_events.config.broker import BrokerConfig, ObjectsConfig
from relax_events.config.data import DataConfig, RowsConfig
from relax_events.config.devices import DevicesConfig, HostsConfig
from relax_events.config.engine import DATASET_ENGINE, EngineConfig, ModelConfig
from relax_events.config.environment import EnvironmentConfig
from relax_events.config.evaluation import EvaluationConfig, with_columns_of_data
from relax_events.config.external_values import Address, FilePath, Listener, Names, Text
from relax_events.config.http import HttpConfig
from relax_events.config.judge import JudgeConfig
from relax_events.config.resume_rules import IN_FLIGHT, SPEED, accepted, free, never
from relax_events.config.reward import JUDGED, RewardConfig
from relax_events.config.rules import find_violation
from relax_events.config.scaling import ScalingConfig
from relax_events.config.teacher import SourceTeacherConfig, TeacherConfig, TeacherModelConfig
from relax_events.config.tracing import TracesConfig
from relax_events.config.training import CriticConfig, SftWarmupConfig, TrainerConfig
from relax_events.config.weights import WeightsConfig

RUN_ID_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$"


class RunSection(Section):
    """Length of the training and the staleness bound."""

    id: Annotated[str, Field(pattern=RUN_ID_PATTERN), Names.NOTHING]
    """Id of the run: its topics start with `relax.<id>.`, its files are in
    `<directory>/runs/<id>`."""
    seed: Annotated[
        int,
        Field(ge=0, lt=2**31),
        never("it orders the rows, and every id and random number follows from it"),
    ] = 0
    """Seed of data order, sampling and initialisation."""
    num_steps: Annotated[
        Positive,
        free(
            "a later goal; a lower one asks, since prompt groups of later steps may stay open, "
            "and schedules reckon with it"
        ),
    ] = 100
    """Train steps of the run. A fork continues the parent's count."""
    prompts_per_step: Annotated[
        Positive, never(f"{IN_FLIGHT}, and some of them would never end")
    ] = 16
    """Prompt groups in one train step."""
    samples_per_prompt: Annotated[Positive, never(f"{IN_FLIGHT}, and would never be complete")] = 8
    """Samples generated for each prompt, at least 2. Fixed at 1 for SFT and 2 for preference pairs;
    omit it there."""
    mode: Annotated[
        Literal["sync", "async"], accepted("samples are generated at other times of the training")
    ] = "async"
    """`sync`: engine and trainer alternate on the same devices, strictly on-policy. `async`: both
    work all the time."""
    max_staleness: Annotated[int, Field(ge=0), never("the partitions follow from it")] = 1
    """Maximum staleness of a trained sample in policy versions; 0 is strictly on-policy."""
    weight_update_mode: Annotated[
        OrDerived[Literal["drain", "in_flight", "recompute"]],
        accepted("samples under way meet a new version in another way"),
    ] = DERIVED
    """What an engine does with running samples when a new policy version arrives. `drain`: finish
    them first. `in_flight`: swap the weights under them (approximate: the KV cache is of the old
    weights). `recompute`: recompute their prefix under the new weights. Derived: `recompute`;
    `drain` where `max_staleness` is 0, and where the actor-forward role scores each prompt group
    under one version (`algorithm.old_logprobs = "actor"`) without a correction."""
    sample_order: Annotated[
        Literal["fifo", "ready_first"],
        never("prompt groups that were trained out of their order would be awaited again"),
    ] = "fifo"
    """`fifo`: step s trains the prompt groups issued for it. `ready_first`: any complete prompt
    group within the staleness bound."""
    max_failed_prompt_groups: Annotated[Positive, free("when to give up")] = 64
    """Consecutive prompt groups that may fail before the run ends with an error."""
    retain_versions: Annotated[
        OrDerived[Annotated[int, Field(ge=0)]], free("what is kept from here on")
    ] = DERIVED
    """Number of newest policy versions whose records stay on the log; 0 keeps all, so that every
    version can be replayed. Derived: 0; where the embedded broker's disk can't be expected to hold
    all records, as many versions as half of what is free there holds."""
    follower_versions: Annotated[int, Field(ge=0), free("what is kept from here on")] = 200
    """How many more versions keep their trained samples until a replay of this run (`parent.run`)
    has trained them; 0 keeps none."""
    directory: Annotated[FilePath, free("a folder that was moved is the same folder")] = Path(
        ".relax"
    )
    """Folder for runs, models and the embedded broker."""

    @model_validator(mode="after")
    def _sync_is_on_policy(self) -> RunSection:
        if self.mode == "sync" and self.max_staleness:
            raise ValueError(
                f"mode = 'sync' is on-policy, got max_staleness = {self.max_staleness}; set "
                "run.max_staleness = 0 or run.mode = 'async'"
            )
        return self

    @model_validator(mode="after")
    def _window_is_retained(self) -> RunSection:
        if 0 < (self.retain_versions or 0) <= self.max_staleness:
            raise ValueError(
                f"retain_versions must be 0 or above max_staleness = {self.max_staleness}, got "
                f"{self.retain_versions}: the trainer still reads those versions; set "
                "run.retain_versions"
            )
        return self


class WorkersConfig(Section):
    """Number of worker processes of each role that `relax run` starts, and how it supervises
    them.
    """

    rollout: Positive = 1
    """Rollout workers."""
    reward: Positive = 1
    """Reward workers."""
    reference: Positive = 1
    """Reference workers (when the algorithm needs them)."""
    actor_forward: Positive = 1
    """Actor-forward workers (when the algorithm needs them)."""
    teacher: Positive = 1
    """Teacher workers (when the algorithm needs them)."""
    judge: Positive = 1
    """Judge workers (when `judge.model_path` is given)."""
    advantage: Positive = 1
    """Advantage workers."""
    hybrid: bool = False
    """Whether `relax run` starts a reference and an actor-forward worker as one process, and a
    reward and an advantage worker as another. The first two share one model on the device, with
    exchanged weights, where they score in the same way. All records are those of separate
    processes."""
    drain_seconds: OrDerived[Seconds] = DERIVED
    """Deadline for a worker to finish its work after SIGTERM. Derived: the time of
    `engine.sampling.max_new_tokens` at 20 tokens a second, at least 20 s and at most
    `health.progress_timeout_seconds`."""
    heartbeat_seconds: Seconds = 1.0
    """Interval of heartbeats."""
    heartbeat_timeout_seconds: Seconds = 600.0
    """A worker without a heartbeat for this long is killed and restarted. Heartbeats continue
    inside a long call, which has a deadline of its own: see `health`."""
    takeover_seconds: Annotated[Seconds, Field(ge=2)] = 120.0
    """After this time without a heartbeat, and five missing ones at least, the prompt groups of a
    rollout worker are issued once more: its host is cut off or gone, or its process is stopped. If
    it still lives, they are generated twice, and trained once."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Consecutive restarts of a worker that dies without progress: no record processed and no train
    step committed in between. At the next such death the run ends with the worker's error; an
    elastic worker is abandoned alone."""

    @property
    def silent_seconds(self) -> float:
        """How long a living worker may be silent: `takeover_seconds`, but at least five
        heartbeats.
        """
        return max(self.takeover_seconds, 5 * self.heartbeat_seconds)


class HealthConfig(Section):
    """How the controller handles workers that are silent (`workers.heartbeat_timeout_seconds`),
    stuck or slow to start (ADR 13).
    """

    progress_timeout_seconds: Seconds = 900.0
    """A worker that has work but makes no progress for this long is restarted. When no worker makes
    progress for this long, the pipeline is restarted. Also the deadline of one piece of work: a
    micro-batch, an optimizer step, one part of a record batch."""
    start_seconds: Seconds = 3600.0
    """Deadline for a worker's start, which is mostly loading its model, and for the transfer of a
    whole model later: writing or loading a version of the weights or a checkpoint."""
    max_restarts: Positive = 3
    """Failed restarts of a worker before the pipeline is restarted: all its workers resume from
    checkpoint and log."""
    max_pipeline_restarts: Annotated[int, Field(ge=0)] = 3
    """Failed pipeline restarts before the run is aborted. A restart counts as failed unless at
    least `max_staleness + 2` train steps commit after it."""
    backoff_seconds: Seconds = 10.0
    """Delay before a worker's second restart, and before a second pipeline restart; doubled each
    time, up to five minutes."""


class TelemetryConfig(Section):
    """Logs, metrics and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log events."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """`auto` writes readable lines on a terminal and JSON elsewhere."""
    metrics_host: Listener = "127.0.0.1"
    """Address on which a worker serves `/metrics`, `/healthz` and `/readyz`."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of these endpoints; 0 takes a free port and logs it. Above 0 it is the port of the first
    worker on a machine: other workers, and the ranks of a trainer, take the following ports."""
    trackers: Annotated[tuple[str, ...], Names.CODE] = ("tensorboard",)
    """Where the metrics role writes metrics in addition to `metrics.jsonl`: `tensorboard`, `wandb`,
    `clearml`, `mlflow`, `trackio` (the last four are extras of these names), or your own as
    `path/to/file.py:Class`."""
    notification_urls_file: FilePath | None = None
    """File with Apprise URLs, one a line, that receive notifications of the run's start, end,
    failures and recoveries (extra `notifications`). The URLs are secrets. In the environment
    `RELAX_NOTIFICATION_URLS`."""
    tracker_project: Text = "relax-events"
    """Project or experiment under which trackers group runs."""
    dashboard: bool = True
    """Whether `relax run` offers the run's page on the loopback address. Its server starts
    when a browser connects. A run whose broker asks for credentials never offers it."""
    traces: TracesConfig = TracesConfig()

    def worker_port(self, index: int) -> int:
        """Return the port of the worker at this index on its machine; 0
        stays 0.
        """
        return self.metrics_port + index if self.metrics_port else 0


HYBRID_PAIRS = (("reference", "actor-forward"), ("reward", "advantage"))
"""Roles of which two workers are one process with `workers.hybrid`."""
RANKED_ROLES = ("trainer", "critic")
"""Roles of one worker, which several processes may be: its ranks."""


class ParentSection(Section):
    """The parent run, for replays and forks; empty for an independent run.

    Policy versions continue the parent's count: a run from version 30 begins with train step 30.
    """

    run: Annotated[str, Field(pattern=rf"{RUN_ID_PATTERN}|^$"), Names.NOTHING] = ""
    """Id of the parent run, on the same cluster."""
    mode: Literal["replay", "fork"] = "replay"
    """`replay`: train the batches that the parent's log records. `fork`: generate new samples."""
    from_version: Annotated[int, Field(ge=0)] = 0
    """The parent's policy version to start from; its first version is the model of `model.path`."""
    until_version: Annotated[int, Field(ge=-1), free("another goal of a replay")] = -1
    """Version at which a replay ends; -1 is the end of the parent's log."""
    follow: Annotated[bool, free("another goal of a replay")] = False
    """Replay a running parent as its second learner, until the parent ends."""
    scores: Text = ""
    """Name of a rescoring whose scores replace the recorded rewards in a replay."""
    objects_uri: Annotated[Address, free("a store that was moved is the same store")] = ""
    """Object store of the parent, filled in by `relax runs replay` and `relax runs fork`. Empty:
    where this run file would put the parent's objects. It must agree with the parent's log."""
    from_row: Annotated[int, Field(ge=0)] = 0
    """Row of the prompt stream at which a fork continues."""

    @model_validator(mode="after")
    def _is_possible(self) -> ParentSection:
        if 0 <= self.until_version <= self.from_version:
            raise ValueError(
                "parent.until_version must be above parent.from_version = "
                f"{self.from_version}, got {self.until_version}; or -1 for all"
            )
        if self.scores and self.follow:
            raise ValueError(
                f"parent.scores = {self.scores!r} are those of a rescoring, which has to be "
                "there before; set parent.follow = false"
            )
        return self


class Lanes(NamedTuple):
    """Share consumers of a rollout worker.

    Attributes:
        first: Those that it starts with.
        most: Those that it may have.
        workers: Rollout workers for which the brokers have room.
    """

    first: int
    most: int
    workers: int


class RunConfig(Section):
    """One training run."""

    run: Annotated[RunSection, never("it names the run")]
    model: Annotated[ModelConfig, accepted("the model computes in another way from here on")]
    data: Annotated[
        DataConfig, never("rows are numbered by the source: a row would stand for another prompt")
    ]
    broker: Annotated[BrokerConfig, free("how the broker is reached")] = BrokerConfig()
    objects: Annotated[ObjectsConfig, free("what is stored from here on")] = ObjectsConfig()
    engine: Annotated[
        EngineConfig, accepted("samples are generated in another way from here on")
    ] = EngineConfig()
    environment: Annotated[
        EnvironmentConfig, accepted("the environment answers in another way from here on")
    ] = EnvironmentConfig()
    reward: Annotated[RewardConfig, accepted("samples are scored in another way from here on")] = (
        RewardConfig()
    )
    judge: Annotated[JudgeConfig, accepted("samples are scored in another way from here on")] = (
        JudgeConfig()
    )
    evaluation: Annotated[EvaluationConfig, free("affects evaluation, not training")] = (
        EvaluationConfig()
    )
    algorithm: Annotated[AlgorithmConfig, accepted("the loss is another one from here on")] = Field(
        default_factory=AlgorithmConfig
    )
    critic: Annotated[CriticConfig, accepted("the critic learns in another way from here on")] = (
        CriticConfig()
    )
    teacher: Annotated[
        TeacherConfig, accepted("the policy learns from another teacher from here on")
    ] = TeacherConfig()
    teachers: Annotated[
        dict[str, SourceTeacherConfig],
        accepted("the policy learns from other teachers from here on"),
    ] = Field(default_factory=dict)
    """Other teachers for the samples of other sources: tables by a name of your choice."""
    trainer: Annotated[TrainerConfig, accepted("the optimizer takes other steps from here on")] = (
        TrainerConfig()
    )
    devices: Annotated[DevicesConfig, free(SPEED)] = DevicesConfig()
    hosts: Annotated[HostsConfig, free(SPEED)] = HostsConfig()
    sft_warmup: Annotated[SftWarmupConfig, never("the model has been made")] = SftWarmupConfig()
    weights: Annotated[WeightsConfig, free("how versions travel")] = WeightsConfig()
    parent: Annotated[ParentSection, never("it is where the run began")] = ParentSection()
    workers: Annotated[WorkersConfig, free(SPEED)] = WorkersConfig()
    health: Annotated[HealthConfig, free("when to act")] = HealthConfig()
    scaling: Annotated[ScalingConfig, free("how many workers there are")] = ScalingConfig()
    http: Annotated[HttpConfig, free("encryption of the servers")] = HttpConfig()
    telemetry: Annotated[TelemetryConfig, free("notifications and logs")] = TelemetryConfig()

    _unpinned_names = PrivateAttr(default_factory=dict[str, str])

    @property
    def unpinned_names(self) -> Mapping[str, str]:
        """By key: names of the hub that the run file gives without a commit."""
        return self._unpinned_names

    def with_unpinned_names(self, names: Mapping[str, str]) -> Self:
        """Return the run file, which remembers these names without a commit, by key."""
        copy = self.model_copy()
        copy._unpinned_names = dict(names)  # noqa: SLF001  # a copy of this object
        return copy

    @model_validator(mode="before")
    @classmethod
    def _take_group_size(cls, tree: Any, info: ValidationInfo) -> Any:
        return with_group_size(tree, info)

    @model_validator(mode="before")
    @classmethod
    def _take_columns(cls, tree: Any) -> Any:
        return with_columns_of_data(tree)

    @model_validator(mode="after")
    def _keep_the_rules(self) -> RunConfig:
        if (violation := find_violation(self)) is not None:
            raise ValueError(violation)
        return self

    @property
    def has_judge(self) -> bool:
        """Whether an LLM judge of the run scores samples: then its role scores those whose
        reward function is `genrm`.
        """
        return (
            self.judge.model_path is not None and self.algorithm.has_rewards and not self.is_replay
        )

    @property
    def judged_sources(self) -> frozenset[str | None]:
        """Which of `reward.chosen` the judge scores."""
        return (
            frozenset(
                source for source, one in self.reward.chosen.items() if one.function == JUDGED
            )
            if self.has_judge
            else frozenset()
        )

    @property
    def judged_datasets(self) -> frozenset[str]:
        """Names of the evaluation datasets that the run's LLM judge scores, in whole or in part."""
        return frozenset(
            dataset.name
            for dataset in self.evaluation.datasets
            if self.judge.model_path is not None and (dataset.reward or self.reward).judged_sources
        )

    @property
    def computed_reward(self) -> RewardConfig | None:
        """What the reward role computes: all but what the judge scores; None where nothing is
        left.
        """
        return self.reward.without(JUDGED) if self.has_judge else self.reward

    def list_teachers(self) -> dict[str, TeacherModelConfig]:
        """Return the teachers by the section that sets them; none where the run distils nothing
        that it samples.
        """
        if not self.algorithm.distills or self.is_replay:
            return {}
        default: dict[str, TeacherModelConfig] = (
            {} if self.teacher.model_path is None else {"teacher": self.teacher}
        )
        return default | {f"teachers.{name}": one for name, one in self.teachers.items()}

    def list_models(self) -> dict[str, tuple[Path, bool]]:
        """Return the folders of models by key, each with whether its weights are read."""
        teachers = {f"teachers.{name}": one for name, one in self.teachers.items()}
        models = {
            "model.path": (self.model.path, True),
            "critic.model_path": (self.critic.model_path, True),
            "judge.model_path": (self.judge.model_path, True),
            **{
                f"{section}.model_path": (one.model_path, not one.urls)
                for section, one in {"teacher": self.teacher, **teachers}.items()
            },
        }
        return {key: (path, reads) for key, (path, reads) in models.items() if path is not None}

    def list_sources(self) -> dict[str, RowsConfig]:
        """Return the sources of rows that are read, by the key that names each."""
        prompts = self.data.datasets or (self.data,)
        keys = [f"data.datasets.{number}.source" for number in range(len(self.data.datasets))]
        sources = dict(zip(keys or ["data.source"], prompts, strict=True))
        evaluated = {
            f"evaluation.datasets.{number}.source": one
            for number, one in enumerate(self.evaluation.datasets)
        }
        return ({} if self.is_replay else sources) | evaluated

    @property
    def is_replay(self) -> bool:
        """Whether this run trains another run's rollouts and generates none."""
        return bool(self.parent.run) and self.parent.mode == "replay"

    @property
    def publishes_in_background(self) -> bool:
        """Whether a version is written while the next step is trained."""
        return self.weights.async_publish and self.run.max_staleness > 0

    @property
    def rollout_engine(self) -> str:
        """Name of the rollout workers' engine: `dataset` where the data bring the answers, and
        `engine.name` is left to the evaluator.
        """
        return self.engine.name if self.algorithm.has_rewards else DATASET_ENGINE

    @property
    def num_rollout_rows(self) -> int:
        """Samples that the engine of a rollout worker decodes concurrently: no more than those of
        the run that can be in flight, unless programs make any number of calls.
        """
        run, most = self.run, self.engine.max_running_samples
        num_in_flight = run.prompts_per_step * run.samples_per_prompt * (run.max_staleness + 1)
        return most if self.environment.has_programs else min(most, num_in_flight)

    @property
    def num_lanes(self) -> int:
        """Prompt groups that one rollout worker holds at a time."""
        return self.engine.num_lanes(samples_per_prompt=self.run.samples_per_prompt)

    def prompt_groups_per_lease(self, *, num_workers: int = 1) -> int:
        """Return how many prompt groups a rollout worker leases by one request: all of a step where
        one worker generates it and has room for it, because an engine prefills them together. Else
        a worker's share of a step, and its room, are several leases, so that no worker gets much
        more than another: eight, or four where there is one worker.

        Args:
            num_workers: Rollout workers that are known to run; more count if the run file starts
                more, or lets the autoscaler start more.
        """
        workers = max(self._num_rollout_workers, num_workers)
        if workers == 1 and self.run.prompts_per_step <= self.num_lanes:
            return self.run.prompts_per_step
        share = min(self.run.prompts_per_step // workers, self.num_lanes)
        return max(share // (8 if workers > 1 else 4), 1)

    @property
    def _num_rollout_workers(self) -> int:
        """Rollout workers that the run file starts, or lets the autoscaler start."""
        limit = self.scaling.max_workers if self.scaling.autoscaler.enabled else 1
        return max(self.workers.rollout, limit)

    def plan_lanes(self, share_group_size: int | None) -> Lanes:
        """Return the share consumers of a rollout worker.

        It starts with as many as lease its share of the admitted prompt groups, or fill it. It may
        have one for each admitted prompt group where the share group has room for these and at
        least one first lane of each of `scaling.max_workers`. Else it may have an equal part of
        what is allowed to those; more, up to `num_lanes`, where the run's own workers leave room.

        Args:
            share_group_size: Members that the brokers allow a share group; None if unknown.
        """
        num_workers, num_admitted = (
            self._num_rollout_workers,
            self.run.prompts_per_step * (self.run.max_staleness + 1),
        )
        share = min(-(-num_admitted // num_workers), self.num_lanes)
        first = -(-share // self.prompt_groups_per_lease())
        if share_group_size is None:
            return Lanes(first, max(first, self.num_lanes), num_workers)
        most_workers = max(num_workers, self.scaling.max_workers)
        num_free, is_fixed = share_group_size - num_admitted, self.engine.max_prompt_groups > 0
        if num_free >= most_workers:
            first = min(first, num_free // most_workers)
            return Lanes(first, self.num_lanes if is_fixed else num_admitted, num_free // first)
        most = min(self.num_lanes, share_group_size // num_workers)
        equal = share_group_size // most_workers
        most = max(first, most if is_fixed else max(most, equal))
        return Lanes(first, most, share_group_size // most)

    @property
    def first_version(self) -> int:
        """The policy version that the run begins with."""
        return self.parent.from_version if self.parent.run else 0

    @property
    def first_policy_step(self) -> int:
        """The first train step in which the policy learns; in the run's steps before it only the
        critic does.
        """
        begin = 0 if self.is_replay else self.first_version
        return begin + self.critic.warmup_steps if self.algorithm.needs_critic else begin

    @property
    def last_version(self) -> int:
        """The policy version with which the run has reached its goal."""
        return (
            self.parent.until_version
            if self.is_replay and self.parent.until_version >= 0
            else self.run.num_steps
        )

    @property
    def num_train_steps(self) -> int:
        """Train steps between the two."""
        return max(self.last_version - self.first_version, 0)

    @property
    def run_directory(self) -> Path:
        """Folder of the run's logs, reports and, by default, objects."""
        return self.run.directory / "runs" / self.run.id

    @property
    def devices_directory(self) -> Path:
        """Folder of the locks on devices that processes use in turn, and of memory that leaves
        the CPU.
        """
        return self.run_directory / "devices"

    @property
    def objects_uri(self) -> str:
        """URI of the run's object store, with the default filled in."""
        if not self.objects.uri:
            return (self.run_directory.resolve() / "objects").as_uri()
        return (
            f"{self.objects.uri.rstrip('/')}/{self.run.id}"
            if self.objects.by_run
            else self.objects.uri
        )

    @property
    def critic_ranks(self) -> int:
        """Processes that hold the critic together."""
        if self.critic.ranks is not None:
            return self.critic.ranks
        return self.trainer.ranks if self.trainer.divides_model else 1

    def hosted_pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the pairs of roles whose workers share processes (`workers.hybrid`)."""
        roles = self.roles() if self.workers.hybrid else {}
        return tuple(pair for pair in HYBRID_PAIRS if all(role in roles for role in pair))

    def engine_devices(self) -> dict[str, int]:
        """GPUs of one worker by role, for the roles with an engine; workers of others and ranks
        have one each.
        """
        judge = self.judge.engine.num_devices if self.has_judge or self.judged_datasets else 1
        policy = self.engine.num_devices
        evaluator = max(policy, judge) if self.judged_datasets else policy
        return {"rollout": policy, "evaluator": evaluator, "judge": judge}

    def separate_processes(self) -> dict[str, int]:
        """As `processes`, without the roles whose workers are in processes of others
        (`workers.hybrid`).
        """
        hosted = {role for _, role in self.hosted_pairs()}
        return {role: count for role, count in self.processes().items() if role not in hosted}

    def processes(self) -> dict[str, int]:
        """Every role that this run needs, with the number of its processes: each rank of the
        trainer and of the critic is one.
        """
        ranks = {"trainer": self.trainer.ranks, "critic": self.critic_ranks}
        return {role: ranks.get(role, count) for role, count in self.roles().items()}

    def roles(self) -> dict[str, int]:
        """Every role that this run needs, with the number of its workers."""
        evaluator = {"evaluator": 1} if self.evaluation.datasets else {}
        if self.is_replay:
            return {"controller": 1, "metrics": 1, "trainer": 1} | evaluator
        counts = {"controller": 1, "metrics": 1, "prompter": 1, "rollout": self.workers.rollout}
        if self.algorithm.has_rewards and self.computed_reward is not None:
            counts["reward"] = self.workers.reward
        if self.has_judge:
            counts["judge"] = self.workers.judge
        if self.algorithm.needs_reference:
            counts["reference"] = self.workers.reference
        if self.algorithm.old_logprobs == "actor":
            counts["actor-forward"] = self.workers.actor_forward
        if self.algorithm.needs_critic:
            counts["critic"] = 1
        if self.algorithm.distills:
            counts["teacher"] = self.workers.teacher
        return counts | {"advantage": self.workers.advantage, "trainer": 1} | evaluator
