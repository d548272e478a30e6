"""Talk with a served model by the clients of `renderers` and `verifiers`, in their own environment.

    python renderers_client.py URL MODEL_FOLDER TOKEN    prints a JSON line

Two turns through `renderers.client.generate`, the second bridged to the first by the renderer, and
one through verifiers' `TrainClient`.
"""

from __future__ import annotations

import asyncio
import json
import sys

from openai import AsyncOpenAI
from renderers import Qwen3RendererConfig, create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate
from verifiers.v1 import TrainClientConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

SETTINGS = Qwen3RendererConfig(thinking_retention="all")
"""A user's message after a turn does not drop that turn's reasoning, so the turn can be bridged."""


async def main() -> None:
    """Run the calls, and print what they return."""
    url, folder, token = sys.argv[1:]
    renderer = create_renderer(load_tokenizer(folder), SETTINGS)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
    sampling = {"max_tokens": 8, "temperature": 1.0, "seed": 3}
    first = await generate(
        client=client,
        renderer=renderer,
        messages=[{"role": "user", "content": "12"}],
        model="tiny",
        sampling_params=sampling,
    )
    more = [{"role": "user", "content": "and"}]
    # a turn that was cut off is bridged once its end token stands behind it
    said = [*first["completion_ids"], *renderer.get_stop_token_ids()[:1]]
    bridged = renderer.bridge_to_next_turn(first["prompt_ids"], said, more)
    second = await generate(
        client=client,
        renderer=renderer,
        messages=[{"role": "user", "content": "12"}, *more],
        model="tiny",
        prompt_ids=bridged.token_ids,
        sampling_params=sampling,
    )
    trained = TrainClient(
        TrainClientConfig(
            base_url=f"{url}/v1",
            headers={"x-api-key": token},
            renderer=SETTINGS,
            renderer_model_name=folder,
        )
    )
    body = {"model": "tiny", "messages": [{"role": "user", "content": "12"}]}
    third = await trained.get_response(ChatDialect(), body, SamplingConfig(max_tokens=8, seed=3))
    keys = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason")
    turns = [{key: one[key] for key in keys} for one in (first, second)]
    print(json.dumps({"turns": turns, "verifiers": third.model_dump(mode="json")}, default=str))


asyncio.run(main())
