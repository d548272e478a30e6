"""The section `data`: the prompts."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from relax_events.config.base import Positive, Section


class DataConfig(Section):
    """The prompts."""

    source: str
    """`jsonl:<path>`, or `reasoning_gym:<task>` for generated problems with their own verifier."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column that holds the reference answer for the reward."""
    system_prompt: str = ""
    """Put before every prompt as a system message, when not empty."""
    chat_template: bool = True
    """Render by the tokenizer's chat template; false takes the prompt as it stands."""
    size: Positive = 1000
    """Number of generated problems (generated sources only)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the problem generator (generated sources only)."""
    shuffle: bool = True
    """A new order each epoch, derived from the run's seed."""
