"""What a run takes on given devices: memory by device, worker and part, an estimate of the time of
a step, and the smallest change that makes it fit. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from relax_events.config.devices import DevicesConfig
from relax_events.config.engine import EngineConfig
from relax_events.config.run_config import RunConfig
from relax_events.config.unset_keys import with_values
from relax_events.errors import ConfigError
from relax_events.planning.device_specs import DeviceSpec
from relax_events.planning.inventory import CheckpointFacts, get_value_bytes
from relax_events.planning.megatron_memory import memory_of_critic, memory_of_trainer
from relax_events.planning.memory import (
    RESERVED_CPU_BYTES,
    RESERVED_GPU_BYTES,
    MemoryParts,
)
from relax_events.planning.placement import Placement, place_workers

CACHING_ROLES = frozenset({"rollout", "evaluator", "judge"})
CPU = "CPU"
PLANNED_BACKENDS = ("torch", "megatron")
NO_CHANGE = "no setting of this backend makes it fit"
DEVICE_COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
ARRAY_BYTES = 29
"""Of a token on the host: its id, whether it is a loss token, its advantage, and log-probabilities
and values of up to five roles."""
UTILISATION, BANDWIDTH_UTILISATION = 0.4, 0.6
"""Shares of a device's speed and bandwidth that training and decoding are reckoned to reach."""


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """A worker on a device; of an engine, how many samples of the longest length its cache holds,
    and how many it would run.
    """

    worker_id: str
    memory: MemoryParts
    num_samples: int = 0
    most_samples: int = 0


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A device with its workers."""

    index: int
    num_bytes: int
    workers: tuple[PlannedWorker, ...]
    is_time_shared: bool = False

    @property
    def needed(self) -> int:
        """Bytes of all workers; where the trainer and the rollout workers hold the device in turn,
        the larger turn, in which the others keep their process alone.
        """
        total = sum(worker.memory.total for worker in self.workers)
        sides = [
            sum(
                worker.memory.total - worker.memory.parts["process"]
                for worker in self.workers
                if worker.worker_id.startswith(role)
            )
            for role in ("trainer-", "rollout-")
        ]
        return total - min(sides) if self.is_time_shared else total

    @property
    def fits(self) -> bool:
        """Whether they fit."""
        return self.needed <= self.num_bytes


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Estimated seconds of a step by stage."""

    rollout: float
    scoring: float
    training: float


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """The longest episode of programs that branch: at most `num_paths` of `path_tokens` each, which
    the trainer runs in `num_passes` where they share nothing. Its arrays take at most `host_bytes`,
    besides routed experts and the teacher's tokens.
    """

    num_paths: int
    path_tokens: int
    num_passes: int
    host_bytes: int

    @classmethod
    def of_run(cls, config: RunConfig) -> EpisodePlan | None:
        """Return it, or None where a sample has one path."""
        environment, path_tokens = config.environment, config.engine.max_context_tokens or 0
        if not environment.has_programs or environment.trained_paths == "last" or not path_tokens:
            return None
        num_paths = environment.max_turns
        together = max(1, (config.trainer.max_tokens_per_micro_batch or 0) // path_tokens)
        return cls(
            num_paths,
            path_tokens,
            -(-num_paths // together),
            num_paths * path_tokens * ARRAY_BYTES,
        )


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        devices: Each device that has workers.
        tokens: Of the largest pass: the budget, or one path of the longest length.
        host_bytes: What the optimizers of all ranks take of the memory of their hosts, in addition
            to the devices (`trainer.offload_optimizer`).
        version_bytes: What the copy of a version takes of the memory of rank 0's host, in addition
            to the devices (`weights.async_publish`).
        seconds: Estimate; None where the device's speed is unknown.
        change: The smallest change that fits, where this does not; empty if none is known.
        episode: None where a sample has one path.
    """

    devices: tuple[PlannedDevice, ...]
    tokens: int
    seconds: StageSeconds | None
    change: str = ""
    host_bytes: int = 0
    version_bytes: int = 0
    episode: EpisodePlan | None = None

    @property
    def fits(self) -> bool:
        """Whether every device can hold its workers."""
        return all(device.fits for device in self.devices)

    def compute_engine_shares(self) -> dict[str, float]:
        """Return, by worker, the share of each of its devices that the weights and the cache of its
        engine take, where other workers are on them, too.
        """
        shares: dict[str, float] = {}
        for device in self.devices:
            for worker in device.workers if len(device.workers) > 1 else ():
                parts = worker.memory.parts
                if "cache" in parts:
                    share = (parts["weights"] + parts["cache"]) / device.num_bytes
                    shares[worker.worker_id] = min(share, shares.get(worker.worker_id, 1.0))
        return shares


def plan_run(
    config: RunConfig,
    facts: Mapping[str, CheckpointFacts],
    *,
    device: DeviceSpec,
    num_devices: int,
    sample_tokens: int,
) -> RunPlan:
    """Plan a run.

    Args:
        config: Whose defaults are resolved.
        facts: Of the checkpoints in the sections `model`, `judge` and `teacher`.
        device: Kind of all devices; one named `CPU` holds all workers, and each process is reckoned
            with what it takes there.
        num_devices: Of the machine, or of all machines.
        sample_tokens: Mean tokens of a sample, prompt included.
    Raises:
        ConfigError: The trainer has more ranks than there are devices, or the model is unknown.
    """
    if config.trainer.backend not in PLANNED_BACKENDS:
        raise ConfigError(
            f"a plan knows what the backends {' and '.join(PLANNED_BACKENDS)} take, and "
            f"trainer.backend is {config.trainer.backend!r}; try a short run"
        )
    if "model" not in facts:
        raise ConfigError(
            f"{config.model.path} has no config.json, and a plan needs the model's sizes; set "
            "model.path to a model folder"
        )
    plan = _plan(config, facts, device, num_devices, sample_tokens)
    if plan.fits:
        return plan
    for text, values, count in _changes(config, facts["model"], num_devices):
        try:
            changed = _plan(with_values(config, values), facts, device, count, sample_tokens)
        except ConfigError:
            continue
        if changed.fits:
            return replace(plan, change=text)
    return plan


def _plan(
    config: RunConfig,
    facts: Mapping[str, CheckpointFacts],
    device: DeviceSpec,
    num_devices: int,
    sample_tokens: int,
) -> RunPlan:
    placed = _assign(config, num_devices=num_devices, on_gpu=device.name != CPU)
    tokens = max(
        config.trainer.max_tokens_per_micro_batch or 0, config.engine.max_context_tokens or 0
    )
    models = _Models(config, facts, tokens, on_gpu=device.name != CPU)
    devices = tuple(
        _fill_caches(
            PlannedDevice(
                index,
                device.num_bytes,
                tuple(models.worker(name) for name, indices in placed.items() if index in indices),
                config.devices.time_share,
            ),
            models,
        )
        for index in sorted({index for indices in placed.values() for index in indices})
    )
    seconds = _estimate(config, facts["model"], device, sample_tokens) if device.flops else None
    return RunPlan(
        devices,
        tokens,
        seconds,
        host_bytes=models.host_bytes,
        version_bytes=models.version_bytes if models.on_gpu else 0,
        episode=EpisodePlan.of_run(config),
    )


def _assign(config: RunConfig, *, num_devices: int, on_gpu: bool) -> Placement:
    roles, ranks = config.separate_processes(), config.trainer.ranks
    if on_gpu:
        return place_workers(
            roles,
            ranks=ranks,
            num_devices=num_devices,
            devices=config.devices,
            sizes=config.engine_devices(),
            num_hosts=config.hosts.num_hosts,
        )
    most = max(ranks, config.critic_ranks)
    names = place_workers(roles, ranks=ranks, num_devices=most, devices=DevicesConfig(), sizes={})
    return dict.fromkeys(names, (0,))


@dataclass(frozen=True, slots=True)
class _Models:
    """What each worker of a run holds."""

    config: RunConfig
    facts: Mapping[str, CheckpointFacts]
    tokens: int
    on_gpu: bool

    @property
    def host_bytes(self) -> int:
        """What the optimizers of trainer and critic take of the memory of their hosts."""
        config, model = self.config, self.facts["model"]
        trainer = memory_of_trainer(config, model, on_gpu=self.on_gpu).host_bytes
        critic = memory_of_critic(config, model, on_gpu=self.on_gpu).host_bytes
        counts = config.processes()
        return counts["trainer"] * trainer + counts.get("critic", 0) * critic

    @property
    def version_bytes(self) -> int:
        """What rank 0 of the trainer holds of a version on its host, while it is published in the
        background and for the next one.
        """
        return self._compute_copy_bytes() if self.config.publishes_in_background else 0

    def _compute_copy_bytes(self) -> int:
        """Return the size of a version: of the adapters alone where the run trains adapters."""
        model, lora = self.facts["model"], self.config.model.lora
        return get_value_bytes(self.config.model.dtype) * (
            model.num_parameters if lora is None else model.num_adapter_parameters(lora.rank)
        )

    def worker(self, worker_id: str) -> PlannedWorker:
        """Return a worker's memory; an engine's with the cache of one sample."""
        role, config = worker_id.rpartition("-")[0], self.config
        model, dtype = self.facts["model"], config.model.dtype
        if role == "trainer":
            trainer = memory_of_trainer(config, model, on_gpu=self.on_gpu)
            parts = dict(trainer.parts(self.tokens).parts)
            if worker_id == "trainer-0" and not self.on_gpu and self.version_bytes:
                parts["copy of a version"] = self.version_bytes
            return PlannedWorker(worker_id, MemoryParts(parts))
        if role == "critic":
            critic = memory_of_critic(config, model, on_gpu=self.on_gpu)
            return PlannedWorker(worker_id, critic.parts(self.tokens))
        models = self._list_models(role) or [model]
        model = max(models, key=lambda one: one.cell_bytes(dtype) / one.num_layers)
        num_parameters = sum(one.num_parameters for one in self._list_models(role))
        weights = {"weights": -(-num_parameters * get_value_bytes(dtype) // self.split(role))}
        if role in dict(config.hosted_pairs()):
            if config.model.lora is not None or config.model.replays_routing:
                weights["weights"] *= 2  # the two roles score in different ways
            elif not self.on_gpu:
                weights["weights out of turn"] = weights["weights"]  # on the host, as this is
        process = {"process": RESERVED_GPU_BYTES if self.on_gpu else RESERVED_CPU_BYTES}
        if role in CACHING_ROLES:
            if role != "judge" and not self.on_gpu:  # the next version is read while this one runs
                process["copy of a version"] = self._compute_copy_bytes()
            return PlannedWorker(
                worker_id,
                MemoryParts(weights | {"cache": self.compute_cache_bytes(role)} | process),
            )
        layer = self.tokens * model.cell_bytes(dtype) // model.num_layers
        return PlannedWorker(worker_id, MemoryParts(weights | {"activations": layer} | process))

    def _list_models(self, role: str) -> list[CheckpointFacts]:
        """Return the models that a worker of the role holds; each teacher worker has all teachers
        that no server has.
        """
        policy = self.facts["model"]
        if role == "evaluator" and self.config.judged_datasets:
            return [policy, self.facts.get("judge", policy)]
        if role != "teacher":
            return [self.facts.get(role, policy)]
        teachers = self.config.list_teachers().items()
        return [self.facts.get(name, policy) for name, one in teachers if not one.urls]

    def find_engine(self, role: str) -> EngineConfig:
        """Return the engine of a role that generates."""
        return self.config.judge.engine if role == "judge" else self.config.engine

    def split(self, role: str) -> int:
        """Return the devices that hold a copy of a role's model together."""
        has_engine = self.on_gpu and role in CACHING_ROLES
        return self.find_engine(role).devices_per_copy if has_engine else 1

    def compute_cache_bytes(self, role: str) -> int:
        """Return the bytes that one sample of the longest length takes of a device in the cache of
        a role's engine.
        """
        model = self.facts.get(role, self.facts["model"])
        context = self.find_engine(role).max_context_tokens or 0
        return -(-context * model.cache_bytes(self.config.model.dtype) // self.split(role))


def _fill_caches(device: PlannedDevice, models: _Models) -> PlannedDevice:
    """Give what is left of a device to the caches of its engines, in equal parts, as far as they
    have samples for it.
    """
    caching = [worker for worker in device.workers if "cache" in worker.memory.parts]
    if not caching or not device.fits:
        return device
    room = (device.num_bytes - device.needed) // len(caching)

    def fill(worker: PlannedWorker) -> PlannedWorker:
        if "cache" not in worker.memory.parts:
            return worker
        role = worker.worker_id.rpartition("-")[0]
        one = models.compute_cache_bytes(role)
        engine = models.find_engine(role)
        copies, rows = engine.num_devices // engine.devices_per_copy, models.config.num_rollout_rows
        most = rows if role == "rollout" else engine.max_running_samples
        fitting = min(1 + room // max(one, 1), most)
        cache = MemoryParts(dict(worker.memory.parts) | {"cache": fitting * one})
        samples = min(fitting * copies, most)
        return PlannedWorker(worker.worker_id, cache, num_samples=samples, most_samples=most)

    return replace(device, workers=tuple(map(fill, device.workers)))


def _changes(
    config: RunConfig, model: CheckpointFacts, num_devices: int
) -> Iterator[tuple[str, dict[str, object], int]]:
    """Yield changes from small to large: text, values of keys, and number of devices."""
    longest = config.engine.max_context_tokens or 0
    if (config.trainer.max_tokens_per_micro_batch or 0) > longest > 0:
        smaller: dict[str, object] = {"trainer.max_tokens_per_micro_batch": longest}
        yield _text(smaller), smaller, num_devices
    trainer = memory_of_trainer(config, model, on_gpu=False)
    recomputed: dict[str, object] = {"trainer.activation_checkpointing": "whole"}
    yield _text(recomputed), recomputed, num_devices
    for count in (num_devices, *(size for size in DEVICE_COUNTS if size > num_devices)):
        more = "" if count == num_devices else f", on {count} devices"
        for ranks in sorted({count - 1, count * 3 // 4, count // 2, count} - {0, 1}):
            for divided in trainer.divisions(config, ranks):
                yield _text(recomputed | divided) + more, recomputed | divided, count


def _text(values: Mapping[str, object]) -> str:
    return "set " + ", ".join(
        f"{key} = {value!r}" if isinstance(value, str) else f"{key} = {value}"
        for key, value in values.items()
    )


def _estimate(
    config: RunConfig, model: CheckpointFacts, device: DeviceSpec, sample_tokens: int
) -> StageSeconds:
    roles, trainer = config.roles(), config.trainer
    num_samples = config.run.prompts_per_step * config.run.samples_per_prompt
    forward = num_samples * sample_tokens * _forward_flops(model, sample_tokens)
    speed = device.flops * UTILISATION
    return StageSeconds(
        rollout=_decode_seconds(config, model, device, sample_tokens, num_samples),
        scoring=max(
            (
                forward / speed / roles[role]
                for role in ("reference", "actor-forward", "teacher")
                if role in roles
            ),
            default=0.0,
        ),
        training=forward * _passes(config, sample_tokens) / speed / trainer.ranks,
    )


def _passes(config: RunConfig, sample_tokens: int) -> float:
    """Forward passes that a train step costs: backward takes two, recomputation one more, and so
    do samples of several passes.
    """
    trainer, episode = config.trainer, EpisodePlan.of_run(config)
    is_cut = episode is not None and episode.num_passes > 1
    is_above = sample_tokens > (trainer.max_tokens_per_micro_batch or 0)
    return 3.0 + (trainer.activation_checkpointing != "none") + (is_cut and is_above)


def _forward_flops(model: CheckpointFacts, sample_tokens: int) -> float:
    """Operations of a token's forward pass: two for each parameter, and causal attention."""
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * sample_tokens
    return 2.0 * model.num_active_parameters + attention


def _decode_seconds(
    config: RunConfig,
    model: CheckpointFacts,
    device: DeviceSpec,
    sample_tokens: int,
    num_samples: int,
) -> float:
    """Seconds in which the engines generate the samples of a step: each decoding step reads all
    weights, and the cache of the samples that run.
    """
    samples_of_engine = -(-num_samples // max(config.workers.rollout, 1))
    running = min(samples_of_engine, config.num_rollout_rows)
    new = min(sample_tokens, config.engine.sampling.max_new_tokens or sample_tokens)
    width = get_value_bytes(config.model.dtype)
    read = model.num_parameters * width + running * sample_tokens * model.cache_bytes(
        config.model.dtype
    )
    seconds = max(
        read / (device.bandwidth * BANDWIDTH_UTILISATION),
        running * _forward_flops(model, sample_tokens) / (device.flops * UTILISATION),
    )
    return -(-samples_of_engine // running) * new * seconds
