"""The advantage role's records for a whole prompt group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import event_samples
import numpy as np
import pytest

from relax_events.algorithms.advantage_estimator import AdvantageEstimator
from relax_events.events.parts import FinishReason, Outcome
from relax_events.events.types import SampleReady
from relax_events.runtime.join import JoinedGroup
from workers.advantage import AdvantageLoop, needed_model_roles

GROUP = "000004-0000-0"


class Sent:
    """Replaces the worker: keeps sent events."""

    def __init__(self, config: Any) -> None:
        self.config, self.ready, self.ended = config, [], []
        self.records = SimpleNamespace(
            producer=SimpleNamespace(send=lambda record: None),
            build_for_samples=self.build_for_samples,
            build_end_request=self.build_end_request,
        )

    def build_for_samples(self, entity: str, events: Sequence[SampleReady]) -> list[None]:
        assert entity == "advantage.samples"
        self.ready += events
        return [None]

    def build_end_request(
        self, prompt_group_id: str, outcome: Outcome, reason: str, **_: Any
    ) -> None:
        self.ended.append((prompt_group_id, outcome, reason))


def finish(
    config: Any,
    rewards: list[float],
    components: list[dict[str, float]] | None = None,
    ref: np.ndarray | None = None,
    taught: dict[str, np.ndarray] | None = None,
    topk_ids: np.ndarray | None = None,
    cut_off: tuple[int, ...] = (),
    refused: tuple[int, ...] = (),
    late: tuple[int, ...] = (),
    lost: tuple[int, ...] = (),
) -> Sent:
    """Let the role finish a prompt group of samples with two loss tokens each."""
    group = JoinedGroup(GROUP, 0, 0)
    for index, reward in enumerate(rewards):
        sample = event_samples.rolled_out(GROUP, index, of=len(rewards), topk_ids=topk_ids)
        parts = components[index] if components else {}
        if index in cut_off:
            sample = dataclasses.replace(sample, finish_reason=FinishReason.LENGTH)
        if index in late:
            sample = dataclasses.replace(sample, finish_reason=FinishReason.LATE)
        if index in lost:
            sample = dataclasses.replace(
                sample, finish_reason=FinishReason.LOST, error="its server is gone"
            )
        group.samples[sample.sample_id] = sample
        group.scores[sample.sample_id] = dataclasses.replace(
            event_samples.scored(GROUP, index, reward=reward), components=parts
        )
        if index in refused + lost:
            group.scores[sample.sample_id] = dataclasses.replace(
                group.scores[sample.sample_id],
                reward=None,
                error="no verdict" if index in refused else None,
            )
        if ref is not None:
            evaluated = dataclasses.replace(event_samples.evaluated(GROUP, index), values=ref)
            group.logprobs.setdefault("reference", {})[sample.sample_id] = evaluated
        if taught is not None:
            evaluated = dataclasses.replace(
                event_samples.evaluated(GROUP, index, model_role="teacher"), **taught
            )
            group.logprobs.setdefault("teacher", {})[sample.sample_id] = evaluated
    sent, loop = Sent(config), AdvantageLoop.__new__(AdvantageLoop)
    loop._has_rewards = config.algorithm.has_rewards
    loop._worker = sent  # type: ignore[assignment]
    loop._estimator = AdvantageEstimator(
        config.algorithm, max_new_tokens=config.engine.sampling.max_new_tokens
    )
    loop._join = SimpleNamespace(close=lambda closed: None)  # type: ignore[assignment]
    loop._finish(group)
    return sent


def test_reward_components_are_forwarded_with_their_advantages(make_run_config: Any) -> None:
    config = make_run_config(
        algorithm={"name": "gdpo", "reward_weights": {"a": 1.0, "b": 0.5}, "normalise_std": False}
    )
    parts = [{"a": 1.0, "b": 0.0, "c": 9.0}, {"a": 0.0, "b": 4.0, "c": 9.0}]
    sent = finish(config, [1.0, 4.0], parts)
    assert [sample.components for sample in sent.ready] == parts
    assert [sample.reward for sample in sent.ready] == [1.0, 4.0]
    # a: +-0.5, b: -+2 with half its weight.
    assert [sample.advantages.tolist() for sample in sent.ready] == [
        [0, 0, -0.5, -0.5],
        [0, 0, 0.5, 0.5],
    ]


def test_only_the_prompt_group_with_unsuitable_rewards_fails(
    make_run_config: Any,
) -> None:
    sent = finish(make_run_config(algorithm={"name": "gdpo"}), [1.0, 4.0])
    assert sent.ready == []
    reason = (
        "reward: there are no reward components to normalise separately; return a dict of them, "
        "or use another algorithm"
    )
    assert sent.ended == [(GROUP, Outcome.FAILED, reason)]


@pytest.mark.parametrize("settings", [{}, {"filter_uniform_rewards": True}])
def test_only_the_prompt_group_with_a_huge_reward_on_the_log_fails(
    make_run_config: Any, settings: dict[str, Any]
) -> None:
    sent = finish(make_run_config(algorithm=settings), [1.0, 1e308])
    reason = (
        "reward: 1 of 2 samples are usable, 2 are needed (algorithm.min_samples_per_group): 1 "
        f"finished, 1 refused; first: sample {GROUP}/1: reward must be within +-3.4e38, got 1e+308"
    )
    assert (sent.ready, sent.ended) == ([], [(GROUP, Outcome.FAILED, reason)])


def test_teacher_logprobs_are_forwarded_to_the_trainer(make_run_config: Any) -> None:
    settings = {
        "name": "opd",
        "distill_placement": "loss",
        "distill_tokens": "teacher_topk",
        "distill_top_k": 2,
    }
    config = make_run_config(algorithm=settings, teacher={"model_path": "teacher"})
    assert needed_model_roles(config.algorithm) == {"teacher"}
    ids, logprobs = (
        np.array([[5, 9], [6, 1]], np.int32),
        np.log(np.array([[0.5, 0.25], [0.9, 0.05]], np.float32)),
    )
    taught = {
        "values": np.array([0, 0, -1.5, -0.75], np.float32),
        "topk_ids": ids,
        "topk_logprobs": logprobs,
    }
    sent = finish(config, [1.0, 2.0], taught=taught)
    for sample in sent.ready:
        assert [
            np.asarray(values).tolist()
            for values in (sample.topk_ids, sample.topk_teacher_logprobs)
        ] == [ids.tolist(), logprobs.tolist()]
        assert np.asarray(sample.teacher_logprobs).tolist() == [0, 0, -1.5, -0.75]
        assert sample.advantages.tolist() == [0, 0, 0, 0]


def test_engine_top_token_ids_are_forwarded_when_the_teacher_sends_none(
    make_run_config: Any,
) -> None:
    settings = {
        "name": "opd",
        "distill_placement": "loss",
        "distill_tokens": "student_topk",
        "distill_top_k": 2,
    }
    ids = np.array([[5, 9], [6, 1]], np.int32)
    taught = {"topk_logprobs": np.zeros((2, 2), np.float32)}
    sent = finish(
        make_run_config(algorithm=settings, teacher={"model_path": "teacher"}),
        [1.0, 2.0],
        taught=taught,
        topk_ids=ids,
    )
    assert [np.asarray(sample.topk_ids).tolist() for sample in sent.ready] == [ids.tolist()] * 2


def test_kl_penalty_is_subtracted_from_the_reward_per_token(make_run_config: Any) -> None:
    config = make_run_config(algorithm={"name": "reinforce_plus_plus", "kl_coefficient": 0.5})
    sent = finish(config, [1.0, 2.0], ref=np.array([0, 0, -1.5, -0.75], np.float32))
    # The engine's log-probabilities are -0.5 and -0.25: 1 and 0.5 above the reference.
    assert sent.ready[0].advantages.tolist() == pytest.approx([0, 0, 1 - 0.75, 1 - 0.25])
    assert sent.ready[1].reward == 2.0
    assert sent.ready[0].ref_logprobs is not None


@pytest.mark.parametrize("truncated", ["mask", "drop"])
def test_prompt_group_of_truncated_samples_is_filtered(
    make_run_config: Any, truncated: str
) -> None:
    sent = finish(
        make_run_config(algorithm={"truncated_samples": truncated}), [1.0, 2.0], cut_off=(0, 1)
    )
    assert (sent.ready, sent.ended) == (
        [],
        [(GROUP, Outcome.FILTERED, "all samples were cut off by their length")],
    )
    assert len(finish(make_run_config(), [1.0, 2.0], cut_off=(0, 1)).ready) == 2


def test_uniform_reward_filter_ignores_dropped_but_not_masked_samples(make_run_config: Any) -> None:
    settings = {"filter_uniform_rewards": True, "normalise_std": False}
    left_out = finish(
        make_run_config(algorithm=settings | {"truncated_samples": "drop"}),
        [1.0, 1.0, 3.0],
        cut_off=(2,),
    )
    assert [reason for _, _, reason in left_out.ended] == ["all rewards are equal"]
    masked = finish(
        make_run_config(algorithm=settings | {"truncated_samples": "mask"}),
        [1.0, 1.0, 4.0],
        cut_off=(2,),
    )
    assert [sample.advantages.tolist() for sample in masked.ready] == [
        [0, 0, -1, -1],
        [0, 0, -1, -1],
        [0, 0, 2, 2],
    ]
    assert all(
        sample.loss_mask.any() for sample in masked.ready
    )  # the log keeps what the policy chose


@pytest.mark.parametrize("kind", ["refused", "lost"])
@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "opo", "reinforce_plus_plus"])
def test_prompt_group_is_trained_without_its_unusable_sample(
    make_run_config: Any, algorithm: str, kind: str
) -> None:
    config = make_run_config(algorithm={"name": algorithm})
    others = finish(config, [1.0, 0.0, 0.25]).ready
    whole = finish(config, [1.0, 0.0, 9.0, 0.25], **{kind: (2,)}).ready
    assert [sample.reward for sample in whole] == [1.0, 0.0, None, 0.25]
    assert [whole[index].advantages.tolist() for index in (0, 1, 3)] == [
        sample.advantages.tolist() for sample in others
    ]
    assert not whole[2].advantages.any()


def test_reward_beyond_float32_is_refused_with_its_components(make_run_config: Any) -> None:
    parts = [{"a": 1.0}, {"a": 1e300}, {"a": 0.0}]
    sent = finish(make_run_config(), [1.0, 0.0, 0.0], parts)
    assert [sample.reward for sample in sent.ready] == [1.0, None, 0.0]
    assert [sample.components for sample in sent.ready] == [{"a": 1.0}, {}, {"a": 0.0}]


def test_prompt_group_with_too_few_usable_samples_fails_with_their_numbers(
    make_run_config: Any,
) -> None:
    sent = finish(make_run_config(), [1.0] * 8, refused=(0, 5, 6), lost=(1, 2))
    reason = (
        "reward: 3 of 8 samples are usable, 4 are needed (algorithm.min_samples_per_group): 3 "
        "finished, 2 lost, 3 refused; first: no verdict"
    )
    assert (sent.ready, sent.ended) == ([], [(GROUP, Outcome.FAILED, reason)])
    config = make_run_config(algorithm={"min_samples_per_group": 3})
    assert len(finish(config, [1.0] * 8, refused=(0, 5, 6), lost=(1, 2)).ready) == 8


def test_late_samples_are_trained_unless_all_are_late(make_run_config: Any) -> None:
    config = make_run_config(algorithm={"normalise_std": False})
    sent = finish(config, [0.0, 1.0, 0.5], late=(0,), lost=(2,))
    assert [float(sample.advantages[-1]) for sample in sent.ready] == [-0.5, 0.5, 0.0]
    sent = finish(config, [0.0, 0.0, 1.0], late=(0, 1), lost=(2,))
    ((_, outcome, reason),) = sent.ended
    assert outcome is Outcome.FAILED
    assert "all were late: the sandbox is overloaded, or the policy hangs" in reason


def test_prompt_group_whose_usable_samples_are_masked_is_filtered(make_run_config: Any) -> None:
    config = make_run_config(algorithm={"truncated_samples": "mask"})
    sent = finish(config, [1.0, 0.0, 0.0, 0.0], cut_off=(0, 1), lost=(2, 3))
    assert [reason for _, _, reason in sent.ended] == ["all samples were cut off by their length"]


def test_uniform_reward_filter_ignores_samples_without_a_reward(make_run_config: Any) -> None:
    config = make_run_config(algorithm={"filter_uniform_rewards": True})
    sent = finish(config, [1.0, 1.0, 0.0], refused=(2,))
    assert [reason for _, _, reason in sent.ended] == ["all rewards are equal"]
