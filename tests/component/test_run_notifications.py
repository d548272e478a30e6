"""Notifications of a run over real HTTP: each is sent once, and no log contains the URL."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax_events.errors import ConfigError
from relax_events.events.parts import Command, now_micros
from relax_events.events.types import Event, RunCommanded, RunDescribed
from relax_events.notifications.builder import MAX_NOTIFICATIONS, NotificationBuilder
from relax_events.notifications.services import VARIABLE, open_notifiers
from relax_events.projections.health import Intervention, RecoveryLevel, Symptom
from relax_events.secret_handling import redact
from relax_events.telemetry import delivery as feeding
from tests.unit.run_events import run_config, train_step

SECOND = 10**6


def described(at: int) -> RunDescribed:
    return RunDescribed(
        run_id="shown", config="{}", config_digest="d", package_version="1", described_at=at
    )


def act(tier: RecoveryLevel, worker_id: str, at: int) -> RunCommanded:
    return Intervention(at, tier, Symptom.STUCK, worker_id, worker_id[:-2]).to_command(
        reason="has had work for 900 s and has made no progress"
    )


def titles(*events: Event) -> list[tuple[str, str]]:
    notification_builder = NotificationBuilder("shown")
    return [
        (notification.kind, notification.title)
        for event in events
        if (notification := notification_builder.apply(event)) is not None
    ]


def test_notifications_cover_a_run_from_start_to_end() -> None:
    events: list[Event] = [
        described(1), described(2), train_step(0, at_seconds=1),
        act(RecoveryLevel.WORKER_RESTART, "rollout-0", 2 * SECOND),
        act(RecoveryLevel.PIPELINE_RESTART, "rollout-0", 3 * SECOND), act(RecoveryLevel.PIPELINE_RESTART, "trainer-0", 3 * SECOND),
        train_step(1, at_seconds=2.5), train_step(2, at_seconds=4), replace(train_step(3, at_seconds=5), update_skipped=True),
        RunCommanded(command=Command.STOP, role="reward", reason="one role", commanded_at=7 * SECOND),
        RunCommanded(command=Command.STOP, reason="all 4 train steps are committed", succeeded=True, commanded_at=8 * SECOND),
    ]  # fmt: skip
    assert titles(*events) == [
        ("info", "Run shown began"),
        ("warning", "Run shown has rollout-0 restarted"),
        ("failure", "Run shown is restored"),
        ("success", "Run shown has recovered"),
        ("failure", "Run shown skipped a non-finite train step"),
        ("success", "Run shown has reached its goal"),
    ]
    assert titles(*events, *events) == titles(*events)[:6], "the same once more is no news"


def test_notifications_are_rate_limited_but_the_final_one_is_always_sent() -> None:
    notification_builder = NotificationBuilder("shown")
    reported = [
        notification_builder.apply(act(RecoveryLevel.WORKER_RESTART, "rollout-0", second * SECOND))
        for second in range(1, 41)
    ]
    assert [notification is not None for notification in reported] == [True] * MAX_NOTIFICATIONS + [
        False
    ] * 30
    end = notification_builder.apply(
        RunCommanded(command=Command.STOP, reason="no progress", commanded_at=50 * SECOND)
    )
    assert end is not None
    assert (end.kind, end.title, end.body.splitlines()[1]) == (
        "failure", "Run shown ended before its goal", "(30 earlier notifications were not sent; see the log)",
    )  # fmt: skip


class Service:
    """A chat service that may be down for its first requests."""

    def __init__(self, *, refusals: int) -> None:
        self.got: list[dict[str, Any]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                nonlocal refusals
                refusals -= 1
                if refusals < 0:
                    service.got.append(body)
                self.send_response(200 if refusals < 0 else 503)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"json://user:pa55word@127.0.0.1:{self.server.server_address[1]}/token-9f8e"


pytestmark = pytest.mark.filterwarnings(
    "ignore:'imghdr' is deprecated:DeprecationWarning"
)  # Apprise looks for it


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    pytest.importorskip("apprise")
    monkeypatch.setattr(feeding, "BACKOFF_SECONDS", 0.01)
    opened = Service(refusals=2)
    yield opened
    opened.server.shutdown()
    opened.server.server_close()


def test_notifications_arrive_once_despite_service_and_worker_failures(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, service.url)
    config, now = run_config(tmp_path), now_micros()
    end = RunCommanded(command=Command.STOP, reason="no progress", commanded_at=now + 1)
    events = [
        described(now - 7200 * SECOND),
        act(RecoveryLevel.WORKER_RESTART, "rollout-0", now),
        end,
    ]
    errors: list[str] = []
    for num_read in (2, 3):  # the second process of the metrics role reads all of the log again
        (teller,), notification_builder = (
            open_notifiers(config, failed=errors.append),
            NotificationBuilder("shown"),
        )
        for event in events[:num_read]:
            if (notification := notification_builder.apply(event)) is not None:
                teller.put(notification)
        if num_read == 2:
            while not service.got:
                threading.Event().wait(0.01)
        assert teller.close(timeout_seconds=30)
    assert [(text["title"], text["type"]) for text in service.got] == [
        ("Run shown has rollout-0 restarted", "warning"), ("Run shown ended before its goal", "failure"),
    ]  # fmt: skip
    assert errors == ["json 1", "json 1"]


def test_notification_urls_are_redacted_in_error_messages(tmp_path: Path, service: Service) -> None:
    config = run_config(tmp_path)
    (tmp_path / "urls").write_text(f"{service.url}\nnonsense://s3cret-token@nowhere\n")
    telemetry = config.telemetry.model_copy(update={"notification_urls_file": tmp_path / "urls"})
    with pytest.raises(
        ConfigError, match="notification URL number 2 is not supported by Apprise"
    ) as refused:
        open_notifiers(config.model_copy(update={"telemetry": telemetry}), failed=lambda _: None)
    assert "s3cret" not in str(refused.value)
    assert redact(f"posting to {service.url} failed") == "posting to (hidden) failed"
    missing = config.telemetry.model_copy(update={"notification_urls_file": tmp_path / "missing"})
    with pytest.raises(
        ConfigError,
        match=r"telemetry.notification_urls_file = .*missing' can't be read: No such file",
    ):
        open_notifiers(config.model_copy(update={"telemetry": missing}), failed=lambda _: None)
