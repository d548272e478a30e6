"""What our small HTTP servers have in common: short texts, whole at once, and no access log."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from typing import Any


class TextHandler(BaseHTTPRequestHandler):
    """Answers with text; who is silent for `timeout` seconds is hung up on."""

    timeout = 10

    def respond(
        self, status: int, body: bytes, *, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        """Send the whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Keep access logs out of the process's log."""
