"""Weights sent to a server of two tensor-parallel ranks by broadcast, without a folder for them: what
the server holds is proven rank by rank, and a server that dies in mid-update is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engine_requests import finish, make_request, plain_logprobs
from transformers import AutoModelForCausalLM

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.engines.sglang.lifecycle import ServerLifecycle
from relax_events.engines.sglang.server import SGLangServer
from relax_events.engines.sglang.weight_group import WeightGroup
from relax_events.errors import WeightsError
from relax_events.events.parts import VersionSegment
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.weights import Weights
from relax_events.weights.artifact_writer import weights_digest
from tests.folders import kept_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
NUM_RANKS = 2
BUCKET_BYTES = 8192
UNTIL_OPEN = ("no engine is available", "is lost")


@cache
def model_of(seed: int) -> Path:
    """Write a random model with two heads for keys and values, so that each rank has one."""
    return make_tiny(
        kept_folder("ranks") / str(seed), corpus=["12=21"], hidden_size=64, num_layers=1, seed=seed
    )


def weights_of(policy_version: int, *, seed: int) -> Weights:
    """Return the weights of another model as a version."""
    model = AutoModelForCausalLM.from_pretrained(model_of(seed))
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    return Weights(policy_version, tensors, weights_digest(tensors))


@pytest.fixture
def engine(
    sglang_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SGLangEngine]:
    """Yield an engine whose server has two ranks."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    path = model_of(0)
    server = SGLangConfig(
        python=sglang_python,
        weights_directory=tmp_path,
        arguments=("--tp-size", str(NUM_RANKS)),
        weight_updates="distributed",
        stall_seconds=500.0,
    )
    config = EngineConfig(threads=1, max_running_samples=8, max_context_tokens=512, sglang=server)
    opened = SGLangEngine(path, config=config, model=ModelConfig(dtype="float32", path=path))
    yield opened
    opened.close()


def lifecycle_of(engine: SGLangEngine) -> ServerLifecycle:
    """Return the lifecycle of the engine's only server."""
    (replica,) = engine._replicas
    server = replica._engine
    assert isinstance(server, SGLangServer)
    return server._lifecycle


def check_samples(engine: SGLangEngine, version: int, path: Path) -> None:
    """Generate with the served version: log-probabilities are those of its weights."""
    requests = [make_request(number, max_new_tokens=16) for number in range(2)]
    for request in requests:
        engine.submit(request)
    samples = finish(engine)
    for request in requests:
        for asked in request.samples:
            sample = samples[asked.sample_id]
            assert sample.segments == (VersionSegment(version, len(sample.tokens)),)
            np.testing.assert_allclose(
                sample.logprobs,
                plain_logprobs(request.prompt_tokens, sample.tokens, path=path),
                atol=1e-5,
            )


def load_when_open(engine: SGLangEngine, weights: Any) -> None:
    """Load a version as a worker does: again, until a server is there."""
    pause = threading.Event()
    while True:
        try:
            engine.load_weights(weights)
        except WeightsError as error:
            if not any(text in str(error) for text in UNTIL_OPEN):
                raise
            pause.wait(1.0)
        else:
            return


def test_two_ranks_serve_what_was_broadcast_also_after_a_death_in_mid_update(
    engine: SGLangEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_samples(engine, 0, model_of(0))
    lifecycle = lifecycle_of(engine)
    assert lifecycle._group is not None
    lifecycle._group._bucket_bytes = BUCKET_BYTES
    engine.load_weights(weights_of(1, seed=1))
    check_samples(engine, 1, model_of(1))
    assert {name.partition("/")[0] for name in lifecycle._expected} == {"0", "1"}
    assert list(tmp_path.rglob("*.safetensors")) == []

    second = weights_of(2, seed=2)
    send, sent = WeightGroup._send_bucket, []

    async def send_and_kill(group: WeightGroup, tensors: Any, **settings: Any) -> None:
        sent.append(list(tensors))
        if len(sent) == 2:
            process = lifecycle._process
            assert process is not None
            assert process._process is not None
            for child in psutil.Process(process._process.pid).children(recursive=True):
                if "scheduler" in " ".join(child.cmdline()):
                    child.kill()
        await send(group, tensors, **settings)

    monkeypatch.setattr(WeightGroup, "_send_bucket", send_and_kill)
    with pytest.raises(WeightsError, match="policy version 2 is not served"):
        engine.load_weights(second)
    monkeypatch.undo()
    assert len(sent) == 2
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    load_when_open(engine, second)
    assert lifecycle_of(engine) is not lifecycle
    check_samples(engine, 2, model_of(2))
