"""Runs that refer to a parent run: their run files, their topics, relabelled rewards, and the
comparison of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from event_samples import committed, ready
from pydantic import ValidationError
from valid_run import MAX_STALENESS, ValidRun

from relax_events.config import AlgorithmConfig, RunConfig
from relax_events.errors import ConfigError
from relax_events.events.parts import FinishReason, TopicOffset
from relax_events.events.types import PromptGroupEnded
from relax_events.history.runs.details import find_missing_record
from relax_events.history.runs.forking import inherited_algorithm
from relax_events.history.runs.replay import first_difference
from relax_events.projections.ledger import Ledger
from relax_events.runtime.run_description import (
    build_run_description,
    is_recorded,
    read_described_config,
)
from relax_events.topics import TopicPlan
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.replay.relabel import (
    AdvantageRelabeller,
    RelabelledReward,
    needs_new_advantages,
    require_recorded_teacher,
)

MakeConfig = Callable[..., RunConfig]
GROUP = "000004-0000-0"


def test_replay_has_a_trainer_and_reads_the_samples_of_its_source(
    make_run_config: MakeConfig,
) -> None:
    config = make_run_config(
        run={"id": "new"}, parent={"run": "old", "from_version": 4, "until_version": 9}
    )
    assert config.roles() == {"controller": 1, "metrics": 1, "trainer": 1}
    assert (config.first_version, config.last_version, config.num_train_steps) == (4, 9, 5)
    plan = TopicPlan.from_config(config)
    for entity in (
        "prompt.groups",
        "rollout.samples",
        "reward.scores",
        "reward.scores.strict",
        "advantage.samples",
        "actor.logprobs",
    ):
        assert plan.topic(entity) == f"relax.old.{entity}"
    for entity in ("control.train-steps", "control.commands", "trainer.dead-letters"):
        assert plan.topic(entity) == f"relax.new.{entity}"
    assert plan.sample_topics() == []
    assert all(
        spec.name.startswith(("relax.new.control.", "relax.new.trainer.")) for spec in plan.specs()
    )


def test_fork_has_every_role_and_its_own_topics(make_run_config: MakeConfig) -> None:
    config = make_run_config(
        run={"id": "new", "num_steps": 30},
        parent={"run": "old", "mode": "fork", "from_version": 12},
    )
    assert {"prompter", "rollout", "reward", "advantage"} <= config.roles().keys()
    assert (config.first_version, config.last_version, config.num_train_steps) == (12, 30, 18)
    assert {spec.name.split(".")[1] for spec in TopicPlan.from_config(config).specs()} == {"new"}


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"parent": {"run": "old", "from_version": 5, "until_version": 5}},
            "until_version must be above parent.from_version = 5, got 5",
        ),
        (
            {"parent": {"run": "old", "follow": True, "scores": "strict"}},
            "are those of a rescoring",
        ),
        (
            {"run": {"id": "old"}, "parent": {"run": "old"}},
            "parent.run must be another run than run.id = 'old'",
        ),
        (
            {
                "run": {"num_steps": 7},
                "parent": {"run": "old", "mode": "fork", "from_version": 7},
            },
            "run.num_steps must be above it, got 7",
        ),
        ({"parent": {"run": "Old One"}}, "should match pattern"),
    ],
)
def test_invalid_parent_settings_are_rejected(
    sections: dict[str, Any], text: str, make_run_config: MakeConfig
) -> None:
    with pytest.raises(ValidationError, match=text):
        make_run_config(**sections)


def test_run_description_restores_the_config_without_secrets(
    make_run_config: MakeConfig,
) -> None:
    broker = {
        "bootstrap_servers": "kafka.example:9092",
        "partitions_per_version": 5,
        "client": {"client.rack": "rack-17"},
    }
    config = make_run_config(
        broker=broker, trainer={"learning_rate": 0.125}, parent={"run": "old", "from_version": 3}
    )
    described = build_run_description(config)
    assert (described.parent_run, described.parent_version) == ("old", 3)
    assert not {"kafka.example", "rack-17", "client"} & set(described.config.split('"'))
    back = read_described_config(described, run_id=config.run.id)
    assert back.model_dump(exclude={"broker"}) == config.model_dump(exclude={"broker"})
    assert TopicPlan.from_config(back) == TopicPlan.from_config(config)
    assert is_recorded(
        dataclasses.replace(described, described_at=1),
        [build_run_description(make_run_config()), described],
    )
    assert not is_recorded(described, [described, build_run_description(make_run_config())])
    assert not is_recorded(described, [])


def test_description_of_an_imported_run_uses_its_own_topics_and_objects(
    make_run_config: MakeConfig,
) -> None:
    config = make_run_config(run={"id": "first"})
    moved = read_described_config(build_run_description(config), run_id="second")
    assert TopicPlan.from_config(moved).topic("rollout.samples") == "relax.second.rollout.samples"
    assert moved.objects_uri == config.objects_uri.replace("/first/", "/second/")
    assert moved.objects.uri_aliases == (config.objects_uri,)


def test_description_of_another_release_reports_the_unknown_key(
    make_run_config: MakeConfig,
) -> None:
    described = build_run_description(make_run_config())
    tree = orjson.loads(described.config)
    tree["run"]["colour"] = "red"
    newer = dataclasses.replace(
        described, config=orjson.dumps(tree).decode(), package_version="9.0"
    )
    with pytest.raises(
        ConfigError, match=r"does not fit this release at run\.colour: .*written by 9\.0"
    ):
        read_described_config(newer, run_id=described.run_id)


def placed(rewards: list[float], **changes: Any) -> list[LocatedSample]:
    return [
        LocatedSample(ready(GROUP, index, of=len(rewards), reward=reward, **changes), 0, index)
        for index, reward in enumerate(rewards)
    ]


def test_relabelling_normalises_recorded_rewards_by_its_own_settings() -> None:
    samples = placed([0.0, 1.0, 0.5, 0.5])
    plain = AdvantageRelabeller(AlgorithmConfig(normalise_std=False), max_new_tokens=8)(
        samples[::-1]
    )
    assert [item.offset for item in plain] == [3, 2, 1, 0]
    assert [item.sample.advantages.tolist() for item in plain] == [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0.5, 0.5],
        [0, 0, -0.5, -0.5],
    ]
    scaled = AdvantageRelabeller(AlgorithmConfig(), max_new_tokens=8)(samples)
    deviation = np.std([0, 1, 0.5, 0.5], ddof=1)
    assert scaled[1].sample.advantages[-1] == pytest.approx(0.5 / deviation, rel=1e-5)


def test_relabelling_uses_the_rewards_of_a_rescoring() -> None:
    rewards = {
        (f"{GROUP}/0", 0, ""): RelabelledReward(3.0),
        (f"{GROUP}/1", 0, ""): RelabelledReward(1.0),
    }
    relabelled = AdvantageRelabeller(
        AlgorithmConfig(normalise_std=False), max_new_tokens=8, rewards=rewards, scores="strict"
    )(placed([0.0, 1.0]))
    assert [item.sample.reward for item in relabelled] == [3.0, 1.0]
    assert [float(item.sample.advantages[-1]) for item in relabelled] == [1.0, -1.0]
    with pytest.raises(
        ConfigError,
        match=rf"sample {GROUP}/1 has no reward under parent.scores = 'strict'; finish the rescoring",
    ):
        AdvantageRelabeller(
            AlgorithmConfig(),
            max_new_tokens=8,
            rewards={(f"{GROUP}/0", 0, ""): RelabelledReward(3.0)},
            scores="strict",
        )(placed([0.0, 1.0]))


def test_relabelling_keeps_samples_without_a_reward_out_of_their_prompt_group() -> None:
    samples = placed([0.0, 1.0, 0.5])
    lost = dataclasses.replace(
        samples[2],
        sample=dataclasses.replace(
            samples[2].sample,
            reward=None,
            finish_reason=FinishReason.LOST,
            advantages=np.zeros(4, np.float32),
        ),
    )
    settings = AlgorithmConfig(normalise_std=False)
    kept = AdvantageRelabeller(settings, max_new_tokens=8)([*samples[:2], lost])
    assert [item.sample.reward for item in kept] == [0.0, 1.0, None]
    assert [float(item.sample.advantages[-1]) for item in kept] == [-0.5, 0.5, 0.0]
    rewards = {(f"{GROUP}/{index}", 0, ""): RelabelledReward(2.0 - index) for index in range(2)}
    rescored = AdvantageRelabeller(settings, max_new_tokens=8, rewards=rewards, scores="strict")(
        [*samples[:2], lost]
    )
    assert [item.sample.reward for item in rescored] == [2.0, 1.0, None]
    assert [float(item.sample.advantages[-1]) for item in rescored] == [0.5, -0.5, 0.0]


def test_relabelling_applies_another_distillation_coefficient() -> None:
    taught = {
        "teacher_logprobs": np.array([0, 0, -1.5, -0.75], np.float32)
    }  # the engine reported -0.5 and -0.25
    relabelled = AdvantageRelabeller(
        AlgorithmConfig(name="opd", distill_coefficient=2.0), max_new_tokens=8
    )(placed([0.0, 1.0], **taught))
    assert [item.sample.advantages.tolist() for item in relabelled] == [[0, 0, -2.0, -1.0]] * 2
    with pytest.raises(
        ConfigError,
        match=rf"prompt group {GROUP} can't be relabelled by opd: sample {GROUP}/0 lacks the teacher's",
    ):
        AdvantageRelabeller(AlgorithmConfig(name="opd"), max_new_tokens=8)(placed([0.0, 1.0]))


def test_replay_without_recorded_teacher_data_is_rejected() -> None:
    def distilling(**settings: Any) -> AlgorithmConfig:
        return AlgorithmConfig.model_validate({"distill_coefficient": 0.5} | settings)

    top = {"distill_tokens": "teacher_topk", "distill_top_k": 8}
    for recorded, wanted in [
        (AlgorithmConfig(), AlgorithmConfig()),
        (distilling(), distilling(distill_placement="advantage")),
        (distilling(**top), distilling(**top | {"distill_top_k": 4, "distill_divergence": "jsd"})),
        (distilling(**top), distilling()),
    ]:
        require_recorded_teacher(recorded, wanted, run_id="old")
    with pytest.raises(
        ConfigError,
        match=r"distill_coefficient = 1 needs the teacher's log-probabilities, and run old was recorded without a teacher",
    ):
        require_recorded_teacher(AlgorithmConfig(), AlgorithmConfig(name="opd"), run_id="old")
    need = r"distill_tokens = 'teacher_topk' with distill_top_k = 8 is not on the log of run old, which has {}; replay with those"
    for recorded, had in [
        (distilling(), "sampled with 0"),
        (distilling(**top | {"distill_tokens": "student_topk"}), "student_topk with 8"),
        (distilling(**top | {"distill_top_k": 7}), "teacher_topk with 7"),
    ]:
        with pytest.raises(ConfigError, match=need.format(had)):
            require_recorded_teacher(recorded, distilling(**top), run_id="old")


def test_new_advantages_are_needed_when_the_algorithm_changes_them() -> None:
    grpo = AlgorithmConfig()
    assert not needs_new_advantages(grpo, AlgorithmConfig(clip_high=0.4, kl_coefficient=0.1))
    assert needs_new_advantages(grpo, AlgorithmConfig(normalise_std=False))
    assert needs_new_advantages(grpo, AlgorithmConfig(std_correction=0))
    assert needs_new_advantages(grpo, AlgorithmConfig(name="gspo"))


@pytest.mark.parametrize(
    ("overrides", "dropped"),
    [
        ([], set()),
        (["algorithm.clip_high=0.3", "algorithm.name=grpo", "algorithm.correction=tis"], set()),
        (["algorithm.correction = 'icepop'"], {"correction_low", "correction_high"}),
        (
            ["algorithm.name=gspo", "algorithm.clip_high=0.3"],
            {"name", "clip_high", "correction", "correction_low", "correction_high"},
        ),
        (["algorithm.name=gspo", "algorithm.name=grpo"], set()),
    ],
)
def test_source_settings_are_inherited_unless_algorithm_or_correction_changes(
    overrides: list[str], dropped: set[str]
) -> None:
    settings = {
        "name": "grpo",
        "clip_high": 0.2,
        "correction": "tis",
        "correction_low": 0.0,
        "correction_high": 2.0,
    }
    assert inherited_algorithm(settings, overrides) == {
        key: value for key, value in settings.items() if key not in dropped
    }


def test_first_difference_of_two_steps_is_reported_ignoring_times() -> None:
    step = committed(
        3,
        sample_ids=["a", "b"],
        metrics={"loss": 0.5, "reward_mean": 1.0},
        phase_seconds={"wait": 1.0},
        committed_at=1,
    )
    assert (
        first_difference(
            step, dataclasses.replace(step, phase_seconds={"wait": 2.0}, committed_at=2)
        )
        == ""
    )
    assert (
        first_difference(
            step, dataclasses.replace(step, metrics={"loss": 0.25, "reward_mean": 1.0})
        )
        == "loss was 0.5, is 0.25"
    )
    assert (
        first_difference(
            step,
            dataclasses.replace(
                step, metrics={"loss": 0.5, "reward_mean": 1.0, "masked_fraction": 0.0}
            ),
        )
        == ""
    )
    assert (
        first_difference(step, dataclasses.replace(step, metrics={"loss": 0.5}))
        == "reward_mean was 1.0, is None"
    )
    assert (
        first_difference(step, dataclasses.replace(step, sample_ids=["b", "a"]))
        == "other samples, or in another order"
    )
    held = dataclasses.replace(step, update_held=True)
    assert first_difference(held, step) == "its update was held, is made"
    assert first_difference(
        step, dataclasses.replace(step, weights_digest=bytes([1] * 32))
    ).startswith("weights digest was 0000")


def test_first_missing_record_of_a_step_is_found() -> None:
    step = committed(
        0, sample_ids=["a", "b", "c"], partitions=np.array([0, 1, 1]), offsets=np.array([9, 4, 3])
    )
    assert find_missing_record(step, {0: 0, 1: 3}) is None
    assert find_missing_record(step, {0: 0, 1: 4}) == (1, 3)
    assert find_missing_record(step, {1: 0}) == (0, 9)


@pytest.fixture
def replayed() -> tuple[ValidRun, Ledger]:
    """Return a source, and the ledger of a replay of its steps 2 to 4 that is at step 4."""
    source = ValidRun(6)
    ledger = Ledger(MAX_STALENESS, first_version=2, last_version=5, is_replay=True)
    for step in source.at("control.train-steps")[2:5]:
        ledger.apply_parent_step(step)
    for entity, first, last in (("control.train-steps", 2, 4), ("control.policy-versions", 2, 5)):
        for offset, event in enumerate(source.at(entity)[first:last]):
            ledger.apply(event, TopicOffset(f"relax.replayed.{entity}", 0, offset))
    for event in source.at("control.prompt-group-outcomes"):
        if isinstance(event, PromptGroupEnded) and event.trainer_version in (2, 3):
            ledger.apply(event, TopicOffset("relax.replayed.control.prompt-group-outcomes", 0, 0))
    return source, ledger


def test_replay_ledger_counts_the_samples_named_by_its_sources_steps(
    replayed: tuple[ValidRun, Ledger],
) -> None:
    _, ledger = replayed
    for _ in range(2):
        totals = ledger.totals()
        assert totals["outcomes"] == {
            "issued": 6,
            "trained": 4,
            "filtered": 0,
            "expired": 0,
            "failed": 0,
            "in_flight": 2,
        }
        assert (totals["samples_rolled_out"], totals["samples_trained"], ledger.problems()) == (
            12,
            8,
            [],
        )
        ledger.finalize(4)


@pytest.mark.parametrize("changes", [{"offsets": np.arange(4)}, {"staleness_counts": [4]}])
def test_ledger_reports_a_replayed_step_with_other_samples_than_its_source(
    replayed: tuple[ValidRun, Ledger], changes: dict[str, Any]
) -> None:
    source, ledger = replayed
    step: Any = source.at("control.train-steps")[4]
    ledger.apply(
        dataclasses.replace(step, **changes),
        TopicOffset("relax.replayed.control.train-steps", 0, 2),
    )
    rules = {finding.rule.value for finding in ledger.findings()}
    assert "replayed train step trained other samples than its source" in rules
