"""What the data must bring for an algorithm that learns from it, and what has no use for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_events.config.algorithm_spec import GROUP_SIZES
from relax_events.config.data import KEYS_TO_LEARN
from relax_events.config.engine import DATASET_ENGINE, SamplingConfig

if TYPE_CHECKING:
    from relax_events.config.run_config import RunConfig


def check_learning(config: RunConfig) -> Iterator[str]:
    """Give what does not fit to what the algorithm learns from: rewards, answers or pairs.

    A replay generates nothing either way: of it only the size of its prompt groups must fit. Of an
    algorithm that is not read nothing is known.
    """
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
        least = config.algorithm.min_samples_per_group
        if least == 1 or least > size:
            yield (
                f"algorithm.min_samples_per_group must be 0, or from 2 to "
                f"run.samples_per_prompt = {size}, got {least}: algorithm {name} compares a "
                "prompt's samples"
            )
        if not config.is_replay:
            yield from _check_rewards(config)
        return
    num_samples = GROUP_SIZES[learns_from]
    if size != num_samples and not (config.is_replay and learns_from == "answers"):
        yield (
            f"run.samples_per_prompt must be {num_samples}, got {size}: algorithm {name} learns "
            f"from {learns_from}; leave it out"
        )
    if not config.is_replay:
        yield from _check_data(config)
        yield from _check_engine(config)


def _check_rewards(config: RunConfig) -> Iterator[str]:
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


def _check_data(config: RunConfig) -> Iterator[str]:
    name, pairs = config.algorithm.name, config.algorithm.learns_from == "pairs"
    for part in config.data.parts:
        if pairs and not part.chosen_key:
            yield (
                f"algorithm {name} learns from pairs, and {part.source} names none; set "
                "data.chosen_key and data.rejected_key"
            )
        if not pairs and part.chosen_key:
            yield (
                f"data.chosen_key = {part.chosen_key!r} is not used by algorithm {name}, which "
                "learns from answers; set data.completion_key to it"
            )
    if config.data.pass_rate_range is not None:
        yield (
            f"data.pass_rate_range = {list(config.data.pass_rate_range)} filters by rewards, "
            f"and algorithm {name} has none; leave it out"
        )


def _check_engine(config: RunConfig) -> Iterator[str]:
    if config.model.replays_routing:
        yield (
            "model.routing_replay = 'rollout' replays where an engine sent the tokens that it "
            f"drew, and algorithm {config.algorithm.name} generates no samples; leave it out"
        )
    sampling, usual = config.engine.sampling, SamplingConfig()
    for key in ("temperature", "top_p", "top_k"):
        if (value := getattr(sampling, key)) != getattr(usual, key):
            yield (
                f"engine.sampling.{key} = {value} has no use: algorithm {config.algorithm.name} "
                "generates no samples; leave it out, or set it in evaluation.datasets.sampling"
            )
    if config.engine.name == DATASET_ENGINE and config.evaluation.datasets:
        yield (
            "engine.name = 'dataset' generates nothing, and evaluation needs an engine that "
            "does; leave engine.name out"
        )
