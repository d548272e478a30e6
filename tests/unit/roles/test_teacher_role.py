"""The teacher role's scores of samples, and the teachers that it rejects."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import event_samples
import numpy as np
import pytest

from relax_events.errors import ConfigError
from relax_events.events.types import LogprobsComputed, SampleRolledOut
from relax_events.training.backend.protocol import SampleScores
from tests.unit.trainer_samples import plain_logprobs, plain_model, tiny_model
from workers.teacher import TeacherScorer, open_teacher

TOP = {"distill_placement": "loss", "distill_top_k": 2}


class Scripted:
    """A scorer that records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def score(self, samples: Sequence[SampleRolledOut]) -> list[np.ndarray]:
        return [np.full(4, -1.5, np.float32) for _ in samples]

    def score_topk(
        self, samples: Sequence[SampleRolledOut], *, num_ids: int, choose_own: bool
    ) -> list[SampleScores]:
        self.asked.append((num_ids, choose_own))
        ids = np.array([[5, 9], [6, 1]], np.int32) if choose_own else None
        return [
            SampleScores(np.full(4, -1.5, np.float32), ids, np.full((2, 2), -0.5, np.float32))
            for _ in samples
        ]


def worker_of(config: Any) -> Any:
    """Return a fake of the worker that decodes a record to its event."""
    metrics = SimpleNamespace(count_tokens=lambda count: None)
    return SimpleNamespace(
        config=config,
        metrics=metrics,
        records=SimpleNamespace(build_for_sample=lambda topic, event, **_: (topic, event)),
        lifecycle=SimpleNamespace(piece=lambda name: nullcontext()),
    )


def taught(config: Any) -> tuple[Scripted, list[LogprobsComputed]]:
    scorer = Scripted()
    records: Any = TeacherScorer(worker_of(config), scorer)(
        [event_samples.rolled_out(index=0), event_samples.rolled_out(index=1)]
    )  # type: ignore[arg-type]
    assert [topic for topic, _ in records] == ["teacher.logprobs"] * 2
    return scorer, [event for _, event in records]


def test_teacher_sends_only_sampled_token_logprobs_without_top_k_distillation(
    make_run_config: Any,
) -> None:
    scorer, events = taught(
        make_run_config(algorithm={"name": "opd"}, teacher={"model_path": "teacher"})
    )
    assert [
        (event.model_role, event.model_version, event.topk_ids, event.topk_logprobs)
        for event in events
    ] == [("teacher", 0, None, None)] * 2
    assert np.asarray(events[0].values).tolist() == [-1.5] * 4
    assert scorer.asked == []


@pytest.mark.parametrize(
    ("tokens", "choose_own"), [("teacher_topk", True), ("student_topk", False)]
)
def test_top_k_token_ids_are_chosen_by_the_teacher_or_taken_from_the_sample(
    tokens: str, choose_own: bool, make_run_config: Any
) -> None:
    settings = {"name": "opd", "distill_tokens": tokens} | TOP
    scorer, events = taught(make_run_config(algorithm=settings, teacher={"model_path": "teacher"}))
    assert scorer.asked == [(2, choose_own)]
    assert (events[0].topk_ids is not None) == choose_own
    assert np.asarray(events[1].topk_logprobs).tolist() == [[-0.5, -0.5]] * 2


def test_teacher_uses_its_own_settings_and_weights(make_run_config: Any, tmp_path: Path) -> None:
    policy = tmp_path / "policy"  # whose weights are not read
    policy.mkdir()
    shutil.copy(tiny_model() / "tokenizer.json", policy)
    config = make_run_config(
        model={"path": policy, "dtype": "bfloat16"},
        algorithm={"name": "opd"},
        teacher={"model_path": tiny_model(), "device": "cpu", "threads": 1},
    )
    sample = event_samples.rolled_out(temperature=0.7)
    (values,) = open_teacher(worker_of(config)).score([sample])
    expected = plain_logprobs(np.asarray(sample.tokens), 0.7, plain_model(tiny_model()))
    np.testing.assert_allclose(values, expected * np.asarray(sample.loss_mask), atol=2e-5)


def test_teacher_of_another_vocabulary_is_refused(make_run_config: Any, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []})
    )
    config = make_run_config(
        model={"path": policy}, algorithm={"name": "opd"}, teacher={"model_path": tiny_model()}
    )
    with pytest.raises(
        ConfigError,
        match=r"teacher and policy must have the same vocabulary: token id 0 is '!' in teacher.model_path",
    ):
        open_teacher(worker_of(config))
    with pytest.raises(
        ConfigError, match=r"the teacher role has no teacher; set teacher.model_path"
    ):
        open_teacher(worker_of(make_run_config()))
