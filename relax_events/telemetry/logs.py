"""structlog events on stderr: for people on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import structlog

from relax_events.config import TelemetryConfig


def configure_logs(config: TelemetryConfig, **context: Any) -> None:
    """Set up logging for this process and bind what every event of it carries, such as role and run id."""
    console = config.log_format == "console" or (config.log_format == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer(serializer=_to_json)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _with_globals(context),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _to_json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=str).decode()


def _with_globals(context: dict[str, Any]) -> structlog.typing.Processor:
    def add(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**context, **event}

    return add
