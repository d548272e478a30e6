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
from pydantic import ValidationError

from relax_events.config import RunConfig
from relax_events.config.unset_keys import missing_keys, with_values
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import FinishReason
from relax_events.events.types import SampleEvaluated, SampleRolledOut
from relax_events.session.defaults import resolve_defaults
from relax_events.training.backend.protocol import SampleScores
from tests.unit.trainer_samples import plain_logprobs, plain_model, tiny_model
from workers.teacher import TeacherScorer, open_teachers

TOP = {"distill_placement": "loss", "distill_top_k": 2}


class Scripted:
    """A scorer that records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []

    def score(self, samples: Sequence[SampleRolledOut]) -> list[np.ndarray]:
        return [np.full(4, -1.5, np.float32) for _ in samples]

    def score_topk(
        self, samples: Sequence[SampleRolledOut], *, num_ids: int, ids_of: str
    ) -> list[SampleScores]:
        self.asked.append((num_ids, ids_of))
        ids = np.array([[5, 9], [6, 1]], np.int32) if ids_of != "sample" else None
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
        records=SimpleNamespace(
            build_for_samples=lambda topic, events: [(topic, event) for event in events]
        ),
        lifecycle=SimpleNamespace(piece=lambda name: nullcontext()),
    )


def taught(config: Any) -> tuple[Scripted, list[SampleEvaluated]]:
    scorer = Scripted()
    records: Any = TeacherScorer(worker_of(config), {"teacher": scorer})(
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
    ("tokens", "ids_of"),
    [("teacher_topk", "model"), ("student_topk", "sample"), ("union", "both")],
)
def test_top_k_token_ids_are_chosen_by_the_teacher_or_taken_from_the_sample(
    tokens: str, ids_of: str, make_run_config: Any
) -> None:
    settings = {"name": "opd", "distill_tokens": tokens} | TOP
    scorer, events = taught(make_run_config(algorithm=settings, teacher={"model_path": "teacher"}))
    assert scorer.asked == [(2, ids_of)]
    assert (events[0].topk_ids is not None) == (ids_of != "sample")
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
    (values,) = open_teachers(worker_of(config))["teacher"].score([sample])
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
        open_teachers(worker_of(config))
    with pytest.raises(
        ConfigError, match=r"the teacher role has no teacher; set teacher.model_path"
    ):
        open_teachers(worker_of(make_run_config()))


def source_config(make_run_config: Any, **teacher: Any) -> Any:
    return make_run_config(
        algorithm={"name": "opd"},
        teacher=teacher,
        teachers={
            "math": {"model_path": "math", "sources": ["gsm8k", "dapo"]},
            "code": {"model_path": "code", "sources": ["apps"]},
        },
    )


class Constant:
    """A teacher that gives every token the same log-probability."""

    def __init__(self, value: float) -> None:
        self.value = value

    def score(self, samples: Sequence[SampleRolledOut]) -> list[np.ndarray]:
        return [np.full(4, self.value, np.float32) for _ in samples]


def test_each_sample_is_scored_by_the_teacher_of_its_source(make_run_config: Any) -> None:
    teachers: Any = {
        "teacher": Constant(-1.0),
        "teachers.math": Constant(-2.0),
        "teachers.code": Constant(-3.0),
    }
    scorer = TeacherScorer(
        worker_of(source_config(make_run_config, model_path="teacher")), teachers
    )
    sources = ["dapo", "essays", "apps", "gsm8k"]
    samples = [
        event_samples.rolled_out(index=index, metadata=json.dumps({"data_source": source}))
        for index, source in enumerate(sources)
    ]
    samples.append(event_samples.rolled_out(index=4, metadata="{}"))
    records: Any = scorer(samples)
    assert [event.sample_id for _, event in records] == [one.sample_id for one in samples]
    assert [float(event.values[0]) for _, event in records] == [-2.0, -1.0, -3.0, -2.0, -1.0]


def test_sample_of_a_source_without_a_teacher_is_refused(make_run_config: Any) -> None:
    teachers: Any = {"teachers.math": Constant(-2.0), "teachers.code": Constant(-3.0)}
    scorer = TeacherScorer(worker_of(source_config(make_run_config)), teachers)
    with pytest.raises(PoisonSample, match=r"no teacher is for the source 'essays' \(data_source"):
        scorer([event_samples.rolled_out(metadata='{"data_source": "essays"}')])


def test_two_teachers_of_one_source_are_refused(make_run_config: Any) -> None:
    with pytest.raises(ValidationError, match=r"source 'x' has two teachers, teachers.a and"):
        make_run_config(
            teachers={
                "a": {"model_path": "a", "sources": ["x"]},
                "b": {"model_path": "b", "sources": ["x"]},
            }
        )


def test_dtype_of_each_teacher_is_that_of_its_checkpoint(make_run_config: Any) -> None:
    config = make_run_config(
        algorithm={"name": "opd"},
        teacher={"model_path": tiny_model()},
        teachers={"math": {"model_path": tiny_model(), "sources": ["gsm8k"]}},
    )
    config = with_values(config, {"teachers.math.dtype": None})
    assert missing_keys(config) == ["teachers.math.dtype"]
    resolved, _ = resolve_defaults(config)
    assert resolved.teachers["math"].dtype == "float32"
    assert RunConfig.model_validate(resolved.model_dump()) == resolved


@pytest.mark.parametrize("tokens", ["student_topk", "union"])
def test_servers_are_refused_for_token_ids_that_they_do_not_score(
    tokens: str, make_run_config: Any
) -> None:
    with pytest.raises(ValidationError, match=r"teacher.urls: a server scores no given token ids"):
        make_run_config(
            algorithm={"name": "opd", "distill_tokens": tokens} | TOP,
            teacher={"model_path": "teacher", "urls": ["http://one:1"]},
        )


def test_servers_are_refused_where_tokens_are_sampled_at_another_temperature(
    make_run_config: Any,
) -> None:
    with pytest.raises(ValidationError, match=r"teacher.urls: a server scores at temperature 1"):
        make_run_config(
            algorithm={"name": "opd"},
            teacher={"model_path": "teacher", "urls": ["http://one:1"]},
            engine={"sampling": {"temperature": 0.7}},
        )


@pytest.mark.parametrize("tokens", ["sampled", "teacher_topk"])
def test_lost_sample_gets_zeros_without_a_pass_of_the_model(
    make_run_config: Any, tokens: str
) -> None:
    algorithm = {"name": "opd", "distill_tokens": tokens}
    algorithm |= TOP if tokens == "teacher_topk" else {}
    config = make_run_config(algorithm=algorithm, teacher={"model_path": "teacher"})
    prompt = np.array([7, 8], np.int32)
    lost = event_samples.rolled_out(
        index=0,
        tokens=prompt,
        loss_mask=np.zeros(2, np.uint8),
        rollout_logprobs=np.zeros(2, np.float32),
        finish_reason=FinishReason.LOST,
    )
    scorer = Scripted()
    score: Any = TeacherScorer(worker_of(config), {"teacher": scorer})  # type: ignore[dict-item]
    (_, first), (_, second) = score([lost, event_samples.rolled_out(index=1)])
    assert (first.key.sample_index, second.key.sample_index) == (0, 1)
    assert first.values.tolist() == [0.0, 0.0]
    if tokens == "teacher_topk":
        assert (first.topk_ids.shape, first.topk_logprobs.shape) == ((0, 2), (0, 2))
    else:
        assert first.topk_ids is None
    scorer.score = scorer.score_topk = None  # type: ignore[assignment, method-assign]
    assert len(score([lost])) == 1
