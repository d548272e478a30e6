"""Configures structlog: readable lines on a terminal, JSON elsewhere, and no secrets in either."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import orjson
import structlog

from relax_events.config import TelemetryConfig
from relax_events.secret_handling import redact


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


def configure_logs(config: TelemetryConfig, *, path: Path | None = None, **context: Any) -> None:
    """Set up logging for this process.

    Args:
        config: The log level and format.
        path: A file to append to instead of stderr.
        context: Fields of every event, such as role and run id.
    """
    stream = sys.stderr if path is None else path.open("a", buffering=1)
    console = config.log_format == "console" or (config.log_format == "auto" and stream.isatty())
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
            redact_event,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            getattr(logging, config.log_level.upper())
        ),
        logger_factory=structlog.PrintLoggerFactory(stream),
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
