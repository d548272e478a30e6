"""Receive alert notifications: an Apprise webhook next to the stack."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

from relax_events.http.server import TextHandler
from tests.stack.container_engine import ROOT, ContainerEngine

OVERLAY = ROOT / "compose" / "notifications.yml"
HOST = "webhook-sink"


class WebhookSink(ThreadingHTTPServer):
    """Keeps the titles of the notifications that Apprise posts to a `json://` address."""

    daemon_threads = True

    def __init__(self) -> None:
        """Listen on a free port of every interface, because the containers are in a network of
        their own.
        """
        super().__init__(("0.0.0.0", 0), _Handler)
        self.titles: list[str] = []

    def has_received(self, alert: str) -> bool:
        """Return whether a notification says that this alert fires."""
        return any(
            title.startswith(f"{alert}: ") and title.endswith("firing") for title in self.titles
        )


class _Handler(TextHandler):
    server: WebhookSink

    def do_POST(self) -> None:
        self.server.titles.append(
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))["title"]
        )
        self.respond(200, b"noted\n")


@contextmanager
def open_webhook_sink(engine: ContainerEngine, folder: Path) -> Iterator[WebhookSink]:
    """Lay `notifications.yml` over the stack and receive its notifications."""
    with WebhookSink() as sink:
        threading.Thread(target=sink.serve_forever, daemon=True).start()
        urls, overlay = folder / "notification_urls", folder / "webhook.json"
        urls.write_text(f"json://{HOST}:{sink.server_port}/\n")
        reach = {"extra_hosts": [f"{HOST}:host-gateway"]}
        overlay.write_text(json.dumps({"services": {"notifications": reach, "metrics": reach}}))
        engine.overlays += [OVERLAY, overlay]
        engine.settings["NOTICE_URLS_FILE"] = str(urls)
        yield sink
        sink.shutdown()
