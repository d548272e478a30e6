"""Filter and rank prompts: by length, by earlier rewards, or by a user function.

A filter is called for a row that could be issued next. It returns the row's rank (lower first) or
the reason to skip it. It depends only on the row, its recorded rewards and the train step, so a
restarted prompter gets the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import MediaFilter, MessageReader, PromptRow, plain_messages
from relax_events.data.sft_targets import tokenize_targets
from relax_events.data.stream import DatasetRow
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.json_text import parse_json
from relax_events.plugins import FUNCTION, FilePlugin, find_plugin, select_named

HOOKS = "relax_events.data_hooks"
FILTER_ARGUMENTS = ("answer", "metadata", "mean_rewards", "train_step")
MAX_REWARDS_PER_ROW = 16
"""Number of mean rewards kept for each row."""
FilterResult = float | str
"""A rank (lower first), or the reason to skip a row."""


class PromptFilter(Protocol):
    """Ranks or skips a row; see the module's docstring."""

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> FilterResult:
        """Return a rank, or the reason to skip the row.

        Args:
            row: The prompt.
            mean_rewards: Mean rewards of the newest finished prompt groups of this row, oldest
                first; at most `MAX_REWARDS_PER_ROW`.
            train_step: The step that the prompt is for.
        """


class RewardHistory:
    """The newest `MAX_REWARDS_PER_ROW` mean rewards of each row, in the log order of the prompt
    groups' ends.
    """

    def __init__(self) -> None:
        self._mean_rewards: dict[DatasetRow, deque[float]] = {}

    def add(self, row: DatasetRow, mean_reward: float) -> None:
        """Add the mean reward of a finished prompt group."""
        self._mean_rewards.setdefault(row, deque(maxlen=MAX_REWARDS_PER_ROW)).append(mean_reward)

    def __getitem__(self, row: DatasetRow) -> Sequence[float]:
        """Return the newest mean rewards of a row, oldest first."""
        return tuple(self._mean_rewards.get(row, ()))

    def entries(self) -> Iterator[tuple[DatasetRow, float]]:
        """Yield all entries, oldest first by row; adding them to an empty history copies it."""
        return ((row, reward) for row, rewards in self._mean_rewards.items() for reward in rewards)


class LengthFilter:
    """Skips prompts that are too short, too long or rejected by the chat template, or whose targets
    are too long or rejected.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        *,
        min_tokens: int,
        max_tokens: int,
        max_sample_tokens: int = 0,
        read_messages: MessageReader = plain_messages,
    ) -> None:
        self._renderer, self._min, self._max, self._max_sample = (
            renderer,
            min_tokens,
            max_tokens,
            max_sample_tokens,
        )
        self._read_messages = read_messages

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> FilterResult:
        """See `PromptFilter`."""
        try:
            num_tokens = len(self._renderer.row_tokens(self._read_messages(row), tools=row.tools))
        except PoisonSample:
            return "refused_by_template"
        if num_tokens < self._min:
            return "too_short"
        if 0 < self._max < num_tokens:
            return "too_long"
        return self._filter_answers(row, num_tokens) if self._max_sample else 0.0

    def _filter_answers(self, row: PromptRow, num_prompt_tokens: int) -> FilterResult:
        try:
            longest = max(
                len(answer.tokens) for answer in tokenize_targets(row, renderer=self._renderer)
            )
        except PoisonSample:
            return "answer_refused"
        return "answer_too_long" if num_prompt_tokens + longest > self._max_sample else 0.0


class PassRateFilter:
    """Skips prompts whose newest mean reward is out of bounds; with rewards of 0 and 1 that is the
    pass rate.
    """

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> FilterResult:
        """See `PromptFilter`."""
        if not mean_rewards or self._low <= mean_rewards[-1] <= self._high:
            return 0.0
        return "pass_rate_too_low" if mean_rewards[-1] < self._low else "pass_rate_too_high"


class FunctionFilter:
    """Calls the user's function: `choose(prompt, *, answer, metadata, mean_rewards, train_step)`,
    with the keyword arguments that it names.

    A number is the row's rank, None or False skips the row, True keeps its order.
    """

    def __init__(self, name: str) -> None:
        """Load the function.

        Raises:
            ConfigError: There is no such file or function, or the file fails to load.
        """
        self._name = name
        self._function = find_hook(name).load()
        self._named = select_named(self._function, FILTER_ARGUMENTS)

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> FilterResult:
        """See `PromptFilter`.

        Raises:
            ConfigError: The function fails, or returns a value of another type.
        """
        prompt = "\n".join(message.text for message in row.messages)
        facts: Mapping[str, Any] = {
            "answer": row.answer,
            "metadata": parse_json(row.metadata),
            "mean_rewards": list(mean_rewards),
            "train_step": train_step,
        }
        try:
            result = self._function(prompt, **{name: facts[name] for name in self._named})
        except Exception as error:  # the user's function may raise any exception
            raise ConfigError(
                f"data.prompt_filter {self._name} failed with {type(error).__name__}: {error} on "
                f"prompt {prompt!r:.80}"
            ) from error
        if result is None or result is False:
            return "prompt_filter"
        if not isinstance(result, int | float) or result != result:
            raise ConfigError(
                f"data.prompt_filter {self._name} returned {result!r:.60} for prompt "
                f"{prompt!r:.80}; it must return a number, True, False or None"
            )
        return 0.0 if result is True else float(result)


def find_hook(name: str) -> EntryPoint | FilePlugin:
    """Find the function of `data.prompt_filter` without loading it.

    Raises:
        ConfigError: There is no such file, or no function of that name is installed.
    """
    return find_plugin(HOOKS, name, what=f"data.prompt_filter = {name!r}", accepts=FUNCTION)


def build_filters(
    config: DataConfig,
    *,
    renderer: PromptRenderer | None,
    read_messages: MessageReader = plain_messages,
) -> list[PromptFilter]:
    """Build the filters of a run file, in the order in which they run.

    Args:
        config: The run file's data section.
        renderer: Required if prompts are filtered by length.
        read_messages: Stores the media of a row, if any, and returns its messages.
    Raises:
        ConfigError: The user's function can't be loaded.
    """
    filters: list[PromptFilter] = [MediaFilter(read_messages)]
    if renderer is not None and needs_token_counts(config):
        filters.append(build_length_filter(renderer, config, read_messages=read_messages))
    if config.pass_rate_range is not None:
        filters.append(PassRateFilter(*config.pass_rate_range))
    if config.prompt_filter:
        filters.append(FunctionFilter(config.prompt_filter))
    return filters


def build_length_filter(
    renderer: PromptRenderer, config: DataConfig, *, read_messages: MessageReader = plain_messages
) -> LengthFilter:
    """Build the length filter of a run file."""
    return LengthFilter(
        renderer,
        min_tokens=config.min_prompt_tokens,
        max_tokens=config.max_prompt_tokens,
        max_sample_tokens=config.max_sample_tokens,
        read_messages=read_messages,
    )


def needs_token_counts(config: DataConfig) -> bool:
    """Return whether the filters need the token counts of prompts."""
    return bool(config.min_prompt_tokens or config.max_prompt_tokens or config.max_sample_tokens)


def needs_history(config: DataConfig) -> bool:
    """Return whether the filters need earlier rewards."""
    return config.pass_rate_range is not None or bool(config.prompt_filter)
