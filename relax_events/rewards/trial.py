"""Scores completions outside of a run, and explains the rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from relax_events.config import RewardConfig
from relax_events.config.addresses import refuse_secret_values
from relax_events.config.loading import read_value
from relax_events.data.row_values import write_label
from relax_events.errors import ConfigError, RewardError
from relax_events.events.json_text import format_json, parse_json
from relax_events.events.types import UNREAD_BY_REWARDS, SampleRolledOut
from relax_events.objects import ObjectStore, check_out
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.scores import Score
from relax_events.rewards.scoring import build_reward_item, get_fixed_score

BATCH_ITEMS = 256
Result = Score | RewardError
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


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion to score, and its sample if it comes from a log."""

    item: RewardItem
    sample: SampleRolledOut | None = None

    @property
    def is_scored(self) -> bool:
        """Whether a reward function scores it."""
        return self.sample is None or self.sample.finish_reason.is_scored

    @property
    def group_size(self) -> int:
        """Number of samples of its prompt group; 0 without one."""
        return 0 if self.sample is None else self.sample.key.samples_per_prompt


class FunctionScorer(RewardPool):
    """Scores completions by a reward function in child processes, with a run's limits, and explains
    the rewards.
    """

    def __init__(self, settings: RewardConfig, store: ObjectStore | None = None) -> None:
        """Load the function.

        Args:
            settings: The function with its limits.
            store: Holds samples' stored arrays; without it functions get no stored arrays.
        Raises:
            ConfigError: The function can't be loaded.
        """
        super().__init__(settings)
        self._store = store

    def score(self, batch: Sequence[Completion]) -> Sequence[Result]:
        """Score completions as a run would.

        Raises:
            ConfigError: The function scores prompt groups, and these are texts.
        """
        if self.takes_prompt_group and any(one.sample is None for one in batch):
            raise ConfigError(
                f"{self.name} scores prompt groups, which texts are not; use relax rewards with "
                "--run"
            )
        return self.score_fetched([self.fetch(completion) for completion in batch])

    def score_fetched(self, batch: Sequence[Completion]) -> list[Result]:
        """Score fetched completions; samples that were lost or late as a run does."""
        items = [one.item for one in batch if one.is_scored]
        results = iter(self.score_batch(items) if items else ())
        return [next(results) if one.is_scored else self._get_fixed(one) for one in batch]

    def _get_fixed(self, completion: Completion) -> Result:
        assert completion.sample is not None, "a text is scored"
        reason = completion.sample.finish_reason
        return get_fixed_score(reason, self._config) or RewardError(
            f"sample {completion.item.sample_id} was {reason}: it has no reward"
        )

    def fetch(self, completion: Completion) -> Completion:
        """Return a completion with its sample's stored arrays, if the function takes any."""
        if self._store is None or completion.sample is None or not self.optional_arguments:
            return completion
        sample = check_out(completion.sample, self._store, leave=UNREAD_BY_REWARDS)
        return Completion(build_reward_item(sample), sample)

    def describe(self, item: RewardItem, result: Result) -> ScoredCompletion:
        """Return a result with its explanation, if the function gives one."""
        scored = describe_result(item, result)
        if scored.reward is None:
            return scored
        try:
            explanation = self.explain(item)
        except RewardError as error:
            return replace(scored, why=str(error))
        if explanation is None:
            return scored
        answer, location, why = explanation.answer, explanation.location, explanation.why
        return replace(scored, answer=answer, location=location, why=why)


def describe_result(item: RewardItem, result: Result) -> ScoredCompletion:
    """Return a result without an explanation."""
    if isinstance(result, Score):
        return ScoredCompletion(item.sample_id, result.reward, result.components)
    return ScoredCompletion(item.sample_id, None, {}, error=str(result))


def split_into_batches(items: Iterable[RewardItem]) -> Iterator[list[Completion]]:
    """Yield texts in lists of bounded length."""
    waiting = map(Completion, items)
    while batch := list(islice(waiting, BATCH_ITEMS)):
        yield batch


def replace_function(
    section: RewardConfig, function: str, assignments: Sequence[str], *, workers: int | None = None
) -> RewardConfig:
    """Return a reward section with another function, or with its own and its options changed; its
    limits hold for both.

    Args:
        section: The section.
        function: A name that `relax rewards` knows, or path/to/file.py:function.
        assignments: Options of the function, each NAME=VALUE.
        workers: Child processes that run the function; None keeps `processes`.
    Raises:
        ConfigError: An option is not NAME=VALUE, holds a secret, or sends one where it may
            not.
    """
    if wrong := [text for text in assignments if not text.partition("=")[0] or "=" not in text]:
        raise ConfigError(f"--option must be NAME=VALUE, got {wrong[0]!r}")
    options = {
        name: read_value(value) for name, _, value in (text.partition("=") for text in assignments)
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
        row = parse_json(line.decode())
    except ValueError as error:
        raise ConfigError(f"{line_location} is not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("completion"), str):
        raise ConfigError(
            f"{line_location} must be an object with the text `completion`, and may have "
            f"{', '.join(JSONL_KEYS[1:])}"
        )
    metadata = row.get("metadata") or {}
    checked_metadata = parse_metadata(
        metadata if isinstance(metadata, str) else format_json(metadata), line_location
    )
    return RewardItem(
        sample_id,
        row["completion"],
        write_label(row.get("answer"), line_location),
        checked_metadata,
        str(row.get("prompt") or ""),
    )


def parse_metadata(text: str, line_location: str) -> str:
    """Check that metadata are a JSON object, and return them unchanged.

    Raises:
        ConfigError: They are not a JSON object.
    """
    try:
        metadata = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{line_location}: metadata is not JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise ConfigError(f"{line_location}: metadata must be a JSON object, got {text:.40}")
    return text
