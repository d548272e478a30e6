"""What a prompt is before it is issued, and what every source of prompts can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from relax_events.events.types import ChatMessage


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A problem: the conversation so far, the reference answer, and a JSON object that the reward function may need."""

    messages: list[ChatMessage]
    answer: str
    metadata: str = "{}"


class PromptSource(Protocol):
    """A fixed number of prompts with random access; the same index always gives the same row."""

    @property
    def rows(self) -> int:
        """Number of rows, at least 1."""

    def row(self, index: int) -> PromptRow:
        """Read or make row `index`, with 0 <= index < rows.

        Raises:
            IndexError: There is no such row.
            ConfigError: The row can't be used; the text names it.
        """


def with_system_prompt(messages: list[ChatMessage], system_prompt: str) -> list[ChatMessage]:
    """Put the system prompt first; a conversation that brings its own keeps it."""
    if not system_prompt or (messages and messages[0].role == "system"):
        return messages
    return [ChatMessage.of_text("system", system_prompt), *messages]
