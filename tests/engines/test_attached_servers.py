"""Configured server addresses without a server, with another service, or with a server that
violates the protocol.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Literal

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


class ServerLike(RouterLike):
    """Answers as a server does that was started without `--enable-return-routed-experts`, where
    relax-events is not installed."""

    def do_GET(self) -> None:
        info = {
            "version": "0.5.23",
            "incremental_streaming_output": True,
            "enable_return_routed_experts": False,
            "internal_states": [{}],
        }
        body = json.dumps(info).encode() if self.path == "/server_info" else b""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def answering(handler: type[RouterLike]) -> Iterator[str]:
    """Yield the address of a server that responds."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def attach(
    url: str, *, family: str = "qwen3", routing_replay: Literal["none", "rollout"] = "none"
) -> SGLangEngine:
    path = tiny_model(family)
    return SGLangEngine(
        path,
        config=EngineConfig(threads=1, max_context_tokens=512, sglang=SGLangConfig(urls=(url,))),
        model=ModelConfig(dtype="float32", path=path, routing_replay=routing_replay),
    )


NO_EXPERTS = (
    r"does not record the experts of each token, .*; start it with --enable-return-routed-experts"
)


@pytest.mark.parametrize(
    ("handler", "family", "routing_replay", "text"),
    [
        (
            RouterLike,
            "qwen3",
            "none",
            r"is not a supported SGLang server, it has no /ready; name servers of SGLang 0\.5\.23 in",
        ),
        (
            ServerLike,
            "qwen3_vl",
            "none",
            r"the model reads media, and .* accepts none in the format relax-events\.media\.3; install",
        ),
        (ServerLike, "qwen3_moe", "rollout", NO_EXPERTS),
    ],
    ids=["router", "without the plugin", "without experts"],
)
def test_attaching_an_unusable_server_raises_config_error(
    handler: type[RouterLike], family: str, routing_replay: Literal["none", "rollout"], text: str
) -> None:
    with answering(handler) as url, pytest.raises(ConfigError, match=text):
        attach(url, family=family, routing_replay=routing_replay)


def test_routing_replay_of_a_dense_model_is_rejected_before_any_request() -> None:
    with pytest.raises(
        ConfigError,
        match=r"needs a mixture of experts that engine 'sglang' supports, but the model in .* is not one; set model",
    ):
        attach("http://127.0.0.1:9", routing_replay="rollout")
