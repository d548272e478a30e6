"""The engine's log-probabilities on a GPU are those of the trainer's forward pass there, and of the
CPU's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import finish, make_engine, make_request, tiny_model
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("settings", [{}, {"max_running_samples": 3}])
def test_logprobs_are_those_of_one_forward_pass(family: str, settings: dict[str, Any]) -> None:
    path = tiny_model(family)
    engine = make_engine(path, model={"device": "cuda"}, **settings)
    requests = [make_request(number, num_samples=4, max_new_tokens=24) for number in range(6)]
    for request in requests:
        engine.submit(request)
    samples = finish(engine)
    assert len(samples) == 24
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = {request.prompt_group_id: request.prompt_tokens for request in requests}
    for sample in samples.values():
        prompt = prompts[sample.prompt_group_id]
        ids = torch.from_numpy(np.concatenate([prompt, sample.tokens])).long()[None]
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        np.testing.assert_allclose(sample.logprobs, expected.numpy(), atol=1e-4)
