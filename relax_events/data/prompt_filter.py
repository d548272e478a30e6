"""Which prompts are worth a rollout: by their length, by what they earned before, by a function of
the user's.

A judge is asked about a row that could be issued next. It gives the row's place in the order, lower
first, or the reason for which the row is passed over. All that it may look at is the row, what the
log says it earned, and the train step, so that a prompter that starts again judges as the one
before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Protocol

import orjson

from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.row_media import MediaJudge, MessagesOf, plain_messages
from relax_events.data.rows import PromptRow
from relax_events.data.sft_targets import answers_of
from relax_events.data.sources import media_brought
from relax_events.data.stream import DataPlace
from relax_events.errors import ConfigError, PoisonSample
from relax_events.plugins import FUNCTION, FilePlugin, find_plugin

HOOKS = "relax_events.data_hooks"
NUM_EARNED = 16
"""Mean rewards that are remembered of each row."""
Verdict = float | str
"""A place in the order, or the reason to pass over a row."""


class Judge(Protocol):
    """Judges a row; see the module's docstring."""

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> Verdict:
        """Give a verdict.

        Args:
            row: The prompt.
            mean_rewards: Of the newest prompt groups that it was issued in before and that ended,
                oldest first; `NUM_EARNED` at most.
            train_step: The step that wants a prompt.
        """


class History:
    """What rows of the data earned so far, by the ends of their prompt groups in log order: of each
    row the newest `NUM_EARNED`.
    """

    def __init__(self) -> None:
        self._mean_rewards: dict[DataPlace, deque[float]] = {}

    def note(self, place: DataPlace, mean_reward: float) -> None:
        """Enter the end of a prompt group."""
        self._mean_rewards.setdefault(place, deque(maxlen=NUM_EARNED)).append(mean_reward)

    def __getitem__(self, place: DataPlace) -> Sequence[float]:
        """Return the newest mean rewards of a row, oldest first."""
        return tuple(self._mean_rewards.get(place, ()))

    def entries(self) -> Iterator[tuple[DataPlace, float]]:
        """Give everything that is known, oldest first by row; another history that is told it knows
        the same.
        """
        return (
            (place, reward) for place, rewards in self._mean_rewards.items() for reward in rewards
        )


class LengthJudge:
    """Passes over prompts that are too short, too long, or that the chat template refuses, and
    likewise the answers that rows bring.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        *,
        min_tokens: int,
        max_tokens: int,
        max_sample_tokens: int = 0,
        messages_of: MessagesOf = plain_messages,
    ) -> None:
        self._renderer, self._min, self._max, self._max_sample = (
            renderer,
            min_tokens,
            max_tokens,
            max_sample_tokens,
        )
        self._messages_of = messages_of

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> Verdict:
        """See `Judge`."""
        try:
            num_tokens = len(self._renderer.prompt_tokens(self._messages_of(row), tools=row.tools))
        except PoisonSample:
            return "refused_by_template"
        if num_tokens < self._min:
            return "too_short"
        if 0 < self._max < num_tokens:
            return "too_long"
        return self._judge_answers(row, num_tokens) if self._max_sample else 0.0

    def _judge_answers(self, row: PromptRow, num_prompt_tokens: int) -> Verdict:
        try:
            longest = max(len(answer.tokens) for answer in answers_of(row, renderer=self._renderer))
        except PoisonSample:
            return "answer_refused"
        return "answer_too_long" if num_prompt_tokens + longest > self._max_sample else 0.0


class PassRateJudge:
    """Passes over prompts whose newest mean reward lies outside of the bounds; with rewards of 0
    and 1 it is their pass rate.
    """

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> Verdict:
        """See `Judge`."""
        if not mean_rewards or self._low <= mean_rewards[-1] <= self._high:
            return 0.0
        return "pass_rate_too_low" if mean_rewards[-1] < self._low else "pass_rate_too_high"


class HookJudge:
    """Asks the user's function: `choose(prompt, *, answer, metadata, mean_rewards, train_step)`.

    A number is the row's place in the order, None or False passes over it, True takes it as it
    comes.
    """

    def __init__(self, name: str) -> None:
        """Load the function.

        Raises:
            ConfigError: There is no such file or function, or the file fails to load.
        """
        self._name = name
        self._function = find_hook(name).load()

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> Verdict:
        """See `Judge`.

        Raises:
            ConfigError: The function fails, or gives something else.
        """
        prompt = "\n".join(message.text for message in row.messages)
        facts: Mapping[str, Any] = {
            "answer": row.answer,
            "metadata": orjson.loads(row.metadata),
            "mean_rewards": list(mean_rewards),
        }
        try:
            given = self._function(prompt, **facts, train_step=train_step)
        except (
            Exception
        ) as error:  # The user's function may raise anything; this is the border to it.
            raise ConfigError(
                f"data.hook {self._name} failed with {type(error).__name__}: {error} on "
                f"prompt {prompt!r:.80}"
            ) from error
        if given is None or given is False:
            return "hook"
        if not isinstance(given, int | float) or given != given:
            raise ConfigError(
                f"data.hook {self._name} gave {given!r:.60} for prompt {prompt!r:.80}; it "
                "must give a number, True, False or None"
            )
        return 0.0 if given is True else float(given)


def find_hook(name: str) -> EntryPoint | FilePlugin:
    """Find the function of `data.hook` without loading it.

    Raises:
        ConfigError: There is no such file, or no function of that name is installed.
    """
    return find_plugin(HOOKS, name, what=f"data.hook = {name!r}", accepts=FUNCTION)


def judges_of(
    config: DataConfig, *, renderer: PromptRenderer | None, messages_of: MessagesOf = plain_messages
) -> list[Judge]:
    """Return the judges that a run file asks for, in the order in which they are asked.

    Args:
        config: The run file's data section.
        renderer: Needed where prompts are judged by length.
        messages_of: Puts the media of rows into the store, where they bring some.
    Raises:
        ConfigError: The hook can't be loaded.
    """
    judges: list[Judge] = [MediaJudge(messages_of)] if any(map(media_brought, config.parts)) else []
    if renderer is not None and judges_length(config):
        judges.append(length_judge(renderer, config, messages_of=messages_of))
    if config.pass_rate is not None:
        judges.append(PassRateJudge(*config.pass_rate))
    if config.hook:
        judges.append(HookJudge(config.hook))
    return judges


def length_judge(
    renderer: PromptRenderer, config: DataConfig, *, messages_of: MessagesOf = plain_messages
) -> LengthJudge:
    """Return the judge of lengths that a run file asks for."""
    return LengthJudge(
        renderer,
        min_tokens=config.min_prompt_tokens,
        max_tokens=config.max_prompt_tokens,
        max_sample_tokens=config.max_sample_tokens,
        messages_of=messages_of,
    )


def judges_length(config: DataConfig) -> bool:
    """Tell whether prompts have to be rendered to be judged."""
    return bool(config.min_prompt_tokens or config.max_prompt_tokens or config.max_sample_tokens)


def needs_history(config: DataConfig) -> bool:
    """Tell whether what prompts earned before decides about them."""
    return config.pass_rate is not None or bool(config.hook)
