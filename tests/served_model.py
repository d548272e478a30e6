"""A model behind `relax serve`'s API, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from engine_requests import tiny_model
from sglang_servers import BOUNDS

from relax_events.config import EngineConfig, ModelConfig
from relax_events.http.server import build_server_config, build_url, open_listener
from relax_events.models.adapter_folder import read_adapter_config
from relax_events.serving.app import build_app

START_SECONDS = 60.0


@contextmanager
def served(
    path: Path | None = None,
    *,
    is_incremental: bool = False,
    records_experts: bool = False,
    token: str = "",
    weights_root: Path | None = Path("/"),
    adapters: Path | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Serve a model on a free port, with the adapters of a folder if one is named, and give the
    address."""
    path = path or tiny_model()
    model = ModelConfig(
        dtype="float32",
        path=path,
        device="cpu",
        routing_replay="rollout" if records_experts else "none",
        lora=None if adapters is None else read_adapter_config(adapters).config,
    )
    app = build_app(
        model,
        EngineConfig(**{"threads": 1} | BOUNDS | settings),
        model_name="tiny",
        is_incremental=is_incremental,
        token=token,
        weights_root=weights_root,
        adapters=adapters,
    )
    with open_listener("127.0.0.1", 0, remedies=("", ""), what="a test") as listener:
        listener.listen()
        server = uvicorn.Server(build_server_config(app, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            yield build_url(listener)
        finally:
            server.should_exit = True
            thread.join()
