"""Advantages are computed again from recorded samples, by the settings that a run's log describes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_samples import ready

from relax_events.algorithms.advantage_estimator import AdvantageEstimator, RewardedSample
from relax_events.algorithms.description import installed_algorithms
from relax_events.config import AlgorithmConfig
from relax_events.events.parts import StoredArray
from relax_events.events.types import SampleReady
from relax_events.history import ledger_advantages
from relax_events.history.ledger_advantages import RecordedAdvantages, choose_settings
from relax_events.objects import ObjectStore
from relax_events.objects.claim_check import check_in
from relax_events.projections.ledger_facts import ReadyPosition, Verdict

GROUP = "000003-0000-0"
UNIT = 0.5 / (np.sqrt(0.5) + 1e-6)
"""Of the rewards 0 and 1 by grpo: half their difference, by the deviation with n - 1."""


def settings_of(**algorithm: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(algorithm)


def group(advantages: tuple[float, float] = (-UNIT, UNIT), **changes: Any) -> list[SampleReady]:
    """Make two samples with the rewards 0 and 1."""
    return [
        ready(
            GROUP,
            index,
            reward=float(index),
            advantages=np.array([0, 0, value, value], np.float32),
            generation_digest="a",
            **changes,
        )
        for index, value in enumerate(advantages)
    ]


def give(check: RecordedAdvantages, samples: list[SampleReady]) -> dict[ReadyPosition, Verdict]:
    """Give samples to a check, one record each; return the verdicts by position."""
    verdicts: dict[ReadyPosition, Verdict] = {}
    for offset, sample in enumerate(samples):
        verdicts |= dict(check.add(sample, (0, offset, sample.sample_id)))
    return verdicts


def check_of(*algorithms: AlgorithmConfig, **settings: Any) -> RecordedAdvantages:
    store = settings.pop("store", None)
    settings = {"is_this_release": True} | settings
    recorded = [(algorithm, 8) for algorithm in algorithms]
    return RecordedAdvantages(choose_settings(recorded, **settings), store)


@pytest.mark.parametrize("name", [spec.name for spec in installed_algorithms()])
def test_advantages_of_every_algorithm_are_computed_from_what_is_recorded(name: str) -> None:
    algorithm = settings_of(name=name)
    random = np.random.default_rng(1)
    arrays: dict[str, Any] = {
        field: -random.random(4).astype(np.float32)
        for field in (
            *("rollout_logprobs", "actor_logprobs", "ref_logprobs", "values", "teacher_logprobs"),
        )
    }
    samples = [
        dataclasses.replace(sample, components={"a": float(sample.reward)}, **arrays)
        for sample in group()
    ]
    advantages = AdvantageEstimator(algorithm, max_new_tokens=8)(
        [
            RewardedSample(
                sample_id=sample.sample_id,
                reward=sample.reward,
                components=sample.components,
                loss_mask=np.asarray(sample.loss_mask),
                policy_logprobs=arrays["rollout_logprobs"],
                ref_logprobs=arrays["ref_logprobs"],
                values=arrays["values"],
                teacher_logprobs=arrays["teacher_logprobs"],
            )
            for sample in samples
        ]
    )
    samples = [
        dataclasses.replace(sample, advantages=values)
        for sample, values in zip(samples, advantages, strict=True)
    ]
    check = check_of(algorithm)
    assert set(give(check, samples).values()) == {Verdict.AGREES}
    assert check.num_held == 0
    altered = [samples[0], dataclasses.replace(samples[1], advantages=advantages[1] + 0.01)]
    assert [*give(check, altered).values()] == [Verdict.AGREES, Verdict.DIFFERS]


def test_last_bits_of_advantages_may_differ() -> None:
    nearly = (-UNIT * (1 + 4e-7), UNIT)
    assert set(give(check_of(settings_of()), group(nearly)).values()) == {Verdict.AGREES}


def test_advantages_of_any_recorded_settings_agree() -> None:
    old, new = settings_of(normalise_std=False), settings_of()
    check = check_of(new, old, new)
    for advantages in ((-UNIT, UNIT), (-0.5, 0.5), (-UNIT, UNIT)):
        assert set(give(check, group(advantages)).values()) == {Verdict.AGREES}
    assert set(give(check_of(new), group((-0.5, 0.5))).values()) == {Verdict.DIFFERS}


def test_other_advantages_of_another_release_or_of_code_that_may_have_changed_prove_nothing(
    tmp_path: Path,
) -> None:
    other = group((-0.5, 0.5))
    of_other = check_of(settings_of(), is_this_release=False)
    assert set(give(of_other, other).values()) == {Verdict.OTHER_RELEASE}
    assert set(give(of_other, group()).values()) == {Verdict.AGREES}
    file = tmp_path / "mine.py"
    file.write_text(
        "from relax_events.config.algorithm_spec import AlgorithmSpec\n"
        "MINE = AlgorithmSpec(name='mine', summary='', formula='', source='', "
        "advantage=lambda rewards: rewards.total - 0.5, "
        "policy_loss=lambda tokens: tokens.logprobs)\n"
    )
    algorithm = settings_of(name=f"{file}:MINE")
    assert set(give(check_of(algorithm), other).values()) == {Verdict.AGREES}
    assert set(give(check_of(algorithm), group()).values()) == {Verdict.NOT_RUN}
    file.unlink()
    assert set(give(check_of(algorithm), other).values()) == {Verdict.NOT_RUN}


def test_rewards_that_the_algorithm_refuses_give_no_advantages() -> None:
    check = check_of(settings_of(name="gdpo"))
    assert set(give(check, group()).values()) == {Verdict.DIFFERS}
    # as releases wrote it that did not bound rewards
    huge = [group()[0], dataclasses.replace(group()[1], reward=1e308)]
    assert set(give(check_of(settings_of()), huge).values()) == {Verdict.DIFFERS}


def test_half_a_generation_and_the_whole_one_after_it_agree() -> None:
    first, second = group()
    assert set(give(check_of(settings_of()), [first, first, second]).values()) == {Verdict.AGREES}
    assert give(check_of(settings_of()), [first, first]) == {}


def test_a_forged_record_does_not_change_what_the_others_prove() -> None:
    first, second = group()
    forged = dataclasses.replace(second, reward=-3.0)
    for order in ([forged, first, second], [first, forged, second], [first, second, forged]):
        verdicts = give(check_of(settings_of()), order)
        for offset, sample in enumerate(order):
            position = 0, offset, sample.sample_id
            is_forged = sample is forged
            assert is_forged or verdicts[position] is Verdict.AGREES, order
    outside = dataclasses.replace(second, key=dataclasses.replace(second.key, sample_index=7))
    assert set(give(check_of(settings_of()), [outside, first, second]).values()) == {Verdict.AGREES}


def test_arrays_in_the_object_store_are_fetched_one_prompt_group_at_a_time() -> None:
    store = ObjectStore.open("memory://")
    stored = [
        check_in(sample, store, claim_check_threshold_bytes=0) for sample in group((-UNIT, UNIT))
    ]
    assert isinstance(stored[0].advantages, StoredArray)
    assert set(give(check_of(settings_of(), store=store), stored).values()) == {Verdict.AGREES}
    for gone in (None, ObjectStore.open("memory://other")):
        assert give(check_of(settings_of(), store=gone), stored) == {}


def test_prompt_groups_that_never_end_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_advantages, "MAX_HELD_BYTES", 1000)
    check = check_of(settings_of())
    for number in range(100):
        sample = ready(f"{number:06d}-0000-0", 0)
        assert list(check.add(sample, (0, number, sample.sample_id))) == []
    assert check.num_held < 20
    check.forget("000099-0000-0")
    assert set(give(check, group()).values()) == {Verdict.AGREES}
