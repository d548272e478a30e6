"""The learning rate over a run, worked out by hand."""

import pytest
from event_samples import committed
from small_settings import small_run

from relax_events.config import RunConfig, TrainerConfig
from relax_events.training.backend.learning_rate import (
    compute_policy_learning_rate,
    compute_scheduled_learning_rate,
    holds_policy,
)
from tests.unit.trainer_samples import run_config


def rates(
    schedule: str, warmup_steps: int, steps: range, num_steps: int = 10, least: float = 0.0
) -> list[float]:
    trainer = TrainerConfig(
        learning_rate=1.0,
        warmup_steps=warmup_steps,
        schedule=schedule,
        min_learning_rate_ratio=least,
    )
    return [
        compute_scheduled_learning_rate(trainer, step=step, num_steps=num_steps) for step in steps
    ]


def test_constant_stays_at_the_peak_after_the_warm_up():
    assert rates("constant", 4, range(6)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_the_end_of_the_warm_up_to_one_step_before_zero():
    assert rates("linear", 2, range(10)) == pytest.approx(
        [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    )


def test_linear_keeps_the_last_rate_in_a_run_that_is_trained_longer():
    assert rates("linear", 0, range(9, 12)) == pytest.approx([0.1, 0.1, 0.1])


def test_linear_is_never_above_the_peak_when_the_warm_up_is_the_whole_run():
    assert max(rates("linear", 10, range(10))) <= 1.0


def test_cosine_falls_slowly_then_fast_then_slowly():
    # (1 + cos(pi p)) / 2 at p = 0, 1/4, 1/2, 3/4
    assert rates("cosine", 0, range(4), num_steps=4) == pytest.approx(
        [1.0, 0.853553, 0.5, 0.146447], abs=1e-6
    )


def test_cosine_begins_at_the_end_of_the_warm_up():
    assert rates("cosine", 2, range(6), num_steps=6) == pytest.approx(
        [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6
    )


@pytest.mark.parametrize(
    ("schedule", "last"), [("cosine", 0.1 + 0.9 * 0.146447), ("linear", 0.325)]
)
def test_decay_ends_at_the_minimum(schedule, last):
    found = rates(schedule, 0, range(4), num_steps=4, least=0.1)

    assert found[0] == 1.0
    assert found[-1] == pytest.approx(last, abs=1e-6)


def test_constant_schedule_takes_no_minimum():
    with pytest.raises(ValueError, match=r"min_learning_rate_ratio is 0\.1"):
        TrainerConfig(min_learning_rate_ratio=0.1)


def warm_up_run(name: str, **parent: object) -> RunConfig:
    tree = run_config(
        algorithm={"name": name},
        trainer={"learning_rate": 1.0, "warmup_steps": 2, "schedule": "linear"},
    ).model_dump()
    tree |= {"critic": {"warmup_steps": 2}, "parent": parent}
    tree["run"]["num_steps"] = 6
    return small_run(tree)


def policy_rates(name: str, steps: range, **parent: object) -> list[float]:
    config = warm_up_run(name, **parent)
    return [compute_policy_learning_rate(config, step=step) for step in steps]


def test_policy_warm_up_starts_after_the_critic_warm_up():
    assert policy_rates("ppo", range(6)) == pytest.approx([0, 0, 0.5, 1.0, 1.0, 0.5])
    assert policy_rates("grpo", range(2)) == pytest.approx([0.5, 1.0])


def test_critic_warm_up_restarts_in_a_fork_but_not_in_a_replay():
    assert policy_rates("ppo", range(3, 6), run="other", mode="fork", from_version=3)[:2] == [
        0,
        0,
    ]
    assert policy_rates("ppo", range(3, 6), run="other", from_version=3)[0] > 0


def test_policy_is_held_while_only_the_critic_learns():
    ppo, grpo = (warm_up_run(name).first_policy_step for name in ("ppo", "grpo"))
    assert [holds_policy(ppo, step=step) for step in range(4)] == [True, True, False, False]
    assert not holds_policy(grpo, step=0)


def test_replay_holds_what_was_held_and_trains_what_an_older_release_trained():
    replay = warm_up_run("ppo", run="other").first_policy_step
    for is_held in (True, False):
        recorded = committed(1, update_held=is_held)
        assert holds_policy(replay, step=1, recorded=recorded) == is_held
    assert not holds_policy(replay, step=2, recorded=committed(2, update_held=True))
