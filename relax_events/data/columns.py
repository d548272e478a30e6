"""From the columns of a file's row to a prompt."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, NoReturn

import orjson

from relax_events.config import RowsConfig
from relax_events.data.completions import checked_completion, divided, pair_of
from relax_events.data.placeholders import MARKERS, with_places
from relax_events.data.rows import PromptRow, with_system_prompt
from relax_events.errors import ConfigError, MediaError
from relax_events.events.parts import ChatMessage, Modality
from relax_events.media.items import MediaAccess, MediaItem, items_of

FIELD = re.compile(r"\{([A-Za-z_][\w.]*)\}")
"""A column in a template."""
KINDS = {
    type(None): "null",
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
}


class ColumnReader:
    """Picks prompt, answer, metadata, tools and media out of a row, whatever file it comes from."""

    def __init__(self, config: RowsConfig, *, section: str) -> None:
        """Choose the columns.

        Args:
            config: Names them.
            section: Where the run file does, for errors.
        """
        self._config, self._section = config, section
        prompt_key = "" if config.conversation_key or config.prompt_template else config.prompt_key
        learnt_keys = (
            config.completion_key,
            config.conversation_key,
            config.chosen_key,
            config.rejected_key,
        )
        self._access = MediaAccess(config.media_root, config.media_hosts)
        self._media_keys = {Modality(name): key for name, key in config.multimodal_keys.items()}
        in_template = FIELD.findall(config.prompt_template)
        keys = (
            prompt_key,
            *in_template,
            *learnt_keys,
            config.answer_key,
            config.tools_key,
            *self._media_keys.values(),
        )
        self._taken = {key for key in keys if key}

    def needed(self, columns: list[str]) -> list[str]:
        """Return those of a file's columns that a row is made of."""
        keys = self._config.metadata_keys
        wanted = {
            name for key in (*self._taken, *(keys or ())) for name in (key, key.partition(".")[0])
        }
        return [name for name in columns if keys is None or name in wanted]

    def row(self, columns: Any, place: str) -> PromptRow:
        """Make a prompt.

        Args:
            columns: Of one row, by name.
            place: Its file and line, for errors.
        Raises:
            ConfigError: The row is unfit; the text names place and column.
        """
        config = self._config
        if not isinstance(columns, dict):
            raise ConfigError(f"{place} is {_kind(columns)}; each line must be one JSON object")
        prompt, completions = self._learnt(columns, place)
        messages, media = with_system_prompt(prompt, config.system_prompt), list[MediaItem]()
        if self._media_keys:
            messages, media = with_places(messages, self._media(columns, place), place=place)
        answer = (
            self._column(columns, config.answer_key, "answer_key", place)
            if config.answer_key
            else ""
        )
        tools = (
            self._column(columns, config.tools_key, "tools_key", place)
            if config.tools_key
            else None
        )
        text = answer if isinstance(answer, str) else _json(answer, f"{place}: {config.answer_key}")
        if not config.answer_key and len(completions) == 1 and len(completions[0]) == 1:
            text = completions.pop()[0].text
        return PromptRow(
            messages,
            text,
            self._metadata(columns, place),
            _tools(tools, f"{place}: {config.tools_key}"),
            completions,
            media,
        )

    def _media(self, columns: dict[str, Any], place: str) -> dict[Modality, list[MediaItem]]:
        """Return what the row brings; null is nothing."""
        values = {
            modality: self._column(columns, key, "multimodal_keys", place)
            for modality, key in self._media_keys.items()
        }
        try:
            return {
                modality: items_of(
                    value,
                    modality=modality,
                    place=f"{place}: {self._media_keys[modality]}",
                    access=self._access,
                )
                for modality, value in values.items()
            }
        except MediaError as error:
            raise ConfigError(str(error)) from None

    def _learnt(
        self, columns: dict[str, Any], place: str
    ) -> tuple[list[ChatMessage], list[list[ChatMessage]]]:
        """Return the conversation so far, and the completions that the row brings."""
        config = self._config
        if config.conversation_key:
            where = f"{place}: {config.conversation_key}"
            value = self._column(columns, config.conversation_key, "conversation_key", place)
            conversation = _messages(value, where, modalities=self._media_keys)
            prompt, completion = divided(conversation, train_on=config.train_on, place=where)
            return prompt, [completion]
        prompt = []
        if config.prompt_template:
            prompt = [
                ChatMessage.of_text(
                    "user",
                    FIELD.sub(
                        lambda field: self._text(columns, field[1], place), config.prompt_template
                    ),
                )
            ]
        elif config.prompt_key:
            value = self._column(columns, config.prompt_key, "prompt_key", place)
            prompt = _messages(value, f"{place}: {config.prompt_key}", modalities=self._media_keys)
        if config.chosen_key:
            chosen, rejected = (
                self._completion(columns, getattr(config, key), key, place)
                for key in ("chosen_key", "rejected_key")
            )
            return pair_of(prompt, chosen, rejected, place=place)
        if config.completion_key:
            completion = self._completion(columns, config.completion_key, "completion_key", place)
            return prompt, [
                checked_completion(completion, place=f"{place}: {config.completion_key}")
            ]
        return prompt, []

    def _text(self, columns: dict[str, Any], key: str, place: str) -> str:
        """Return a column as it stands in the template; see `data.prompt_template`."""
        value = self._column(columns, key, "prompt_template", place)
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            return "\n".join(value)
        if not isinstance(value, str | int | float):
            raise ConfigError(
                f"{place}: {key} is {_kind(value)}; data.prompt_template takes strings, "
                "numbers and lists of strings"
            )
        return str(value)

    def _completion(
        self, columns: dict[str, Any], key: str, setting: str, place: str
    ) -> list[ChatMessage]:
        value = self._column(columns, key, setting, place)
        if isinstance(value, str) and value:
            return [ChatMessage.of_text("assistant", value)]
        return _messages(value, f"{place}: {key}", what="an answer")

    def _metadata(self, columns: dict[str, Any], place: str) -> str:
        keys = self._config.metadata_keys
        if keys is None:
            chosen = {key: value for key, value in columns.items() if key not in self._taken}
        else:
            chosen = {key: self._column(columns, key, "metadata_keys", place) for key in keys}
        return _json(chosen, f"{place}: the metadata") if chosen else "{}"

    def _column(self, columns: dict[str, Any], key: str, setting: str, place: str) -> Any:
        value: Any = columns
        for name in (key,) if key in columns else key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                has = ", ".join(map(repr, columns)) or "none"
                raise ConfigError(
                    f"{place} has no key {key!r}, only {has}; set {self._section}.{setting}"
                )
            value = value[name]
        return value


def _messages(
    prompt: Any, place: str, *, what: str = "a prompt", modalities: Container[str] = ()
) -> list[ChatMessage]:
    if isinstance(prompt, str) and prompt:
        return [ChatMessage.of_text("user", prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{place} is {_kind(prompt)}; {what} is a non-empty string or a list of chat messages"
        )
    return [_message(message, place, modalities) for message in prompt]


def _message(message: Any, place: str, modalities: Container[str]) -> ChatMessage:
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    )
    if isinstance(content, list):
        content = "".join(_text_part(part, place, modalities) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(
            f"{place} has message {message!r:.80}; a chat message is an object with the "
            "strings role and content"
        )
    return ChatMessage.of_text(role, content)


def _text_part(part: Any, place: str, modalities: Container[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in modalities:
        return MARKERS[Modality(kind)]
    if kind != "text" or not isinstance(part.get("text"), str):
        rule = (
            "only parts of type 'text' with a text can be used, and those of the modalities in "
            "multimodal_keys"
        )
        raise ConfigError(f"{place} has content part {part!r:.80}; {rule}")
    return str(part["text"])


def _tools(tools: Any, place: str) -> str:
    """Return a row's tools as a JSON list, or an empty text where it has none."""
    if isinstance(tools, str) and tools:
        try:
            tools = orjson.loads(tools)
        except orjson.JSONDecodeError as error:
            raise ConfigError(
                f"{place} is not JSON: {error}; tools are a list of objects, or its JSON text"
            ) from None
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{place} is {_kind(tools)}; tools are a list of objects, or its JSON text"
        )
    return _json(tools, place)


def _json(value: Any, place: str) -> str:
    def refuse(part: Any) -> NoReturn:
        raise ConfigError(
            f"{place} holds a {type(part).__name__}, which JSON has no form for; name the "
            "columns to keep in metadata_keys"
        )

    try:
        return orjson.dumps(value, default=refuse, option=orjson.OPT_NON_STR_KEYS).decode()
    except orjson.JSONEncodeError as error:
        raise (
            error.__cause__
            if isinstance(error.__cause__, ConfigError)
            else ConfigError(f"{place} can't be written as JSON: {error}")
        ) from None


def _kind(value: Any) -> str:
    if value in ("", []):
        return f"an empty {KINDS[type(value)].split()[-1]}"
    return KINDS.get(type(value), f"a {type(value).__name__}")
