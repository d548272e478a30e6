"""Turn the columns of a file's row into a prompt."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, NoReturn

import orjson

from relax_events.config import RowsConfig
from relax_events.data.conversations import (
    PLACEHOLDERS,
    check_completion,
    split_at_placeholders,
    split_conversation,
    split_preference_pair,
)
from relax_events.data.messages import parse_message
from relax_events.data.rows import PromptRow, add_system_prompt
from relax_events.errors import ConfigError, MediaError, PoisonSample
from relax_events.events.parts import ChatMessage, ContentPart, Modality
from relax_events.media.items import MediaAccess, MediaItem, read_items

TEMPLATE_FIELD = re.compile(r"\{([A-Za-z_][\w.]*)\}")
"""A column name in a prompt template."""
GENERATED_KEYS = frozenset(["task", "options", "entry"])
"""The metadata of a generated problem. Its verifier trusts the entry, so no file may give them."""
JSON_TYPE_NAMES = {
    type(None): "null",
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
}


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

    def required_columns(self, columns: list[str]) -> list[str]:
        """Return the columns of a file that a row needs."""
        keys = self._config.metadata_keys
        needed_columns = {
            name
            for key in (*self._used_keys, *(keys or ()))
            for name in (key, key.partition(".")[0])
        }
        return [name for name in columns if keys is None or name in needed_columns]

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
                f"{location} is {_describe_type(columns)}; each line must be one JSON object"
            )
        prompt, completions = self._prompt_and_completions(columns, location)
        messages, media = add_system_prompt(prompt, config.system_prompt), list[MediaItem]()
        if self._media_keys:
            messages, media = split_at_placeholders(
                messages, self._media(columns, location), location=location
            )
        answer = (
            self._column(columns, config.answer_key, "answer_key", location)
            if config.answer_key
            else ""
        )
        tools = (
            self._column(columns, config.tools_key, "tools_key", location)
            if config.tools_key
            else None
        )
        text = (
            answer if isinstance(answer, str) else _json(answer, f"{location}: {config.answer_key}")
        )
        if not config.answer_key and len(completions) == 1 and len(completions[0]) == 1:
            (answered,) = completions[0]
            text = answered.text
            if answered == ChatMessage.of_text(answered.role, text):
                completions = []
        return PromptRow(
            messages,
            text,
            self._metadata(columns, location),
            _tools(tools, f"{location}: {config.tools_key}"),
            completions,
            media,
        )

    def _media(self, columns: dict[str, Any], location: str) -> dict[Modality, list[MediaItem]]:
        """Return the row's media by modality; null means none."""
        values = {
            modality: self._column(columns, key, "multimodal_keys", location)
            for modality, key in self._media_keys.items()
        }
        try:
            return {
                modality: read_items(
                    value,
                    modality=modality,
                    location=f"{location}: {self._media_keys[modality]}",
                    access=self._access,
                )
                for modality, value in values.items()
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
            conversation = _messages(value, where, modalities=self._media_keys)
            prompt, completion = split_conversation(
                conversation, train_on=config.train_on, location=where
            )
            return prompt, [completion]
        prompt = []
        if config.prompt_template:
            prompt = [
                ChatMessage.of_text(
                    "user",
                    TEMPLATE_FIELD.sub(
                        lambda field: self._text(columns, field[1], location),
                        config.prompt_template,
                    ),
                )
            ]
        elif config.prompt_key:
            value = self._column(columns, config.prompt_key, "prompt_key", location)
            prompt = _messages(
                value, f"{location}: {config.prompt_key}", modalities=self._media_keys
            )
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
                f"{location}: {key} is {_describe_type(value)}; data.prompt_template accepts "
                "strings, numbers and lists of strings"
            )
        return str(value)

    def _completion(
        self, columns: dict[str, Any], key: str, setting: str, location: str
    ) -> list[ChatMessage]:
        value = self._column(columns, key, setting, location)
        if isinstance(value, str) and value:
            return [ChatMessage.of_text("assistant", value)]
        return _messages(value, f"{location}: {key}", what="an answer")

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
        return _json(metadata, f"{location}: the metadata") if metadata else "{}"

    def _column(self, columns: dict[str, Any], key: str, setting: str, location: str) -> Any:
        value: Any = columns
        for name in (key,) if key in columns else key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                has = ", ".join(map(repr, columns)) or "none"
                raise ConfigError(
                    f"{location} has no key {key!r}, only {has}; set {self._section}.{setting}"
                )
            value = value[name]
        return value


def _messages(
    prompt: Any, location: str, *, what: str = "a prompt", modalities: Container[str] = ()
) -> list[ChatMessage]:
    if isinstance(prompt, str) and prompt:
        return [ChatMessage.of_text("user", prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{location} is {_describe_type(prompt)}; {what} is a non-empty string or a list "
            "of chat messages"
        )
    return [_message(message, location, modalities) for message in prompt]


def _message(message: Any, location: str, modalities: Container[str]) -> ChatMessage:
    def read_part(part: Any) -> ContentPart:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in modalities:
            raise ConfigError(
                f"{location} has content part {part!r:.80}; only parts of type 'text' with a text "
                "can be used, and those of the modalities in multimodal_keys"
            )
        return ContentPart(Modality.TEXT, PLACEHOLDERS[Modality(kind)])

    fields = message if isinstance(message, dict) else {}
    has_content = isinstance(fields.get("content"), str | list) or fields.get("tool_calls")
    if not isinstance(fields.get("role"), str) or not has_content:
        raise ConfigError(
            f"{location} has message {message!r:.80}; a chat message is an object with the "
            "strings role and content"
        )
    try:
        return parse_message(fields, what=f"{location}: a message", read_part=read_part)
    except PoisonSample as error:
        raise ConfigError(str(error)) from None


def _tools(tools: Any, location: str) -> str:
    """Return a row's tools as a JSON list, or an empty string if it has none."""
    if isinstance(tools, str) and tools:
        try:
            tools = orjson.loads(tools)
        except orjson.JSONDecodeError as error:
            raise ConfigError(
                f"{location} is not JSON: {error}; tools are a list of objects, or its JSON text"
            ) from None
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{location} is {_describe_type(tools)}; tools are a list of objects, or its JSON text"
        )
    return _json(tools, location)


def _json(value: Any, location: str) -> str:
    def reject(part: Any) -> NoReturn:
        raise ConfigError(
            f"{location} holds a {type(part).__name__}, which JSON can't represent; set "
            "metadata_keys to the columns to keep"
        )

    try:
        return orjson.dumps(value, default=reject, option=orjson.OPT_NON_STR_KEYS).decode()
    except orjson.JSONEncodeError as error:
        raise (
            error.__cause__
            if isinstance(error.__cause__, ConfigError)
            else ConfigError(f"{location} can't be written as JSON: {error}")
        ) from None


def _describe_type(value: Any) -> str:
    if value in ("", []):
        return f"an empty {JSON_TYPE_NAMES[type(value)].split()[-1]}"
    return JSON_TYPE_NAMES.get(type(value), f"a {type(value).__name__}")
