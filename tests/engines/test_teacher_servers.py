"""A teacher on a real SGLang server against the same model in the trainer's own code."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from engine_requests import tiny_model
from event_samples import changed

from relax_events.config import TeacherModelConfig
from relax_events.errors import EngineFailed
from relax_events.roles.served_teacher import ServedTeacher
from relax_events.training.backend.scoring import LogprobScorer
from tests.unit.trainer_samples import make_samples, run_config

SAMPLES: Any = [changed(sample, temperature=1.0) for sample in make_samples(7, seed=4)]


def served_teacher(*urls: str) -> ServedTeacher:
    config = TeacherModelConfig(model_path=tiny_model(), urls=urls)
    return ServedTeacher(config, section="teacher")


@pytest.fixture
def scorer() -> LogprobScorer:
    return LogprobScorer(tiny_model(), model=run_config().model, threads=1, max_tokens=256)


@pytest.fixture
def closed_url() -> str:
    """Return an address at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_server_scores_tokens_as_the_trainers_code_does(
    server_url: str, scorer: LogprobScorer
) -> None:
    found = served_teacher(server_url).score(SAMPLES)
    for ours, theirs in zip(scorer.score(SAMPLES), found, strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5)


def test_server_gives_the_models_most_probable_ids(server_url: str, scorer: LogprobScorer) -> None:
    ours = scorer.score_topk(SAMPLES, num_ids=3, ids_of="model")
    theirs = served_teacher(server_url).score_topk(SAMPLES, num_ids=3, ids_of="model")
    for mine, served in zip(ours, theirs, strict=True):
        assert mine.id_logprobs is not None
        assert served.id_logprobs is not None
        np.testing.assert_array_equal(served.ids, mine.ids)
        np.testing.assert_allclose(served.id_logprobs, mine.id_logprobs, rtol=0, atol=1e-5)


def test_samples_of_a_lost_server_go_to_the_other(
    server_url: str, scorer: LogprobScorer, closed_url: str
) -> None:
    found = served_teacher(closed_url, server_url).score(SAMPLES)
    for ours, theirs in zip(scorer.score(SAMPLES), found, strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5)
    with pytest.raises(EngineFailed, match=r"no server of teacher.urls answers: POST http"):
        served_teacher(closed_url).score(SAMPLES)
