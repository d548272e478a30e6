"""A run's first step compares what the engine sampled with what the trainer computes: a real engine
over a copy of the model in which one tensor is another, or over the model itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax_events.engines.protocol import GeneratedSample
from relax_events.errors import ConfigError
from relax_events.events.types import SampleReady
from relax_events.training.backend.protocol import StepMetrics
from relax_events.training.backend.step_sums import require_agreement
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.ranks import SingleRank
from tests.engine_requests import finish, make_engine, make_request, tiny_model
from tests.event_samples import sample_key
from tests.unit.trainer_samples import run_config

BOUND = run_config().trainer.max_start_mismatch
FILE = "model.safetensors"
REQUESTS = [make_request(number, num_samples=4, max_new_tokens=24) for number in range(6)]


def to_ready(prompt: NDArray[np.int32], sample: GeneratedSample, *, number: int) -> SampleReady:
    """Return a sample as the trainer takes it."""
    num_prompt = len(prompt)
    nothing = np.zeros(num_prompt, np.float32)
    tokens = np.concatenate([prompt, sample.tokens])
    return SampleReady(
        key=sample_key(index=number, of=24),
        tokens=tokens,
        loss_mask=(np.arange(len(tokens)) >= num_prompt).astype(np.uint8),
        rollout_logprobs=np.concatenate([nothing, sample.logprobs]),
        advantages=np.ones(len(tokens), np.float32),
        reward=0.0,
        temperature=1.0,
        num_prompt_tokens=num_prompt,
        finish_reason=sample.finish_reason,
    )


def train_first_step(engine_model: Path, model: Path, *, dtype: str) -> StepMetrics:
    """Have an engine generate and a trainer take the step, each from its own folder."""
    engine = make_engine(engine_model, model={"dtype": dtype})
    for request in REQUESTS:
        engine.submit(request)
    prompts = {one.sample_id: each.prompt_tokens for each in REQUESTS for one in each.samples}
    finished = sorted(finish(engine).items())
    samples = [
        to_ready(prompts[name], one, number=number) for number, (name, one) in enumerate(finished)
    ]
    engine.close()
    backend = TorchBackend(run_config(model, dtype=dtype), ranks=SingleRank())
    backend.accumulate(samples)
    return backend.step()


def list_tensors(model: Path) -> dict[str, Tensor]:
    """Return the tensors of a model by name."""
    return load_file(model / FILE)


def alter_tensor(model: Path, folder: Path, name: str) -> Path:
    """Copy a model, and turn around the rows of one of its tensors; double a vector, whose values
    may all be the same.
    """
    shutil.copytree(model, folder)
    tensors = list_tensors(model)
    tensor = tensors[name]
    tensors[name] = tensor * 2 if tensor.ndim == 1 else tensor.flip(0).contiguous()
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_engine_with_the_trainers_weights_agrees(family: str, dtype: str) -> None:
    model = tiny_model(family)
    metrics = train_first_step(model, model, dtype=dtype)
    require_agreement(metrics, bound=BOUND, policy_version=0, ranks=SingleRank())


def test_an_engine_with_any_one_other_tensor_is_stopped(tmp_path: Path) -> None:
    model = tiny_model()
    for number, name in enumerate(list_tensors(model)):
        altered = alter_tensor(model, tmp_path / str(number), name)
        metrics = train_first_step(altered, model, dtype="float32")
        with pytest.raises(ConfigError, match=r"largest: .* at sampled token \d+ of sample 0"):
            require_agreement(metrics, bound=BOUND, policy_version=0, ranks=SingleRank())
