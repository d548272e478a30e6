"""Checks of a run file whose algorithm trains on target completions of the data:
nothing is generated, nothing is rewarded.

Also checks of several optimizer steps in a train step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationInfo

from relax_events.config.algorithm_spec import find_algorithm, is_from_log
from relax_events.config.data import KEYS_TO_LEARN, RowsConfig
from relax_events.config.engine import SamplingConfig
from relax_events.errors import ConfigError

if TYPE_CHECKING:
    from relax_events.config.run_config import RunConfig

DATASET_ENGINE = "dataset"
"""The engine that hands out what a row brings."""
GROUP_SIZES = {"answers": 1, "pairs": 2}
"""Samples of a prompt group, by what the algorithm learns from."""


def with_group_size(given: Any, info: ValidationInfo) -> Any:
    """Fill in `run.samples_per_prompt` where the algorithm leaves no choice and the run file does
    not name it.
    """
    algorithm, run = (
        (given.get(name) for name in ("algorithm", "run"))
        if isinstance(given, Mapping)
        else (None, None)
    )
    if (
        not isinstance(algorithm, Mapping)
        or not isinstance(run, Mapping)
        or "samples_per_prompt" in run
    ):
        return given
    name = str(algorithm.get("name", "grpo"))
    if is_from_log(name, info):
        return given
    try:
        size = GROUP_SIZES.get(find_algorithm(name).learns_from)
    except ConfigError:  # reported by the section's own check
        return given
    return given if size is None else {**given, "run": {**run, "samples_per_prompt": size}}


def check_answers(config: RunConfig) -> None:
    """Refuse settings that don't fit what the algorithm learns from.

    A replay generates nothing either way: of it only the size of its prompt groups must fit. Of an
        algorithm that is not read nothing is known.

    Raises:
        ValueError: The text names the setting, its value and the remedy.
    """
    if (problem := next(_problems(config), None)) is not None:
        raise ValueError(problem)


def _problems(config: RunConfig) -> Iterator[str]:
    if config.algorithm.is_unread:
        return
    name, learns_from, size = (
        config.algorithm.name,
        config.algorithm.learns_from,
        config.run.samples_per_prompt,
    )
    if learns_from == "rewards":
        if size < 2:
            yield (
                f"run.samples_per_prompt must be >= 2, got {size}: algorithm {name} compares a "
                "prompt's samples"
            )
        if not config.is_replay:
            yield from _problems_with_rewards(config)
        return
    wanted = GROUP_SIZES[learns_from]
    if size != wanted and not (config.is_replay and learns_from == "answers"):
        yield (
            f"run.samples_per_prompt must be {wanted}, got {size}: algorithm {name} learns from "
            f"{learns_from}; leave it out"
        )
    if not config.is_replay:
        yield from _problems_with_data(config)
        yield from _problems_with_engine(config)


def _problems_with_rewards(config: RunConfig) -> Iterator[str]:
    for part in config.data.parts:
        for key in KEYS_TO_LEARN:
            if value := getattr(part, key):
                yield (
                    f"data.{key} = {value!r} is not used by algorithm {config.algorithm.name}, "
                    "which learns from rewards; leave it out"
                )
    if tokens := config.data.max_sample_tokens:
        yield (
            f"data.max_sample_tokens = {tokens} measures answers that the data bring; set "
            "engine.sampling.max_new_tokens, or data.max_prompt_tokens"
        )
    if config.engine.name == DATASET_ENGINE:
        yield (
            f"engine.name = 'dataset' generates nothing, and algorithm {config.algorithm.name} "
            "learns from what is generated; set engine.name"
        )


def _problems_with_data(config: RunConfig) -> Iterator[str]:
    name, pairs = config.algorithm.name, config.algorithm.learns_from == "pairs"
    for part in config.data.parts:
        if pairs and not _brings_pairs(part):
            yield (
                f"algorithm {name} learns from pairs, and {part.source} names none; set "
                "data.chosen_key and data.rejected_key"
            )
        if not pairs and _brings_pairs(part):
            yield (
                f"data.chosen_key = {part.chosen_key!r} is not used by algorithm {name}, which "
                "learns from answers; set data.completion_key to it"
            )
    if config.data.pass_rate_range is not None:
        yield (
            f"data.pass_rate_range = {list(config.data.pass_rate_range)} filters by rewards, "
            "and algorithm "
            f"{name} has none; leave it out"
        )


def _brings_pairs(part: RowsConfig) -> bool:
    return bool(part.chosen_key)


def _problems_with_engine(config: RunConfig) -> Iterator[str]:
    if config.model.replays_routing:
        why = f"algorithm {config.algorithm.name} generates no samples"
        yield (
            "model.routing_replay = 'rollout' replays where an engine sent the tokens that it "
            f"drew, and {why}; leave it out"
        )
    sampling, usual = config.engine.sampling, SamplingConfig()
    for key in ("temperature", "top_p", "top_k"):
        if (value := getattr(sampling, key)) != getattr(usual, key):
            why = f"algorithm {config.algorithm.name} generates no samples"
            yield (
                f"engine.sampling.{key} = {value} has no use: {why}; leave it out, or set it in "
                "evaluation.datasets.sampling"
            )
    if config.engine.name == DATASET_ENGINE and config.evaluation.datasets:
        yield (
            "engine.name = 'dataset' generates nothing, and evaluation needs an engine that "
            "does; leave engine.name out"
        )


if TYPE_CHECKING:
    from relax_events.config.run_config import RunConfig


def check_token_staleness(config: RunConfig) -> None:
    """Refuse a bound of the tokens' staleness that masks nothing.

    Raises:
        ValueError: The text names the setting, its value and the remedy.
    """
    bound, algorithm = config.algorithm.max_token_staleness, config.algorithm
    if bound is None:
        return
    if not algorithm.has_rewards:
        raise ValueError(
            f"algorithm.max_token_staleness = {bound} masks tokens by the version that generated "
            f"them, and algorithm {algorithm.name} generates none; leave it out"
        )
    if bound >= config.run.max_staleness and not config.is_replay:
        raise ValueError(
            f"algorithm.max_token_staleness = {bound} masks no token, since none is more than "
            f"run.max_staleness = {config.run.max_staleness} versions behind; set it below, or "
            "leave it out"
        )


def check_mini_batches(config: RunConfig) -> None:
    """Refuse mini-batches that a train batch can't be dealt into, and several optimizer steps where
    the algorithm can take but one.

    Raises:
        ValueError: The text names the setting, its value and the remedy.
    """
    if (problem := next(_mini_batch_problems(config), None)) is not None:
        raise ValueError(problem)


def check_trainer_memory(config: RunConfig) -> None:
    """Refuse settings that save the trainer's memory where they can't be combined with others.

    Raises:
        ValueError: The text names both settings and the remedy.
    """
    trainer = config.trainer
    replays = config.model.replays_routing and trainer.backend != "megatron"
    if trainer.activation_checkpointing != "none" and replays:
        raise ValueError(
            f"trainer.activation_checkpointing = {trainer.activation_checkpointing!r} computes "
            "layers again after model.routing_replay has ended; set one of them to 'none', or "
            "trainer.backend to 'megatron'"
        )


def check_hybrid(config: RunConfig) -> None:
    """Refuse workers of two roles in one process where they can't be paired.

    Raises:
        ValueError: The text names the setting, its value and the remedy.
    """
    roles = config.roles()
    for pair in config.hosted_pairs():
        first, second = (f"workers.{role.replace('-', '_')}" for role in pair)
        if roles[pair[0]] != roles[pair[1]]:
            raise ValueError(
                f"workers.hybrid = true pairs their processes, and {first} = {roles[pair[0]]} is "
                f"not {second} = {roles[pair[1]]}; set both to the same number"
            )
    if config.workers.hybrid and config.broker.credentials is not None:
        raise ValueError(
            "workers.hybrid = true has two roles in one process, and broker.credentials gives each "
            "role a user of its own; set workers.hybrid = false"
        )


def check_time_share(config: RunConfig) -> None:
    """Refuse that trainer and engines take turns on a device where they can't.

    Raises:
        ValueError: The text names the setting, its value and the remedy.
    """
    if config.devices.time_share and (problem := next(_time_share_problems(config), None)):
        raise ValueError(f"devices.time_share = true {problem}, or set devices.time_share = false")


def _time_share_problems(config: RunConfig) -> Iterator[str]:
    run, engine = config.run, config.rollout_engine
    if config.is_replay:
        yield "shares devices with engines, and a replay has none; leave it out"
        return
    if run.mode != "sync" and engine == "sglang":
        yield (
            f"with run.mode = {run.mode!r} takes the device from requests that run, which an "
            "SGLang server does not survive; set run.mode = 'sync' and run.max_staleness = 0"
        )
    if run.mode != "sync" and config.workers.hybrid:
        yield (
            f"with run.mode = {run.mode!r} and workers.hybrid = true would take the device from "
            "the engines for each sample that is scored; set workers.hybrid = false"
        )
    if engine not in ("transformers", "sglang"):
        yield (
            f"needs an engine that frees its memory, and that of the rollout workers is "
            f"{engine!r}; set engine.name to 'transformers' or 'sglang'"
        )
    if engine == "sglang" and config.engine.sglang.urls:
        yield (
            "needs servers that rollout workers start, and engine.sglang.urls names running ones; "
            "leave it out"
        )
    if config.weights.transport == "nccl":
        yield (
            "frees the devices between which weights.transport = 'nccl' sends; set "
            "weights.transport = 'store'"
        )


def check_trainer_backend(config: RunConfig) -> None:
    """Refuse what backend `megatron` does not train.

    Raises:
        ValueError: The text names the setting, its value and the remedy.
    """
    if config.trainer.backend != "megatron":
        return
    if (problem := next(_megatron_problems(config), None)) is not None:
        raise ValueError(
            f"trainer.backend = 'megatron' {problem}, or set trainer.backend = 'torch'"
        )


def check_critic_ranks(config: RunConfig) -> None:
    """Require that the critic can be divided over its ranks.

    Raises:
        ValueError: It can't; the text names the smallest changes that fit.
    """
    trainer, ranks = config.trainer, config.critic_ranks
    if config.algorithm.is_unread or not config.algorithm.needs_critic:
        return
    if ranks > 1 and trainer.backend == "torch" and trainer.sharding == "none":
        raise ValueError(
            f"critic.ranks = {ranks}, and backend 'torch' keeps the critic whole in one process "
            "while trainer.sharding is 'none'; set trainer.sharding = 'full', or leave "
            "critic.ranks out"
        )
    try:
        trainer.topology(ranks)
    except ConfigError as error:
        raise ValueError(str(error).replace("trainer.ranks", "critic.ranks")) from None


def _megatron_problems(config: RunConfig) -> Iterator[str]:
    model, trainer = config.model, config.trainer
    if "language" in model.frozen:
        yield "trains the decoder, and model.frozen names 'language'; leave that out"
    if trainer.sharding != "none":
        yield (
            "divides the optimizer's state over data-parallel ranks in any case, and "
            f"trainer.sharding is {trainer.sharding!r}; leave it out"
        )
    if trainer.activation_checkpointing == "selective":
        yield (
            "computes whole layers again or none, and trainer.activation_checkpointing is "
            "'selective'; set it to 'whole' or 'none'"
        )


def _mini_batch_problems(config: RunConfig) -> Iterator[str]:
    trainer, algorithm, num_groups = config.trainer, config.algorithm, config.run.prompts_per_step
    wanted = {
        "trainer": trainer.num_mini_batches,
        "critic": (config.critic.num_mini_batches or 1) if algorithm.needs_critic else 1,
    }
    for section, num_mini_batches in wanted.items():
        if num_mini_batches > num_groups:
            rule = (
                f"{section}.num_mini_batches must be at most run.prompts_per_step = {num_groups}, "
                f"got {num_mini_batches}"
            )
            yield (
                f"{rule}: prompt groups are dealt whole; set {section}.num_mini_batches or "
                "run.prompts_per_step"
            )
    if (
        trainer.has_mini_batches
        and not algorithm.is_unread
        and (reason := algorithm.spec.one_update)
    ):
        asked = (
            f"trainer.num_epochs = {trainer.num_epochs} and trainer.num_mini_batches = "
            f"{trainer.num_mini_batches}"
        )
        yield (
            f"{asked} are not for {algorithm.name}: {reason}; set both to 1, or take another "
            "algorithm"
        )
    if trainer.max_kl and not trainer.has_mini_batches:
        yield (
            f"trainer.max_kl = {trainer.max_kl:g} has nothing to end: a train step is one "
            "optimizer step; set trainer.num_epochs, or leave it out"
        )
    if trainer.max_kl and not algorithm.has_rewards:
        yield (
            f"trainer.max_kl = {trainer.max_kl:g} compares with the policy that drew the "
            f"samples, and {algorithm.name} has none; leave it out"
        )
