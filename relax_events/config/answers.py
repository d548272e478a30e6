"""What an algorithm asks of the rest of a run file when it learns from the data's own answers: nothing is generated, nothing is rewarded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationInfo

from relax_events.config.algorithm_spec import find_algorithm, is_from_log
from relax_events.config.data import LEARNT_KEYS, RowsConfig
from relax_events.config.generation import SamplingConfig
from relax_events.errors import ConfigError

if TYPE_CHECKING:
    from relax_events.config.sections import RunConfig

DATASET_ENGINE = "dataset"
"""The engine that hands out what a row brings."""
GROUP_SIZES = {"answers": 1, "pairs": 2}
"""Samples of a prompt group, by what the algorithm learns from."""


def with_group_size(given: Any, info: ValidationInfo) -> Any:
    """Fill in `run.samples_per_prompt` where the algorithm leaves no choice and the run file does not name it."""
    algorithm, run = (given.get(name) for name in ("algorithm", "run")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(algorithm, Mapping) or not isinstance(run, Mapping) or "samples_per_prompt" in run:
        return given
    name = str(algorithm.get("name", "grpo"))
    if is_from_log(name, info):
        return given
    try:
        size = GROUP_SIZES.get(find_algorithm(name).learns_from)
    except ConfigError:  # told when the section itself is checked
        return given
    return given if size is None else {**given, "run": {**run, "samples_per_prompt": size}}


def check_answers(config: RunConfig) -> None:
    """Refuse settings that don't fit what the algorithm learns from.

    A replay generates nothing either way: of it only the size of its prompt groups must fit. Of an algorithm that is not read nothing is known.

    Raises:
        ValueError: The text names the setting, its value and the remedy.
    """
    if (problem := next(_problems(config), None)) is not None:
        raise ValueError(problem)


def _problems(config: RunConfig) -> Iterator[str]:
    if config.algorithm.is_unread:
        return
    name, learns_from, size = config.algorithm.name, config.algorithm.learns_from, config.run.samples_per_prompt
    if learns_from == "rewards":
        if size < 2:
            yield f"run.samples_per_prompt must be >= 2, got {size}: algorithm {name} compares a prompt's samples"
        if not config.is_replay:
            yield from _problems_with_rewards(config)
        return
    wanted = GROUP_SIZES[learns_from]
    if size != wanted and not (config.is_replay and learns_from == "answers"):
        yield f"run.samples_per_prompt must be {wanted}, got {size}: algorithm {name} learns from {learns_from}; leave it out"
    if not config.is_replay:
        yield from _problems_with_data(config)
        yield from _problems_with_engine(config)


def _problems_with_rewards(config: RunConfig) -> Iterator[str]:
    for part in config.data.parts:
        for key in LEARNT_KEYS:
            if value := getattr(part, key):
                yield f"data.{key} = {value!r} is not used by algorithm {config.algorithm.name}, which learns from rewards; leave it out"
    if tokens := config.data.max_sample_tokens:
        yield f"data.max_sample_tokens = {tokens} measures answers that the data bring; set engine.sampling.max_new_tokens, or data.max_prompt_tokens"
    if config.engine.name == DATASET_ENGINE:
        yield f"engine.name = 'dataset' generates nothing, and algorithm {config.algorithm.name} learns from what is generated; set engine.name"


def _problems_with_data(config: RunConfig) -> Iterator[str]:
    name, pairs = config.algorithm.name, config.algorithm.learns_from == "pairs"
    for part in config.data.parts:
        if pairs and not _brings_pairs(part):
            yield f"algorithm {name} learns from pairs, and {part.source} names none; set data.chosen_key and data.rejected_key"
        if not pairs and _brings_pairs(part):
            yield f"data.chosen_key = {part.chosen_key!r} is not used by algorithm {name}, which learns from answers; set data.completion_key to it"
    if config.data.pass_rate is not None:
        yield f"data.pass_rate = {list(config.data.pass_rate)} judges by rewards, and algorithm {name} has none; leave it out"


def _brings_pairs(part: RowsConfig) -> bool:
    return bool(part.chosen_key)


def _problems_with_engine(config: RunConfig) -> Iterator[str]:
    if config.model.replays_routing:
        why = f"algorithm {config.algorithm.name} draws no samples"
        yield f"model.routing_replay = 'rollout' replays where an engine sent the tokens that it drew, and {why}; leave it out"
    sampling, usual = config.engine.sampling, SamplingConfig()
    for key in ("temperature", "top_p", "top_k"):
        if (value := getattr(sampling, key)) != getattr(usual, key):
            why = f"algorithm {config.algorithm.name} draws no samples"
            yield f"engine.sampling.{key} = {value} has no use: {why}; leave it out, or set it in evaluation.datasets.sampling"
    if config.engine.name == DATASET_ENGINE and config.evaluation.datasets:
        yield "engine.name = 'dataset' generates nothing, and evaluation needs an engine that does; leave engine.name out"
