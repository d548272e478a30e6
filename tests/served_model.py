"""A model behind `relax serve`'s application, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from engine_requests import tiny_model
from sglang_servers import BOUNDS

from relax_events.attacks.served_app import serving
from relax_events.config import EngineConfig, ModelConfig
from relax_events.http.tls import TlsFiles
from relax_events.models.adapter_folder import read_adapter_config
from relax_events.packages.gateway.model_app import build_model_app
from relax_events.packages.gateway.served_model import ServedModel

TOKEN = "the-token-of-a-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SECONDS = 60.0


@contextmanager
def served(
    path: Path | None = None,
    *,
    records_experts: bool = False,
    adapters: Path | None = None,
    tls: TlsFiles | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Serve a model on a free port, with the adapters of a folder if one is named, and give the
    address."""
    model = ModelConfig(
        dtype="float32",
        path=path or tiny_model(),
        device="cpu",
        routing_replay="rollout" if records_experts else "none",
        lora=None if adapters is None else read_adapter_config(adapters).config,
    )
    engine = EngineConfig(**{"threads": 1} | BOUNDS | settings)
    app = build_model_app(
        ServedModel(model, engine, name="tiny", adapters=adapters), engine, token=TOKEN
    )
    with serving(app, tls=tls) as url:
        yield url


def post(url: str, path: str, body: dict[str, Any]) -> httpx2.Response:
    """Post with the token."""
    return httpx2.post(f"{url}{path}", json=body, headers=BEARER, timeout=SECONDS, trust_env=False)


def complete_tokens(
    url: str, token_ids: list[int], **sampling: Any
) -> tuple[list[int], list[float]]:
    """Return the tokens that continue a prompt, and their log-probabilities."""
    reply = post(
        url, "/inference/v1/generate", {"token_ids": token_ids, "sampling_params": sampling}
    )
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
