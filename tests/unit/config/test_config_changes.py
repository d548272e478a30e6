"""Which settings of a run file may change between the sessions of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from relax_events.config import RunConfig
from relax_events.config.loading import _known_keys
from relax_events.config.resume_rules import Rule
from relax_events.config.session_changes import find_rule, list_rules
from relax_events.errors import ConfigError
from relax_events.runtime.run_description import build_run_description
from relax_events.session.resume import (
    ChangesNotAccepted,
    find_changes,
    refuse_changes,
    settings_history,
)

MakeRunConfig = Callable[..., RunConfig]


def rules(old: RunConfig, new: RunConfig) -> dict[str, Rule]:
    return {change.key: change.rule for change in find_changes(build_run_description(old), new)}


def test_every_key_has_a_rule_and_every_rule_a_key() -> None:
    assert {key for key, _ in list_rules()} <= set(_known_keys(RunConfig))
    for key in _known_keys(RunConfig):
        assert find_rule(key).effect


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("run.id", Rule.NEVER),  # that of the section
        ("run.num_steps", Rule.FREE),
        ("trainer.optimizer_options.momentum", Rule.ACCEPTED),  # within a key
        ("judge.engine.threads", Rule.FREE),
        ("judge.engine.sampling.top_p", Rule.ACCEPTED),  # of the section around the section
        ("teachers.math.device", Rule.ACCEPTED),  # tables by name change as a whole
    ],
)
def test_innermost_rule_around_a_key_holds(key: str, rule: Rule) -> None:
    assert find_rule(key).rule is rule


def test_key_of_no_section_has_no_rule() -> None:
    with pytest.raises(ValueError, match="no section of a run file holds the key absent"):
        find_rule("absent.key")


def test_identical_run_files_have_no_changes(make_run_config: MakeRunConfig) -> None:
    assert (
        rules(
            make_run_config(reward={"options": {"a": 1}}),
            make_run_config(reward={"options": {"a": 1}}),
        )
        == {}
    )


def test_raising_num_steps_is_free_and_lowering_it_needs_acceptance(
    make_run_config: MakeRunConfig,
) -> None:
    short, long = make_run_config(run={"num_steps": 10}), make_run_config(run={"num_steps": 20})
    assert rules(short, long) == {"run.num_steps": Rule.FREE}
    assert rules(long, short) == {"run.num_steps": Rule.ACCEPTED}


@pytest.mark.parametrize(
    ("section", "key", "value", "rule"),
    [
        ("run", "prompts_per_step", 8, Rule.NEVER),
        ("run", "samples_per_prompt", 4, Rule.NEVER),
        ("run", "seed", 7, Rule.NEVER),
        ("run", "max_staleness", 3, Rule.NEVER),
        ("broker", "partitions_per_version", 4, Rule.NEVER),
        ("data", "source", "jsonl:others", Rule.NEVER),
        ("trainer", "learning_rate", 0.5, Rule.ACCEPTED),
        ("reward", "options", {"case": "ignored"}, Rule.ACCEPTED),
        ("workers", "rollout", 2, Rule.FREE),
        ("trainer", "checkpoint_every", 3, Rule.FREE),
    ],
)
def test_changed_key_is_classified_by_its_rule(
    make_run_config: MakeRunConfig, section: str, key: str, value: object, rule: Rule
) -> None:
    (found,) = rules(make_run_config(), make_run_config(**{section: {key: value}})).items()
    assert found[0].startswith(f"{section}.{key}")
    assert found[1] is rule


def test_change_that_adds_a_role_is_rejected(make_run_config: MakeRunConfig) -> None:
    without, with_reference = (
        make_run_config(algorithm={"kl_coefficient": value}) for value in (0.0, 0.1)
    )
    assert with_reference.roles().keys() - without.roles().keys() == {"reference"}
    assert rules(without, with_reference) == {
        "algorithm.kl_coefficient": Rule.ACCEPTED,
        "roles": Rule.NEVER,
    }


def test_rejection_names_keys_values_and_the_remedy(make_run_config: MakeRunConfig) -> None:
    old, new = (
        make_run_config(),
        make_run_config(run={"prompts_per_step": 8}, trainer={"learning_rate": 0.5}),
    )
    changes = find_changes(build_run_description(old), new)
    with pytest.raises(
        ConfigError,
        match=r"relax runs fork mine NEW_ID run.prompts_per_step=8\n  run.prompts_per_step: 16 -> 8  \(",
    ) as refused:
        refuse_changes("mine", changes, is_accepted=True)
    assert not isinstance(refused.value, ChangesNotAccepted)


def test_training_change_is_rejected_unless_accepted(
    make_run_config: MakeRunConfig,
) -> None:
    changes = find_changes(
        build_run_description(make_run_config(trainer={"learning_rate": 0.25})),
        make_run_config(trainer={"learning_rate": 0.5}),
    )
    with pytest.raises(
        ChangesNotAccepted, match=r"--accept-changes(.|\n)*trainer.learning_rate: 0.25 -> 0.5"
    ):
        refuse_changes("mine", changes, is_accepted=False)
    refuse_changes("mine", changes, is_accepted=True)


def test_settings_history_names_the_version_of_each_change(make_run_config: MakeRunConfig) -> None:
    first = make_run_config(trainer={"learning_rate": 0.25})
    second = make_run_config(trainer={"learning_rate": 0.5})
    reported = [
        build_run_description(first),
        dataclasses.replace(build_run_description(first, from_version=4), package_version="other"),
        build_run_description(second, from_version=7),
    ]
    ((version, changes),) = settings_history(reported, run_id=first.run.id)
    assert (version, [str(change) for change in changes]) == (
        7,
        ["trainer.learning_rate: 0.25 -> 0.5"],
    )
