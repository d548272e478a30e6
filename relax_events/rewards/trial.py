"""Score completions outside of a run, and explain the rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import orjson
from pydantic import ValidationError

from relax_events.config import RewardConfig
from relax_events.config.addresses import refuse_secret_values
from relax_events.config.loading import read_value
from relax_events.errors import ConfigError, RewardError
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.registry import (
    find_function,
    takes_prompt_group,
)
from relax_events.rewards.scores import Score

JSONL_KEYS = ("completion", "answer", "prompt", "metadata")


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A completion's reward or error; `answer`, `location` and `why` if the function can explain
    itself.
    """

    sample_id: str
    reward: float | None
    components: Mapping[str, float]
    error: str | None = None
    answer: str | None = None
    location: str | None = None
    why: str | None = None


class RewardTrial(AbstractContextManager["RewardTrial"]):
    """Scores completions one by one in child processes with a run's limits, and explains the
    rewards.
    """

    def __init__(self, settings: RewardConfig) -> None:
        """Load the function.

        Raises:
            ConfigError: The function scores prompt groups, can't be loaded, or rejects the options.
        """
        self._settings = settings
        functions = {
            name: find_function(name)[0]
            for name in (settings.function, *(route.function for route in settings.routes.values()))
        }
        for name, function in functions.items():
            if takes_prompt_group(function):
                raise ConfigError(
                    f"{name} scores prompt groups, and this command scores completions one "
                    "by one; use relax rescore"
                )
        self._pool = RewardPool(settings)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.close()

    @property
    def name(self) -> str:
        """Name of the function."""
        return self._pool.name

    def score(self, items: Sequence[RewardItem]) -> list[Score | RewardError]:
        """Score completions as a run would."""
        return self._pool.score_batch(items)

    def explain(self, item: RewardItem, result: Score | RewardError) -> ScoredCompletion:
        """Return the score of a completion with its explanation; sections with routes have no
        explanation.
        """
        if not isinstance(result, Score):
            return ScoredCompletion(item.sample_id, None, {}, error=str(result))
        verdict: tuple[str | None, str | None, str | None] = (None, None, None)
        try:
            if not self._settings.routes and (said := self._pool.explain(item)):
                verdict = said.answer, said.location, said.why
        except RewardError as error:
            verdict = None, None, str(error)
        return ScoredCompletion(item.sample_id, result.reward, result.components, None, *verdict)


def replace_function(
    section: RewardConfig, function: str, given: Sequence[str], *, workers: int | None = None
) -> RewardConfig:
    """Return a reward section with another function, or with its own and its options changed; its
    limits hold for both.

    Args:
        section: The section.
        function: A name that `relax rewards list` knows, or path/to/file.py:function.
        given: Options of the function, each NAME=VALUE.
        workers: Child processes that run the function; None keeps `processes`.
    Raises:
        ConfigError: What was given is not NAME=VALUE, or holds a secret or sends one where it may
            not.
    """
    if wrong := [text for text in given if not text.partition("=")[0] or "=" not in text]:
        raise ConfigError(f"--option must be NAME=VALUE, got {wrong[0]!r}")
    options = {
        name: read_value(value) for name, _, value in (text.partition("=") for text in given)
    }
    is_same = function == section.function
    changes = {
        "function": function,
        "options": (section.options if is_same else {}) | options,
        "processes": workers or section.processes,
    }
    refuse_secret_values({"reward": {"options": options}})
    try:
        return RewardConfig.model_validate(
            dict(section) | changes | ({} if is_same else {"weights": {}, "routes": {}})
        )
    except ValidationError as error:
        raise ConfigError(
            f"reward: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None


def try_reward(settings: RewardConfig, items: Sequence[RewardItem]) -> list[ScoredCompletion]:
    """Score completions as a run would, and explain the rewards; raises as `RewardTrial`."""
    with RewardTrial(settings) as trial:
        return [
            trial.explain(item, result)
            for item, result in zip(items, trial.score(items), strict=True)
        ]


def read_items(file: Path) -> Iterator[RewardItem]:
    """Read completions from a JSONL file: objects with `completion` and optionally `answer`,
    `prompt` and `metadata`.

    Raises:
        ConfigError: The file or a line of it can't be read; the text names the line.
    """
    try:
        lines = file.open("rb")
    except OSError as error:
        raise ConfigError(f"--jsonl {file} can't be read: {error.strerror}") from None
    with lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _item(line, f"{file}:{number}", str(number))


def _item(line: bytes, line_location: str, sample_id: str) -> RewardItem:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{line_location} is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("completion"), str):
        raise ConfigError(
            f"{line_location} must be an object with the text `completion`, and may have "
            f"{', '.join(JSONL_KEYS[1:])}"
        )
    metadata = found.get("metadata") or {}
    said = parse_metadata(
        metadata if isinstance(metadata, str) else orjson.dumps(metadata).decode(), line_location
    )
    return RewardItem(
        sample_id,
        found["completion"],
        str(found.get("answer") or ""),
        said,
        str(found.get("prompt") or ""),
    )


def parse_metadata(text: str, line_location: str) -> str:
    """Check that metadata are a JSON object, and return them unchanged.

    Raises:
        ConfigError: They are not a JSON object.
    """
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{line_location}: metadata is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{line_location}: metadata must be a JSON object, got {text:.40}")
    return text
