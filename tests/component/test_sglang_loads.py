"""A server's weights after a failed load: the client is a fake, the lifecycle and the model's folder
are real.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_requests import other_weights, tiny_model

from relax_events.config import ModelConfig, SamplingConfig, SGLangConfig
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.client import ServerRejected
from relax_events.engines.sglang.generate_body import add_seeds, build_generate_body
from relax_events.engines.sglang.generation import ServedVersion
from relax_events.engines.sglang.lifecycle import ServerLifecycle
from relax_events.errors import WeightsError


class Unprovable:
    """A client of a server whose checksums can't be computed here, and that rejects its second
    load."""

    url = "http://server"
    records_experts = False

    def __init__(self) -> None:
        self.loads: list[str] = []

    async def is_ready(self) -> bool:
        return True

    async def require_supported(self, *, takes_media: bool) -> None: ...

    async def checksums(self) -> list[dict[str, str]]:
        return []

    async def load_weights(self, folder: Path, *, name: str, flush_cache: bool) -> None:
        self.loads.append(name)
        if len(self.loads) == 2:
            raise ServerRejected("a tensor could not be read")

    async def resume(self) -> None:
        self.loads.append("resumed")

    async def close(self) -> None: ...


def test_unproven_server_is_lost_after_a_failed_load(tmp_path: Path) -> None:
    model, client = ModelFolder.read(tiny_model()), Unprovable()
    fake: Any = client

    async def run() -> str:
        lifecycle = ServerLifecycle(
            fake,
            None,
            config=SGLangConfig(urls=("http://server",), on_unverified_weights="accept"),
            served=ServedVersion.new(0, tmp_path),
            model=model,
            on_result=lambda _: None,
        )
        await lifecycle.open(model, ModelConfig(path=tiny_model(), dtype="float32"))
        tensors = model.match_tensors(other_weights(1)[0].tensors)
        with pytest.raises(WeightsError, match="policy version 1 is not served: a tensor could"):
            await lifecycle.load(ServedVersion.new(1, tmp_path), tensors, on_running="restart")
        while lifecycle.failure is None:
            await asyncio.sleep(0.05)
        reason = str(lifecycle.failure)
        await lifecycle.close()
        return reason

    reason = asyncio.run(asyncio.wait_for(run(), 60))
    assert "after a failed load of weights nothing proves which version it has" in reason
    assert len(client.loads) == 2, "it was not resumed"


def test_each_sample_of_a_prompt_group_has_its_own_seed() -> None:
    prompts = [
        {"rid": name, "input_ids": [1], "max_new_tokens": 3, "stop_token_ids": [0]}
        for name in ("a", "b")
    ]
    body = build_generate_body(
        prompts, media=[], sampling=SamplingConfig(), extra_key="x", num_top=0
    )
    assert all("sampling_seed" not in one for one in body["sampling_params"])
    add_seeds(body, [5, 2**64 - 1])
    seeds = [one["sampling_seed"] for one in body["sampling_params"]]
    assert seeds == [5, 2**63 - 1]
