"""The base of our small HTTP servers: short text responses without an access log."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from typing import Any


class TextHandler(BaseHTTPRequestHandler):
    """Sends text responses; closes connections that are silent for `timeout` seconds."""

    timeout = 10

    def respond(
        self, status: int, body: bytes, *, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        """Send a complete response."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Disable the access log."""
