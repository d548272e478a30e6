"""Turn the columns of a file's row into a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from relax_events.config import RowsConfig
from relax_events.data.conversations import (
    check_completion,
    split_at_placeholders,
    split_conversation,
    split_preference_pair,
)
from relax_events.data.messages import PartReader, parse_message, refuse_lost_fields
from relax_events.data.row_values import (
    describe_type,
    require_record,
    write_label,
    write_object,
    write_tools,
)
from relax_events.data.rows import PromptRow, add_system_prompt
from relax_events.errors import ConfigError, MediaError, PoisonSample
from relax_events.events.json_text import format_json
from relax_events.events.parts import ChatMessage, ContentPart, Modality
from relax_events.media.items import (
    MediaAccess,
    MediaItem,
    PendingPart,
    read_items,
    read_part_item,
)

TEMPLATE_FIELD = re.compile(r"\{([A-Za-z_][\w.]*)\}")
"""A column name in a prompt template."""
GENERATED_KEYS = frozenset(["task", "options", "entry"])
"""The metadata of a generated problem. Its verifier trusts the entry, so no file may give them."""


class ColumnReader:
    """Read prompt, answer, metadata, tools and media from a row, independent of its file format."""

    def __init__(self, config: RowsConfig, *, section: str) -> None:
        """Choose the columns.

        Args:
            config: Names the columns.
            section: Section of the run file that names them, for errors.
        """
        self._config, self._section = config, section
        prompt_key = "" if config.conversation_key or config.prompt_template else config.prompt_key
        completion_keys = (
            config.completion_key,
            config.conversation_key,
            config.chosen_key,
            config.rejected_key,
        )
        self._access = MediaAccess(config.media_root, config.media_hosts)
        self._media_keys = {Modality(name): key for name, key in config.multimodal_keys.items()}
        in_template = TEMPLATE_FIELD.findall(config.prompt_template)
        keys = (
            prompt_key,
            *in_template,
            *completion_keys,
            config.answer_key,
            config.tools_key,
            *self._media_keys.values(),
        )
        self._used_keys = {key for key in keys if key}
        self.named_columns = self._used_keys.union(config.metadata_keys or ())
        """The columns that the run file names."""

    def required_columns(self, columns: list[str]) -> list[str]:
        """Return the columns of a file that a row needs."""
        needed_columns = {
            name for key in self.named_columns for name in (key, key.partition(".")[0])
        }
        is_all = self._config.metadata_keys is None
        return [name for name in columns if is_all or name in needed_columns]

    def read_row(self, columns: Any, location: str) -> PromptRow:
        """Build the prompt of one row.

        Args:
            columns: The row's values by column name.
            location: File and line of the row, for errors.
        Raises:
            ConfigError: The row is invalid; the text names location and column.
        """
        config = self._config
        if not isinstance(columns, dict):
            raise ConfigError(
                f"{location} is {describe_type(columns)}; each line must be one JSON object"
            )
        prompt, completions = self._prompt_and_completions(columns, location)
        messages, media = split_at_placeholders(
            add_system_prompt(prompt, config.system_prompt),
            self._media(columns, location),
            location=location,
        )
        if any(_has_media(message) for completion in completions for message in completion):
            raise ConfigError(
                f"{location} has media after the prompt, which can't be trained on; end the "
                "conversation before them"
            )
        label = self._read_optional(columns, config.answer_key, "answer_key", location)
        tools = self._read_optional(columns, config.tools_key, "tools_key", location)
        text = write_label(label, f"{location}: {config.answer_key}")
        if not config.answer_key and len(completions) == 1 and len(completions[0]) == 1:
            (answered,) = completions[0]
            text = answered.text
            if answered == ChatMessage.of_text(answered.role, text):
                completions = []
        metadata = self._metadata(columns, location)
        tools = write_tools(tools, f"{location}: {config.tools_key}")
        row = PromptRow(messages, text, metadata, tools, completions, media)
        texts = {key: columns[key] for key in columns.keys() - self._media_keys.values()}
        return require_record(row, texts, location)

    def _media(self, columns: dict[str, Any], location: str) -> dict[Modality, list[MediaItem]]:
        """Return the row's media by modality; null means none."""
        try:
            return {
                modality: read_items(
                    self._column(columns, key, "multimodal_keys", location),
                    modality=modality,
                    location=f"{location}: {key}",
                    access=self._access,
                )
                for modality, key in self._media_keys.items()
            }
        except MediaError as error:
            raise ConfigError(str(error)) from None

    def _prompt_and_completions(
        self, columns: dict[str, Any], location: str
    ) -> tuple[list[ChatMessage], list[list[ChatMessage]]]:
        """Return the prompt messages and the completions of the row."""
        config = self._config
        if config.conversation_key:
            where = f"{location}: {config.conversation_key}"
            value = self._column(columns, config.conversation_key, "conversation_key", location)
            conversation = _messages(value, where, read_part=self._part_reader(where))
            prompt, completion = split_conversation(
                conversation, train_on=config.train_on, location=where
            )
            return prompt, [completion]
        prompt = []
        if config.prompt_template:
            text = TEMPLATE_FIELD.sub(
                lambda field: self._text(columns, field[1], location), config.prompt_template
            )
            prompt = [ChatMessage.of_text("user", text)]
        elif config.prompt_key:
            where = f"{location}: {config.prompt_key}"
            value = self._column(columns, config.prompt_key, "prompt_key", location)
            prompt = _messages(value, where, read_part=self._part_reader(where))
        if config.chosen_key:
            chosen, rejected = (
                self._completion(columns, getattr(config, key), key, location)
                for key in ("chosen_key", "rejected_key")
            )
            return split_preference_pair(prompt, chosen, rejected, location=location)
        if config.completion_key:
            completion = self._completion(
                columns, config.completion_key, "completion_key", location
            )
            return prompt, [
                check_completion(completion, location=f"{location}: {config.completion_key}")
            ]
        return prompt, []

    def _text(self, columns: dict[str, Any], key: str, location: str) -> str:
        """Return a column's text for the template; see `data.prompt_template`."""
        value = self._column(columns, key, "prompt_template", location)
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            return "\n".join(value)
        if not isinstance(value, str | int | float):
            raise ConfigError(
                f"{location}: {key} is {describe_type(value)}; data.prompt_template accepts "
                "strings, numbers and lists of strings"
            )
        return format_json(value) if isinstance(value, bool) else str(value)

    def _completion(
        self, columns: dict[str, Any], key: str, setting: str, location: str
    ) -> list[ChatMessage]:
        value = self._column(columns, key, setting, location)
        if isinstance(value, str) and value:
            return [ChatMessage.of_text("assistant", value)]
        where = f"{location}: {key}"
        return _messages(value, where, what="an answer", read_part=partial(_refuse_part, where))

    def _part_reader(self, location: str) -> PartReader:
        """Return a function that reads the media parts of a row's messages."""

        def read_part(part: Any) -> ContentPart:
            fields = part.items() if isinstance(part, dict) else ()
            shown = {key: value for key, value in fields if value is not None}
            if shown in ({"type": modality.value} for modality in self._media_keys):
                return ContentPart(Modality(shown["type"]))  # of the next file of its column
            item = read_part_item(part, location=location, access=self._access)
            return PendingPart(item.modality, item=item)

        return read_part

    def _metadata(self, columns: dict[str, Any], location: str) -> str:
        keys = self._config.metadata_keys
        if keys is None:
            metadata = {key: value for key, value in columns.items() if key not in self._used_keys}
        else:
            metadata = {key: self._column(columns, key, "metadata_keys", location) for key in keys}
        if metadata.keys() >= GENERATED_KEYS:
            raise ConfigError(
                f"{location} has the metadata {', '.join(sorted(GENERATED_KEYS))} of a generated "
                f"problem, which only a source 'reasoning_gym:<task>' writes; set "
                f"{self._section}.metadata_keys to the columns to keep"
            )
        return write_object(metadata, location, takes_nan=keys is None)

    def _read_optional(self, columns: dict[str, Any], key: str, setting: str, location: str) -> Any:
        return self._column(columns, key, setting, location) if key else None

    def _column(self, columns: dict[str, Any], key: str, setting: str, location: str) -> Any:
        value: Any = columns
        for name in (key,) if key in columns else key.split("."):
            if value is None:
                return None
            if not isinstance(value, Mapping) or name not in value:
                has = ", ".join(map(repr, columns)) or "none"
                raise ConfigError(
                    f"{location} has no key {key!r}, only {has}; set {self._section}.{setting}"
                )
            value = value[name]
        return value


def _messages(
    prompt: Any, location: str, *, what: str = "a prompt", read_part: PartReader
) -> list[ChatMessage]:
    if isinstance(prompt, str) and prompt:
        return [ChatMessage.of_text("user", prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{location} is {describe_type(prompt)}; {what} is a non-empty string or a list "
            "of chat messages"
        )
    return [_message(message, location, read_part) for message in prompt]


def _message(message: Any, location: str, read_part: PartReader) -> ChatMessage:
    fields = message if isinstance(message, dict) else {}
    has_content = isinstance(fields.get("content"), str | list) or fields.get("tool_calls")
    if not isinstance(fields.get("role"), str) or not has_content:
        raise ConfigError(
            f"{location} has message {message!r:.80}; a chat message is an object with the "
            "strings role and content"
        )
    try:
        refuse_lost_fields(fields, what=f"{location}: a message")
        return parse_message(fields, what=f"{location}: a message", read_part=read_part)
    except PoisonSample as error:
        raise ConfigError(str(error)) from None


def _refuse_part(location: str, part: Any) -> NoReturn:
    raise PoisonSample(f"{location} has content part {part!r:.80}; an answer holds text only")


def _has_media(message: ChatMessage) -> bool:
    return any(part.kind is not Modality.TEXT for part in message.parts)
