"""Somebody who is told of alerts: an Apprise service of our own, beside the stack."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

from relax_events.http.responses import TextHandler
from tests.stack.container_engine import ROOT, Engine

OVERLAY = ROOT / "compose" / "notices.yml"
HOST = "somebody"


class Told(ThreadingHTTPServer):
    """Keeps the titles of what Apprise posts to a `json://` address."""

    daemon_threads = True

    def __init__(self) -> None:
        """Listen on a free port of every interface, since the containers come from a network of
        their own.
        """
        super().__init__(("0.0.0.0", 0), _Handler)
        self.titles: list[str] = []

    def has_been_told(self, alert: str) -> bool:
        """Tell whether a notice has come that this alert fires."""
        return any(
            title.startswith(f"{alert}: ") and title.endswith("firing") for title in self.titles
        )


class _Handler(TextHandler):
    server: Told

    def do_POST(self) -> None:  # noqa: N802 as http.server calls it
        self.server.titles.append(
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))["title"]
        )
        self.respond(200, b"noted\n")


@contextmanager
def somebody_told(engine: Engine, folder: Path) -> Iterator[Told]:
    """Lay `notices.yml` over the stack and listen to what it sends."""
    with Told() as told:
        threading.Thread(target=told.serve_forever, daemon=True).start()
        urls, overlay = folder / "notification_urls", folder / "told.json"
        urls.write_text(f"json://{HOST}:{told.server_port}/\n")
        reach = {"extra_hosts": [f"{HOST}:host-gateway"]}
        overlay.write_text(json.dumps({"services": {"notices": reach, "metrics": reach}}))
        engine.overlays += [OVERLAY, overlay]
        engine.settings["NOTICE_URLS_FILE"] = str(urls)
        yield told
        told.shutdown()
