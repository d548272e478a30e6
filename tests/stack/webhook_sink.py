"""Receive alert notifications: a webhook of Alertmanager next to the stack."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from relax_events.http.server import TextHandler
from tests.stack.container_engine import ROOT, ContainerEngine

ALERTMANAGER = ROOT / "compose" / "alertmanager" / "alertmanager.yml"
MOUNTED = "/etc/webhook/alertmanager.yml"
HOST = "webhook-sink"


class WebhookSink(ThreadingHTTPServer):
    """Keeps the JSON documents that are posted to it, by Apprise or by Alertmanager."""

    daemon_threads = True

    def __init__(self) -> None:
        """Listen on a free port of every interface, because the containers are in a network of
        their own.
        """
        super().__init__(("0.0.0.0", 0), _Handler)
        self.documents: list[dict[str, Any]] = []

    def list_titles(self) -> list[str]:
        """Return the titles of Apprise's notifications."""
        return [document["title"] for document in self.documents]

    def has_received(self, alert: str) -> bool:
        """Return whether Alertmanager has posted that this alert fires."""
        return any(
            (posted["status"], posted["labels"]["alertname"]) == ("firing", alert)
            for document in self.documents
            for posted in document["alerts"]
        )


class _Handler(TextHandler):
    server: WebhookSink

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.documents.append(json.loads(self.rfile.read(length)))
        self.respond(200, b"noted\n")


def build_alertmanager_config(port: int) -> dict[str, Any]:
    """Return the stack's configuration of Alertmanager with a webhook at its only receiver."""
    config: dict[str, Any] = yaml.safe_load(ALERTMANAGER.read_text())
    (receiver,) = config["receivers"]
    receiver["webhook_configs"] = [{"url": f"http://{HOST}:{port}/", "send_resolved": True}]
    return config


@contextmanager
def open_webhook_sink(engine: ContainerEngine, folder: Path) -> Iterator[WebhookSink]:
    """Give the stack's Alertmanager a webhook, and receive what it posts."""
    with WebhookSink() as sink:
        threading.Thread(target=sink.serve_forever, daemon=True).start()
        config, overlay = folder / "alertmanager.json", folder / "webhook.json"
        config.write_text(json.dumps(build_alertmanager_config(sink.server_port)))
        config.chmod(0o644)  # the container's user is another one
        service = {
            "command": [
                f"--config.file={MOUNTED}",
                "--storage.path=/alertmanager",
                "--cluster.listen-address=",
            ],
            "volumes": [f"{config}:{MOUNTED}:ro"],
            "extra_hosts": [f"{HOST}:host-gateway"],
        }
        overlay.write_text(json.dumps({"services": {"alertmanager": service}}))
        engine.overlays.append(overlay)
        yield sink
        sink.shutdown()
