"""A model behind `relax serve`'s API, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_requests import tiny_model
from sglang_servers import BOUNDS

from relax_events.attacks.served_app import serving
from relax_events.config import EngineConfig, ModelConfig
from relax_events.http.tls import TlsFiles
from relax_events.models.adapter_folder import read_adapter_config
from relax_events.serving.app import build_app


@contextmanager
def served(
    path: Path | None = None,
    *,
    is_incremental: bool = False,
    records_experts: bool = False,
    token: str = "",
    weights_root: Path | None = Path("/"),
    adapters: Path | None = None,
    tls: TlsFiles | None = None,
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
    with serving(app, tls=tls) as url:
        yield url
