"""An alert that Alertmanager posts is sent to every service, or is posted again: over HTTP on both
sides, with Apprise between.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax_events.errors import EnvironmentProblem
from relax_events.notifications.alert_receiver import MAX_BYTES, AlertReceiver, parse_alerts
from relax_events.notifications.services import AppriseTarget, DeliveryError

ANSWER_SECONDS = 60
pytestmark = pytest.mark.filterwarnings(
    "ignore:'imghdr' is deprecated:DeprecationWarning"
)  # Apprise looks for it


def alert(
    name: str,
    *,
    status: str = "firing",
    severity: str = "critical",
    summary: str = "Run mine stands still.",
) -> dict[str, Any]:
    annotations = {"summary": summary, "runbook": "docs/how-to/alerts/a-page.md"}
    return {
        "status": status,
        "labels": {"alertname": name, "run": "mine", "severity": severity},
        "annotations": annotations,
    }


def group(*alerts: dict[str, Any], status: str = "firing") -> bytes:
    return json.dumps({"version": "4", "status": status, "alerts": alerts}).encode()


class Deaf:
    """A service that takes nothing."""

    name = "chat 1"

    def send(self, *, title: str, body: str, kind: str) -> None:
        raise DeliveryError(self.name)


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(ANSWER_SECONDS)
        server.server_close()


def post(address: str, body: bytes) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{address}/", data=body), timeout=ANSWER_SECONDS
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def chat() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A service that Apprise knows as json://, and what it received."""
    reported: list[dict[str, Any]] = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            reported.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Chat)) as address:
        yield address, reported


def test_notification_names_the_alerts_and_links_to_their_pages() -> None:
    text = parse_alerts(
        group(alert("RelaxRunStalled"), alert("RelaxRunStalled", summary="Run yours stands still."))
    )
    assert text["title"] == "RelaxRunStalled: 2 firing"
    assert text["body"].splitlines() == [
        "Run mine stands still. See docs/how-to/alerts/a-page.md",
        "Run yours stands still. See docs/how-to/alerts/a-page.md",
    ]


@pytest.mark.parametrize(
    ("alerts", "kind"),
    [
        ([alert("A", severity="info"), alert("A", severity="critical")], "failure"),
        ([alert("A", severity="warning")], "warning"),
        ([alert("A", severity="odd")], "warning"),
        ([alert("A", status="resolved")], "success"),
        ([alert("A", status="resolved", severity="critical"), alert("A", severity="info")], "info"),
    ],
)
def test_notification_kind_is_that_of_the_most_severe_firing_alert(
    alerts: list[dict[str, Any]], kind: str
) -> None:
    assert parse_alerts(group(*alerts))["kind"] == kind


def test_notification_of_resolved_alert_group_says_it_is_over() -> None:
    text = parse_alerts(group(alert("RelaxRunStalled", status="resolved"), status="resolved"))
    assert (text["title"], text["body"]) == (
        "RelaxRunStalled: resolved",
        "resolved: Run mine stands still.",
    )


@pytest.mark.parametrize(
    "posted",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"alerts": []}',
        b'{"status": "firing", "alerts": [{"labels": {}}]}',
    ],
)
def test_receiver_rejects_payload_not_in_alertmanager_format(posted: bytes) -> None:
    with pytest.raises(ValueError, match="the body is not an alert group of Alertmanager"):
        parse_alerts(posted)


def test_alert_is_sent_to_a_service_through_apprise(chat: tuple[str, list[dict[str, Any]]]) -> None:
    pytest.importorskip("apprise")
    address, reported = chat
    with serving(
        AlertReceiver(("127.0.0.1", 0), [AppriseTarget(f"json://{address}", number=1)])
    ) as receiver:
        assert post(receiver, group(alert("RelaxRunStalled"))) == (200, "sent\n")
    assert [(one["title"], one["type"]) for one in reported] == [
        ("RelaxRunStalled: 1 firing", "failure")
    ]


def test_failed_notification_is_retried_and_other_services_are_still_notified() -> None:
    sent: list[str] = []

    class Hearing:
        name = "chat 2"

        def send(self, *, title: str, body: str, kind: str) -> None:
            sent.append(title)

    with serving(AlertReceiver(("127.0.0.1", 0), [Deaf(), Hearing()])) as receiver:
        assert post(receiver, group(alert("RelaxRunStalled"))) == (502, "not accepted by chat 1\n")
    assert sent == ["RelaxRunStalled: 1 firing"]


def test_receiver_survives_request_that_is_too_long_or_not_json() -> None:
    with serving(AlertReceiver(("127.0.0.1", 0), [])) as receiver:
        assert post(receiver, b"{")[0] == 400
        head = f"POST / HTTP/1.0\r\nContent-Length: {MAX_BYTES + 1}\r\n\r\n"
        assert head_of(receiver, head).startswith("HTTP/1.0 413")
        assert post(receiver, group(alert("A"))) == (200, "sent\n")


def head_of(address: str, request: str) -> str:
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(request.encode())
        return connection.makefile("r").readline()


def test_error_names_address_already_in_use() -> None:
    with (
        serving(AlertReceiver(("127.0.0.1", 0), [])) as receiver,
        pytest.raises(
            EnvironmentProblem,
            match=rf"can't listen on {receiver}: .*; set another --host or --port",
        ),
    ):
        AlertReceiver(("127.0.0.1", int(receiver.partition(":")[2])), [])


def test_command_forwards_alerts_until_terminated(
    chat: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    pytest.importorskip("apprise")
    address, reported = chat
    urls = tmp_path / "urls"
    urls.write_text(f"json://{address}\n")
    free = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = free.server_address[1]
    free.server_close()
    command = [
        sys.executable,
        "-m",
        "relax_events.cli",
        "alerts",
        "forward",
        "--urls",
        str(urls),
        "--port",
        str(port),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        answer = None
        while answer is None and process.poll() is None:
            try:
                answer = post(f"127.0.0.1:{port}", group(alert("RelaxRunStalled")))
            except OSError:
                threading.Event().wait(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(ANSWER_SECONDS) == 0
    assert answer == (200, "sent\n")
    assert len(reported) == 1


def test_command_without_services_explains_how_to_configure_one() -> None:
    command = [sys.executable, "-m", "relax_events.cli", "alerts", "forward"]
    asked = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env={"PATH": "/usr/bin"}
    )
    assert (
        asked.returncode,
        "name a file with --urls, or set RELAX_NOTIFICATION_URLS" in asked.stderr,
    ) == (2, True)
