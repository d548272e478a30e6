"""A server of SGLang, and one of ours, load an exported folder and have the trainer's
log-probabilities."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
import torch
from published_model import TrainedRun, make_base
from served_model import complete_tokens, served
from sglang_servers import started_server

from relax_events.ops.model_export.export import export_version

pytestmark = pytest.mark.timeout(720)  # SGLang's server takes its time to start
SECONDS = 60.0
NUM_TOKENS = 12
PROMPT = [5, 9, 2, 7, 7, 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Make a run of a few versions."""
    folder = tmp_path_factory.mktemp("trained")
    return TrainedRun(folder / "run", make_base(folder / "base"))


def complete_by_sglang(url: str) -> tuple[list[int], list[float]]:
    """Return greedy tokens of an SGLang server, and their log-probabilities."""
    sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    reply = httpx2.post(f"{url}/generate", json=body, timeout=SECONDS, trust_env=False)
    assert reply.status_code == 200, reply.text
    entries = reply.json()["meta_info"]["output_token_logprobs"]
    return [token for _, token, *_ in entries], [logprob for logprob, *_ in entries]


@pytest.mark.parametrize("kind", [pytest.param("sglang", marks=pytest.mark.sglang), "served"])
def test_server_of_an_exported_folder_has_the_trainers_logprobs(
    kind: str, request: pytest.FixtureRequest, run: TrainedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    export_version(run.config, run.versions, 2, folder, max_shard_bytes=20_000)
    if kind == "sglang":
        python, server = request.getfixturevalue("sglang_python"), tmp_path / "server"
        server.mkdir()
        with started_server(folder, server, python=python) as url:
            tokens, logprobs = complete_by_sglang(url)
    else:
        with served(folder) as url:
            tokens, logprobs = complete_tokens(
                url, PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
            )
    assert len(tokens) == NUM_TOKENS
    ids = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        logits = run.backend._model.module(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    own = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(logprobs), own, atol=1e-5, rtol=0)
