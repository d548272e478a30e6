"""Differences between two rewards are counted, and examples are chosen evenly."""

from __future__ import annotations

import pytest
from small_settings import small_run

from relax_events.config import RewardConfig
from relax_events.config.external_values import Named, Names
from relax_events.errors import RewardError
from relax_events.history.runs.inherited_code import UntrustedSettingsError, require_trusted_reward
from relax_events.rewards.comparison import DifferenceCounts, ReservoirSampler
from relax_events.rewards.scores import Score

FAILED = RewardError("no")


def scored(reward: float) -> Score:
    return Score(reward, {}, 0.0)


@pytest.mark.parametrize(
    ("first", "second", "threshold", "do_differ"),
    [
        (0.1 + 0.2, 0.3, None, False),
        (0.0, 1.0, None, True),
        (-1.0, 0.0, None, True),
        (-1.0, 0.0, 0.5, False),
        (0.5, 0.4, 0.5, True),
    ],
)
def test_rewards_differ_by_value_or_by_side_of_the_threshold(
    first: float, second: float, threshold: float | None, do_differ: bool
) -> None:
    counts = DifferenceCounts()
    assert counts.add(scored(first), scored(second), threshold) is do_differ
    assert (counts.num_agree, counts.num_differ) == (not do_differ, do_differ)
    assert (counts.num_first_higher, counts.num_second_higher) == (
        do_differ and first > second,
        do_differ and second > first,
    )


def test_failed_rewards_count_neither_as_agreeing_nor_as_differing() -> None:
    counts = DifferenceCounts()
    for first, second in ((FAILED, scored(1)), (scored(1), FAILED), (FAILED, FAILED)):
        assert not counts.add(first, second, None)
    assert counts == DifferenceCounts(
        num_samples=3, num_first_failed=2, num_second_failed=2, num_both_failed=1
    )


def test_reservoir_sampler_keeps_all_of_few_items_and_samples_many_uniformly() -> None:
    few, many, none = ReservoirSampler[int](5), ReservoirSampler[int](100), ReservoirSampler[int](0)
    for number in range(3):
        few.add(number)
    for number in range(10_000):
        many.add(number)
        none.add(number)
    assert (few.kept(), none.kept()) == ([0, 1, 2], [])
    sampled = many.kept()
    assert (len(sampled), sampled) == (100, sorted(sampled))
    # Of 100 numbers that are chosen evenly some 50 lie in either half; 25 is five standard
    # deviations away.
    assert 25 <= sum(number < 5_000 for number in sampled) <= 75


def test_reward_from_a_log_is_trusted_if_a_run_file_matches_or_the_user_accepts() -> None:
    def refuse(refused: UntrustedSettingsError) -> None:
        raise refused

    rest = {"model": {"path": "model"}, "data": {"source": "jsonl:rows.jsonl"}}
    tree = rest | {
        "run": {"id": "theirs"},
        "reward": {"function": "remote", "options": {"url": "http://unknown:1"}},
    }
    theirs = small_run(tree)
    assert (
        require_trusted_reward(
            theirs, own=[small_run(tree | {"run": {"id": "mine"}})], accept=refuse
        )
        == theirs.reward
    )
    with pytest.raises(
        UntrustedSettingsError, match="log of run theirs names what would be used here"
    ) as refused:
        require_trusted_reward(theirs, own=[], accept=refuse)
    assert refused.value.named == [Named("reward.options.url", "http://unknown:1", Names.OPTIONS)]
    assert require_trusted_reward(theirs, own=[], accept=lambda _: None) == theirs.reward
    harmless = small_run(rest | {"run": {"id": "theirs"}, "reward": {"function": "math"}})
    assert require_trusted_reward(harmless, own=[], accept=refuse) == RewardConfig.model_validate(
        harmless.reward.model_dump()
    )
