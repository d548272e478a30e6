"""No log event shows a secret that this process has read."""

from __future__ import annotations

import orjson
import pytest
import structlog

from relax_events.config import TelemetryConfig
from relax_events.secret_handling import hide, redact
from relax_events.telemetry.logs import configure_logs, redact_event

SECRET = "tr0ub4dor-and-three"


def test_log_event_hides_a_secret_in_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    hide(SECRET)
    configure_logs(TelemetryConfig(log_format="json"), role="test")
    error = ValueError(f"password {SECRET} is wrong")
    try:
        structlog.get_logger().warning(
            "login.failed",
            error=str(error),
            settings={"sasl.password": SECRET},
            kept=error,
            attempt=3,
            exc_info=error,
        )
    finally:
        structlog.reset_defaults()
    written = capsys.readouterr().err
    assert SECRET not in written
    event = orjson.loads(written)
    assert (event["error"], event["attempt"]) == ("password (hidden) is wrong", 3)


def test_values_without_secrets_stay_what_they_are() -> None:
    hide(SECRET)
    event = {"event": "step.done", "seconds": 1.5, "flag": True, "nothing": None, "numbers": [1, 2]}
    assert redact_event(None, "info", dict(event)) == event


def test_very_short_secrets_are_not_redacted_from_ordinary_text() -> None:
    hide("")
    hide("run")
    assert redact("a run runs") == "a run runs"


def test_secret_containing_another_secret_is_hidden_completely() -> None:
    hide("hunter2")
    hide("hunter2-hunter3")
    assert redact("hunter2-hunter3") == "(hidden)"
