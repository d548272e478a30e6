"""Scores completions outside of a run, and says what the reward function read in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from relax_events.config import RewardConfig
from relax_events.errors import ConfigError
from relax_events.rewards.declaring import Explanation, facts_of
from relax_events.rewards.hub import check_options, find_function, takes_prompt_group
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.scores import Score

KEYS = ("completion", "answer", "prompt", "metadata")


@dataclass(frozen=True, slots=True)
class TriedCompletion:
    """A completion's reward, or why there is none; `answer`, `place` and `why` where the function can explain itself."""

    sample_id: str
    reward: float | None
    components: Mapping[str, float]
    error: str | None = None
    answer: str | None = None
    place: str | None = None
    why: str | None = None


def try_reward(settings: RewardConfig, items: Sequence[RewardItem]) -> list[TriedCompletion]:
    """Score completions as a run would, in child processes with its limits, and explain the rewards.

    Raises:
        ConfigError: The function scores prompt groups, can't be loaded, or does not take the options.
    """
    function, _ = find_function(settings.function)
    if takes_prompt_group(function):
        raise ConfigError(f"{settings.function} scores prompt groups, and this command scores completions one by one; use relax rescore")
    options = check_options(function, settings.function, settings.options)
    with RewardPool(settings) as pool:
        results = pool.score_batch(items)
    explain, prepare = facts_of(function).explain, facts_of(function).prepare
    if explain is not None and prepare is not None:
        prepare()
    tried = []
    for item, result in zip(items, results, strict=True):
        if not isinstance(result, Score):
            tried.append(TriedCompletion(item.sample_id, None, {}, error=str(result)))
            continue
        said: Explanation | None = None
        if explain is not None:
            said = explain(item.completion, answer=item.answer, metadata=orjson.loads(item.metadata), prompt=item.prompt, **options)
        told = (said.answer, said.place, said.why) if said else (None, None, None)
        tried.append(TriedCompletion(item.sample_id, result.reward, result.components, None, *told))
    return tried


def read_items(file: Path) -> Iterator[RewardItem]:
    """Read completions from a JSONL file: objects with `completion` and, where the reward needs them, `answer`, `prompt` and `metadata`.

    Raises:
        ConfigError: The file or a line of it can't be read; the text names the line.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--jsonl {file} can't be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _item(line, f"{file}:{number}", str(number))


def _item(line: bytes, place: str, sample_id: str) -> RewardItem:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("completion"), str):
        raise ConfigError(f"{place} must be an object with the text `completion`, and may have {', '.join(KEYS[1:])}")
    metadata = found.get("metadata") or {}
    said = parse_metadata(metadata if isinstance(metadata, str) else orjson.dumps(metadata).decode(), place)
    return RewardItem(sample_id, found["completion"], str(found.get("answer") or ""), said, str(found.get("prompt") or ""))


def parse_metadata(text: str, place: str) -> str:
    """Return metadata as they are.

    Raises:
        ConfigError: They are not a JSON object.
    """
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place}: metadata is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{place}: metadata must be a JSON object, got {text:.40}")
    return text
