"""Configures structlog: readable lines on a terminal, JSON elsewhere, and no secrets in either."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO

import orjson
import structlog

from relax_events.config import TelemetryConfig
from relax_events.printable import write_line
from relax_events.secret_handling import redact

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


def redact_event(_: Any, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Redact a log event, as a structlog processor; values that are neither text nor numbers are
    checked as text.
    """
    return {name: _redacted_value(value) for name, value in event.items()}


def _redacted_value(value: Any) -> Any:
    if isinstance(value, bool | int | float) or value is None:
        return value
    text = value if isinstance(value, str) else str(value)
    shown = redact(text)
    return value if shown == text else shown


class LogLines:
    """Writes rendered log events as lines. A line that can't be written, on a full disk, is
    counted; the first one after it carries their number.
    """

    def __init__(self, stream: TextIO | int) -> None:
        self._stream, self._num_lost = stream, 0

    def add_lost(self, _: Any, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        """Add the number of lines that were lost since the last one, as a structlog processor."""
        return {**event, "num_lines_lost": self._num_lost} if self._num_lost else event

    def msg(self, line: str) -> None:
        """Write a line; after a lost one, which may stand there in part, on a line of its own."""
        lost = self._num_lost
        written = write_line(f"\n{line}" if lost else line, self._stream)
        self._num_lost = 0 if written else lost + 1

    log = debug = info = warn = warning = error = critical = fatal = exception = failure = err = msg


def configure_logs(config: TelemetryConfig, *, path: Path | None = None, **context: Any) -> None:
    """Set up logging for this process.

    Args:
        config: The log level and format.
        path: A file to append to instead of stderr.
        context: Fields of every event, such as role and run id.
    """
    stream = sys.stderr if path is None else os.open(path, APPEND, 0o666)
    on_terminal = path is None and sys.stderr.isatty()
    lines = LogLines(stream)
    console = config.log_format == "console" or (config.log_format == "auto" and on_terminal)
    renderer = (
        structlog.dev.ConsoleRenderer()
        if console
        else structlog.processors.JSONRenderer(serializer=_to_json)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _with_globals(context),
            lines.add_lost,
            redact_event,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            getattr(logging, config.log_level.upper())
        ),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,
    )


def _to_json(event: Any, **_: Any) -> str:
    """Serialize an event with any values as JSON: a log line must never end a worker."""
    try:
        return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # orjson rejects lone surrogates, integers above 64 bits and other key types
        plain = {
            str(name): value if isinstance(value, str | int | float | bool | None) else repr(value)
            for name, value in event.items()
        }
        return json.dumps(plain)


def _with_globals(context: dict[str, Any]) -> structlog.typing.Processor:
    def add(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**context, **event}

    return add
