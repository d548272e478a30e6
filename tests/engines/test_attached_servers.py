"""Addresses at which there is no server, but something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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


@pytest.fixture
def router_url() -> Iterator[str]:
    """Give the address of something that is no SGLang server."""
    with HTTPServer(("127.0.0.1", 0), RouterLike) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_router_in_place_of_a_server_is_refused_at_once(router_url: str) -> None:
    path = tiny_model()
    config = EngineConfig(sglang=SGLangConfig(urls=(router_url,)))
    with pytest.raises(ConfigError, match=r"is no SGLang server that we know, it has no /ready; name servers of SGLang 0\.5\.23 in"):
        SGLangEngine(path, config=config, model=ModelConfig(path=path))
