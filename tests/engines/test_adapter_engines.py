"""Engines on versions that hold adapters alone have the trainer's log-probabilities: our own engine
adds the adapters, SGLang's servers get merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_requests import finish, make_engine, make_request
from published_model import TrainedRun, make_base
from served_model import complete_tokens, served
from sglang_servers import engines_at, started_server

from relax_events.engines.protocol import Engine
from relax_events.errors import WeightsError
from relax_events.ops.model_export.export import export_version
from relax_events.weights import Weights
from relax_events.weights.transport import StoreReader

pytestmark = pytest.mark.timeout(720)  # SGLang's server takes its time to start
LORA = {"rank": 4, "alpha": 12}
KINDS = ["transformers", pytest.param("sglang", marks=pytest.mark.sglang)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Make a run of a few versions."""
    folder = tmp_path_factory.mktemp("trained")
    return TrainedRun(folder / "run", make_base(folder / "base"), model={"lora": LORA})


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, run: TrainedRun, tmp_path: Path) -> Iterator[Engine]:
    """Open an engine on the base model."""
    base = run.config.model.path
    with ExitStack() as stack:
        if request.param == "transformers":
            yield stack.enter_context(closing(make_engine(base, model={"lora": LORA})))
            return
        python = request.getfixturevalue("sglang_python")
        url = stack.enter_context(started_server(base, tmp_path, python=python))
        yield stack.enter_context(engines_at(url, path=base, lora=LORA))()


def version_of(run: TrainedRun, policy_version: int) -> Weights:
    return StoreReader(run.store)._read(run.versions.artifacts[policy_version])


def test_engine_has_the_trainers_logprobs(engine: Engine, run: TrainedRun) -> None:
    for policy_version in (1, 2):
        engine.load_weights(version_of(run, policy_version))
    assert engine.policy_version == 2
    request = make_request(1, num_samples=1, max_new_tokens=12)
    engine.submit(request)
    (sample,) = finish(engine).values()
    prompt = request.prompt_tokens
    ids = torch.from_numpy(np.concatenate([prompt, sample.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = run.backend._model.module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    assert torch.allclose(torch.from_numpy(sample.logprobs), own, atol=1e-5, rtol=0)


def test_engine_refuses_whole_weights_and_other_bases(engine: Engine, run: TrainedRun) -> None:
    version = version_of(run, 2)
    engine.load_weights(version)
    whole = Weights(3, {"model.norm.weight": torch.ones(32)}, b"")
    with pytest.raises(WeightsError, match=r"model\.(norm|layers)"):
        engine.load_weights(whole)
    other = Weights(3, version.tensors, version.digest, base_digest=b"\1" * 32)
    with pytest.raises(WeightsError, match="put the trainer's base model there"):
        engine.load_weights(other)
    assert engine.policy_version == 2


def test_server_of_an_exported_folder_has_the_trainers_logprobs(
    run: TrainedRun, tmp_path: Path
) -> None:
    export_version(run.config, run.versions, 2, tmp_path / "adapters")
    prompt = [5, 9, 2, 7, 7, 1]
    with served(run.config.model.path, adapters=tmp_path / "adapters") as url:
        tokens, logprobs = complete_tokens(
            url, prompt, max_tokens=8, temperature=0, ignore_eos=True
        )
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = run.backend._model.module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(logprobs), own, atol=1e-5, rtol=0)
