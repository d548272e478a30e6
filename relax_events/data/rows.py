"""What a prompt is before it is issued, and what every source of prompts can do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from relax_events.config import RowsConfig
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, Modality
from relax_events.media.items import MediaItem

NUM_NAMED = 8


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A problem: the conversation so far, the reference answer, a JSON object that the reward
    function may need, and a JSON list of tools.

    `completions` are what the row brings to learn from, each the messages that follow the
    conversation so far: one, or a chosen and a rejected one. A single message to learn is the
    `answer`, and stands here only where the reference answer is another. `media` are what the parts
    without text in the conversation stand for, in order; nothing of them has been read.
    """

    messages: list[ChatMessage]
    answer: str
    metadata: str = "{}"
    tools: str = ""
    completions: list[list[ChatMessage]] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)


class PromptSource(Protocol):
    """A fixed number of prompts with random access; the same index always gives the same row."""

    @property
    def rows(self) -> int:
        """Number of rows, at least 1."""

    @property
    def unfit(self) -> UnfitRows:
        """The rows that were left out."""

    def row(self, index: int) -> PromptRow:
        """Read or make row `index`, with 0 <= index < rows.

        Raises:
            IndexError: There is no such row.
            ConfigError: The row can't be used; the text names it.
        """


@dataclass(slots=True)
class UnfitRows:
    """Counts the rows of a file that can't be used, and names the first of them."""

    section: str
    allowed: int = 0
    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, error: ConfigError) -> None:
        """Note a row.

        Raises:
            ConfigError: It is one more than the run file allows.
        """
        self.count += 1
        if len(self.named) < NUM_NAMED:
            self.named.append(str(error))
        if self.count > self.allowed:
            more = (
                (
                    f"; it is unfit row number {self.count}, and {self.section}.max_bad_rows is "
                    f"{self.allowed}"
                )
                if self.allowed
                else ""
            )
            raise ConfigError(f"{error}{more}")


def with_system_prompt(messages: list[ChatMessage], system_prompt: str) -> list[ChatMessage]:
    """Put the system prompt first; a conversation that brings its own keeps it."""
    if not system_prompt or (messages and messages[0].role == "system"):
        return messages
    return [ChatMessage.of_text("system", system_prompt), *messages]


class PromptSourceKind(Protocol):
    """A kind of prompt source that a package adds by an entry point in the group
    `relax_events.prompt_sources`.
    """

    modality: Modality
    """Of the media that its rows bring."""

    def open(self, name: str, task: str, config: RowsConfig, *, seed: int) -> PromptSource:
        """Open a source.

        Args:
            name: The entry point's, as run files name it.
            task: What follows the name in `data.source`.
            config: Gives the number of rows, the options and the system prompt.
            seed: The run's seed.
        Raises:
            ConfigError: There is no such task, or it does not take these options.
        """
        ...
