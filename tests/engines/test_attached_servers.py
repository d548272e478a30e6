"""Addresses at which there is no server, but something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from engine_requests import tiny_model

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.errors import ConfigError


class RouterLike(BaseHTTPRequestHandler):
    """Answers as smg 1.13.0 does to what it does not know."""

    def do_GET(self) -> None:
        self.send_error(HTTPStatus.NOT_FOUND, f"Invalid URL (GET {self.path})")

    def log_message(self, *_: object) -> None:
        pass


class WithoutPlugin(BaseHTTPRequestHandler):
    """Answers as SGLang does where relax-events is not installed."""

    def do_GET(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        self.wfile.write(b'{"version": "0.5.23", "incremental_streaming_output": true, "internal_states": [{}]}')

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Give the address at which a handler answers."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("handler", "family", "text"),
    [
        (RouterLike, "qwen3", r"is no SGLang server that we know, it has no /ready; name servers of SGLang 0\.5\.23 in"),
        (WithoutPlugin, "qwen3_vl", r"the model reads media, and the SGLang server at .* takes none in the form relax-events\.media\.1; install"),
    ],
    ids=["router", "without the plugin"],
)
def test_what_can_not_be_used_is_refused_at_once(handler: type[BaseHTTPRequestHandler], family: str, text: str) -> None:
    path = tiny_model(family)
    with served(handler) as url, pytest.raises(ConfigError, match=text):
        SGLangEngine(path, config=EngineConfig(sglang=SGLangConfig(urls=(url,))), model=ModelConfig(path=path))
