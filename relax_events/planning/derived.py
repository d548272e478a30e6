"""Values of the keys that a run file leaves out, derived from the model, the run file and the
machine. Pure arithmetic.

What changes what is trained (learning rate, type of the weights, lengths) follows from the run file
and the checkpoint alone, so that all processes of a run come to the same. What is of speed and
memory alone follows from the machine too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relax_events.config.run_config import RunConfig
from relax_events.config.unset_keys import OF_MACHINE, missing_keys, with_values
from relax_events.planning.inventory import (
    COMPUTING_ROLES,
    CheckpointFacts,
    Machine,
    format_bytes,
    get_value_bytes,
)
from relax_events.planning.megatron_memory import memory_of_trainer
from relax_events.planning.placement import place_workers

FINE_TUNING_RATE, ADAPTER_RATE, TINY_RATE = 1e-6, 1e-5, 1e-3
TINY_CONTEXT_TOKENS, TINY_NEW_TOKENS = 512, 32
MAX_CONTEXT_TOKENS = 8192
"""What is derived at most: longer samples cost memory and time in proportion, so the run file has
to ask for them."""
LOG_BYTES_PER_TOKEN = 48
"""Bytes of a token on all topics of a run together: 0.4 GB for 1,024 samples of 8,192 tokens,
without routed experts and top tokens."""
MEAN_OF_LONGEST, ROOM_OF_FREE = 0.5, 0.5
"""How long samples are reckoned to be, of the longest; and how much of a free disk the log may
take."""
LEAST_DRAIN_SECONDS, SLOW_TOKENS_PER_SECOND = 20.0, 20.0
LEFT_RATIO = 0.9
"""How much of what is left a micro-batch may take by this reckoning."""
CELL_UNIT, MOST_CELLS_GPU, MOST_CELLS_CPU = 256, 16_384, 8192
"""Beyond so many a micro-batch gets no faster."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A key with its derived value, and why; `is_warning` where the value will hardly do."""

    key: str
    value: Any
    reason: str
    is_warning: bool = False


def derive(
    config: RunConfig, facts: Mapping[str, CheckpointFacts], machine: Machine
) -> list[Derived]:
    """Return the values of the keys that a run file leaves out, each with its reason; keys that
    can't be derived stay out.

    Args:
        config: The run file as read.
        facts: Of the checkpoints in the sections `model`, `judge` and `teacher`, as far as they are
            there.
        machine: Where the workers are.
    """
    values: dict[str, Derived] = {}
    filled = config
    rules = (
        _of_updates,
        _of_training,
        _of_lengths,
        _of_retention,
        _of_drain,
        _of_threads,
        _of_memory,
    )
    for rule in rules:
        missing = set(missing_keys(filled))
        fresh = {
            derived.key: derived
            for derived in rule(filled, facts, machine)
            if derived.key in missing
        }
        values |= fresh
        filled = with_values(filled, {key: derived.value for key, derived in fresh.items()})
    return list(values.values())


def _of_updates(
    config: RunConfig, _: Mapping[str, CheckpointFacts], __: Machine
) -> Iterator[Derived]:
    if config.run.max_staleness == 0:
        mode, reason = "drain", "run.max_staleness = 0: no sample runs when a version is published"
    elif config.algorithm.old_logprobs == "actor" and config.algorithm.correction == "none":
        mode = "drain"
        reason = (
            "algorithm.old_logprobs = 'actor' scores each prompt group under one version, and "
            "algorithm.correction = 'none' covers no difference"
        )
    else:
        mode = "recompute"
        reason = (
            f"run.max_staleness = {config.run.max_staleness}: engines that finish running samples "
            "first leave most of their slots empty"
        )
    yield Derived("run.weight_update_mode", mode, reason)


def _of_training(
    config: RunConfig, facts: Mapping[str, CheckpointFacts], _: Machine
) -> Iterator[Derived]:
    if config.model.tiny is not None:
        yield Derived(
            "trainer.learning_rate", TINY_RATE, "[model.tiny] makes the model: random weights"
        )
    elif config.model.lora is not None:
        yield Derived(
            "trainer.learning_rate",
            ADAPTER_RATE,
            "adapters of a pretrained model are trained",
        )
    else:
        yield Derived(
            "trainer.learning_rate",
            FINE_TUNING_RATE,
            "all parameters of a pretrained model are trained",
        )
    for section, checkpoint in facts.items():
        yield Derived(f"{section}.dtype", checkpoint.dtype, "the checkpoint's own")


def _of_lengths(
    config: RunConfig, facts: Mapping[str, CheckpointFacts], _: Machine
) -> Iterator[Derived]:
    context, new = config.engine.max_context_tokens, config.engine.sampling.max_new_tokens
    if (model := facts.get("model")) is None:
        return
    most = min(model.max_position_embeddings, MAX_CONTEXT_TOKENS)
    bound = f"the model's {model.max_position_embeddings} positions, at most {MAX_CONTEXT_TOKENS}"
    prompt = config.data.max_prompt_tokens
    if context is None and config.model.tiny is not None:
        context = max(TINY_CONTEXT_TOKENS, (new or 0) + (prompt or 0))
        yield Derived("engine.max_context_tokens", context, "[model.tiny] makes the model")
    elif context is None and new is not None:
        room = prompt or max(most - new, most // 4)
        context = min(model.max_position_embeddings, room + new)
        reason = (
            f"{room} for the prompt, {new} for the answer, within "
            f"{model.max_position_embeddings} positions"
        )
        yield Derived("engine.max_context_tokens", context, reason)
    elif context is None:
        context = most
        yield Derived("engine.max_context_tokens", context, bound)
    if config.model.tiny is not None:
        yield Derived(
            "engine.sampling.max_new_tokens",
            min(TINY_NEW_TOKENS, context),
            "[model.tiny] makes the model",
        )
        return
    room = min(prompt, context - 1) if prompt else context // 4
    reason = (
        f"what {context} tokens leave after a prompt of {room} "
        f"({'data.max_prompt_tokens' if prompt else 'a quarter'})"
    )
    yield Derived("engine.sampling.max_new_tokens", max(context - room, 1), reason)


def compute_log_bytes(config: RunConfig) -> int:
    """Return the most bytes that a train step adds to the log; 0 where the longest sample is not
    known.
    """
    run = config.run
    longest = config.engine.max_context_tokens or 0
    return run.prompts_per_step * run.samples_per_prompt * longest * LOG_BYTES_PER_TOKEN


def _of_retention(
    config: RunConfig, _: Mapping[str, CheckpointFacts], machine: Machine
) -> Iterator[Derived]:
    key, free, step = "run.retain_versions", machine.log_room_bytes, compute_log_bytes(config)
    if not free or config.is_replay:
        yield Derived(key, 0, "the log is on another broker's disk, or the run writes no samples")
        return
    if not step:
        return
    whole = int(step * config.num_train_steps * MEAN_OF_LONGEST)
    room = int(free * ROOM_OF_FREE)
    forecast = (
        f"all records take about {format_bytes(whole)}, at most {format_bytes(step)} a step, and "
        f"the broker's disk has {format_bytes(free)} free"
    )
    if whole <= room:
        yield Derived(key, 0, forecast)
        return
    if config.broker.credentials is not None:
        remedy = (
            "roles may delete nothing here: run relax topics purge regularly, or take more disk"
        )
        yield Derived(key, 0, f"{forecast}: {remedy}", is_warning=True)
        return
    # those since the newest checkpoint stay in any case
    fitting, least = room // step - config.trainer.checkpoint_every, config.run.max_staleness + 2
    reason = f"{forecast}: older versions are deleted, and can't be replayed or proven any more"
    if fitting < least:
        reason += "; even these may not fit: lower trainer.checkpoint_every, or take more disk"
    yield Derived(key, max(fitting, least), reason, is_warning=True)


def _of_drain(
    config: RunConfig, _: Mapping[str, CheckpointFacts], __: Machine
) -> Iterator[Derived]:
    longest = config.engine.sampling.max_new_tokens or 0  # unknown where the model is not
    seconds = max(LEAST_DRAIN_SECONDS, longest / SLOW_TOKENS_PER_SECOND)
    reason = (
        f"an answer of {longest} tokens at {SLOW_TOKENS_PER_SECOND:g} a second, at least "
        f"{LEAST_DRAIN_SECONDS:g} s"
    )
    yield Derived(
        "workers.drain_seconds", min(seconds, config.health.progress_timeout_seconds), reason
    )


def _of_threads(
    config: RunConfig, _: Mapping[str, CheckpointFacts], machine: Machine
) -> Iterator[Derived]:
    share = max(machine.num_processors // machine.num_computing, 1)
    reason = f"{machine.num_processors} processors, {machine.num_computing} workers that compute"
    for key in OF_MACHINE:
        if key.endswith(".threads"):
            yield Derived(key, share, reason)


def _of_memory(
    config: RunConfig, facts: Mapping[str, CheckpointFacts], machine: Machine
) -> Iterator[Derived]:
    model, dtype = facts.get("model"), config.model.dtype
    if model is None or dtype is None:
        return
    on_gpu = bool(machine.gpu_bytes) and config.model.device != "cpu"
    whole = min(machine.gpu_bytes) if on_gpu else machine.memory_bytes // 2
    ranks = 1 if on_gpu else max(machine.roles.get("trainer", 1), 1)
    trainer = memory_of_trainer(config, model, on_gpu=on_gpu)
    others = _memory_next_to_trainer(config, model, machine, most_cache=whole // 3)
    static = trainer.parts(0).total
    most = MOST_CELLS_GPU if on_gpu else MOST_CELLS_CPU
    cells = trainer.most_tokens(
        static + LEFT_RATIO * ((whole - others) / ranks - static), unit=CELL_UNIT, most=most
    )
    value = max(cells, CELL_UNIT)
    memory_name = "the GPU" if on_gpu else "half of the memory"
    reason = (
        f"{memory_name} has {format_bytes(whole)}, parameters, gradients and optimizer take "
        f"{format_bytes(static)}, the other models there {format_bytes(others)}; "
        f"a token takes {trainer.cell_bytes / 1e6:.2f} MB"
    )
    if cells < CELL_UNIT:
        yield Derived(
            "trainer.max_tokens_per_micro_batch",
            value,
            f"{reason}: too little; take more memory or a smaller model",
            is_warning=True,
        )
        return
    longest = config.engine.max_context_tokens
    is_short = longest is not None and value < longest
    more = f"; a sample of engine.max_context_tokens = {longest} may not fit" if is_short else ""
    yield Derived("trainer.max_tokens_per_micro_batch", value, reason + more, is_warning=is_short)


def _memory_next_to_trainer(
    config: RunConfig, model: CheckpointFacts, machine: Machine, *, most_cache: int
) -> int:
    """Return what the models of other roles take where the trainer is; a judge or teacher counts as
    large as the policy.
    """
    dtype = config.model.dtype
    count = _count_workers_next_to_trainer(config, machine)
    if config.devices.time_share:
        count["rollout"] = 0  # its memory is free while the trainer works
        if config.workers.hybrid:
            count["reference"] = count["actor-forward"] = 0
    weights = model.num_parameters * get_value_bytes(dtype)
    cache = min(
        config.num_rollout_rows
        * (config.engine.max_context_tokens or 0)
        * model.cache_bytes(dtype),
        most_cache,
    )
    learning = count["critic"] * model.training_bytes(dtype) // config.critic_ranks
    return (
        (sum(count.values()) - count["critic"]) * weights
        + learning
        + (count["rollout"] > 0) * cache
    )


def _count_workers_next_to_trainer(config: RunConfig, machine: Machine) -> dict[str, int]:
    """Return how many workers of each role compute on a device of the trainer's; all of them on the
    CPU, and where the trainer has more ranks than there are GPUs.
    """
    roles = {role: machine.roles.get(role, 0) for role in COMPUTING_ROLES}
    ranks = machine.roles.get("trainer", 1)
    if config.model.device == "cpu" or ranks > len(machine.gpu_bytes):
        return roles
    placed = place_workers(
        machine.roles,
        ranks=ranks,
        num_devices=len(machine.gpu_bytes),
        devices=config.devices,
        sizes=config.engine_devices(),
        num_hosts=machine.num_hosts,
    )
    trained = {device for rank in range(ranks) for device in placed.get(f"trainer-{rank}", ())}
    return {
        role: sum(not trained.isdisjoint(placed[f"{role}-{index}"]) for index in range(count))
        for role, count in roles.items()
    }
