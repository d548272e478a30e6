"""Prompts from a file with one JSON object per line."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import orjson

from relax_events.config import DataConfig
from relax_events.data.rows import PromptRow, with_system_prompt
from relax_events.errors import ConfigError
from relax_events.events.types import ChatMessage

KINDS = {type(None): "null", dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}


class JsonlSource:
    """Rows of a JSON-lines file, read on demand: memory is eight bytes per row, whatever the rows hold.

    Every row is checked once when the file is opened, so that a bad one stops a run before it starts and not after a day.
    Blank lines are not rows. All columns but prompt and answer become the row's metadata.
    """

    def __init__(self, path: Path, config: DataConfig) -> None:
        """Index and check the file.

        Args:
            path: The file.
            config: Names the columns and the system prompt.
        Raises:
            ConfigError: The file can't be read or is empty, or a row is unfit; the text names file and line.
        """
        self._path = path
        self._config = config
        self._offsets = array("Q")
        self._index()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._offsets)

    def row(self, index: int) -> PromptRow:
        """Read one row from the file."""
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self._path}: it has {self.rows} rows")
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            return self._parse(file.readline(), f"row {index}")

    def _index(self) -> None:
        try:
            with self._path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._parse(line, number)
                        self._offsets.append(offset)
                    offset += len(line)
        except FileNotFoundError:
            raise ConfigError(f"data file {self._path} does not exist; set data.source = 'jsonl:<path>'") from None
        except OSError as error:
            raise ConfigError(f"data file {self._path} can't be read: {error.strerror}; set data.source = 'jsonl:<path>'") from None
        if not self._offsets:
            raise ConfigError(f"data file {self._path} has no rows; give it one JSON object per line")

    def _parse(self, line: bytes, number: int | str) -> PromptRow:
        place = f"{self._path}:{number}"
        try:
            columns = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{place} is not JSON: {error}; each line must be one JSON object") from None
        if not isinstance(columns, dict):
            raise ConfigError(f"{place} is {_kind(columns)}; each line must be one JSON object")
        prompt = self._column(columns, self._config.prompt_key, "data.prompt_key", place)
        answer = self._column(columns, self._config.answer_key, "data.answer_key", place) if self._config.answer_key else ""
        messages = with_system_prompt(_messages(prompt, f"{place}: {self._config.prompt_key}"), self._config.system_prompt)
        rest = {key: value for key, value in columns.items() if key not in (self._config.prompt_key, self._config.answer_key)}
        return PromptRow(messages, answer if isinstance(answer, str) else orjson.dumps(answer).decode(), orjson.dumps(rest).decode())

    def _column(self, columns: dict[str, Any], key: str, setting: str, place: str) -> Any:
        if key not in columns:
            raise ConfigError(f"{place} has no key {key!r}, only {', '.join(map(repr, columns)) or 'none'}; set {setting}")
        return columns[key]


def _messages(prompt: Any, place: str) -> list[ChatMessage]:
    if isinstance(prompt, str) and prompt:
        return [ChatMessage.of_text("user", prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(f"{place} is {_kind(prompt)}; a prompt is a non-empty string or a list of chat messages")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ConfigError(f"{place} has message {message!r:.80}; a chat message is an object with the strings role and content")
    return [ChatMessage.of_text(message["role"], message["content"]) for message in prompt]


def _kind(value: Any) -> str:
    if value in ("", []):
        return f"an empty {KINDS[type(value)].split()[-1]}"
    return KINDS[type(value)]
