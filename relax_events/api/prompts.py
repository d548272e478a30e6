"""What a source of prompts or a prompt filter imports or implements."""

from relax_events.config import RowsConfig
from relax_events.config.base import Section
from relax_events.data.conversations import PLACEHOLDERS, split_at_placeholders
from relax_events.data.prompt_filter import PromptFilter
from relax_events.data.rows import (
    InvalidRows,
    PromptRow,
    PromptSource,
    PromptSourceKind,
    add_system_prompt,
)
from relax_events.data.sources import create_task, import_reasoning_gym
from relax_events.media.audio import RATE_HERTZ, encode_wav
from relax_events.media.items import MediaItem

__all__ = [
    "PLACEHOLDERS",
    "RATE_HERTZ",
    "InvalidRows",
    "MediaItem",
    "PromptFilter",
    "PromptRow",
    "PromptSource",
    "PromptSourceKind",
    "RowsConfig",
    "Section",
    "add_system_prompt",
    "create_task",
    "encode_wav",
    "import_reasoning_gym",
    "split_at_placeholders",
]
