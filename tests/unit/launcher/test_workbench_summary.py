"""Numbers and findings of what was played on the workbench, on constructed samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from event_samples import issued, rolled_out, scored

from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.launcher.workbench import TriedGroup, TriedSample
from relax_events.launcher.workbench_summary import (
    TokenPrices,
    draw_histogram,
    find_problems,
    summarise,
)


def build_group(
    rewards: Sequence[float | None],
    *,
    reason: FinishReason = FinishReason.STOP,
    error: str = "",
    tools: str = "",
    turns: Sequence[ChatMessage] = (),
) -> TriedGroup:
    samples = [
        TriedSample(
            rolled_out(index=index, finish_reason=reason, error=error, turns=list(turns)),
            replace(
                scored(index=index), reward=reward, error=None if reward is not None else "KeyError"
            ),
            why="",
            prompt="",
            seconds=1.0,
        )
        for index, reward in enumerate(rewards)
    ]
    return TriedGroup(replace(issued(), tools=tools), samples)


def find(*groups: TriedGroup) -> dict[str, str]:
    found = find_problems(groups, max_new_tokens=8, max_context_tokens=64)
    assert not any(one.is_good for one in found)
    return {one.what: one.text for one in found}


def test_healthy_samples_have_no_finding() -> None:
    assert find(build_group([0.0, 1.0]), build_group([1.0, 1.0])) == {}


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], "take easier prompts"),
        ([[0.1, 0.1], [0.1, 0.1], [0.1, 1.0]], "take easier prompts"),
        ([[1.0, 1.0], [1.0, 1.0]], "take harder prompts"),
        ([[0.0, 0.0], [1.0, 1.0]], "raise engine.sampling.temperature"),
    ],
)
def test_equal_rewards_are_found_with_a_remedy(rewards: list[list[float]], text: str) -> None:
    assert text in find(*map(build_group, rewards))["rewards"]


def test_half_of_the_prompt_groups_may_have_equal_rewards() -> None:
    assert "rewards" not in find(build_group([0.0, 0.0]), build_group([0.0, 1.0]))


def test_cut_off_samples_are_found_by_the_bound_that_they_met() -> None:
    cut = build_group([0.0, 1.0], reason=FinishReason.LENGTH)
    assert "engine.sampling.max_new_tokens = 8" in find(cut)["lengths"]
    num_tokens = len(cut.samples[0].sample.tokens)
    (found,) = find_problems([cut], max_new_tokens=8, max_context_tokens=num_tokens)
    assert f"raise engine.max_context_tokens = {num_tokens}" in found.text


def test_late_and_lost_samples_errors_of_the_reward_and_refused_prompts_are_found() -> None:
    assert (
        "too slow"
        in find(build_group([0.0, 1.0], reason=FinishReason.LATE, error="too slow"))["environment"]
    )
    lost = build_group([0.0, 1.0], reason=FinishReason.LOST, error="gone")
    assert find(lost)["samples"].endswith("the first: gone")
    assert "1 of 2 samples could not be scored" in find(build_group([None, 1.0]))["reward"]
    refused = TriedGroup(issued(), failure="does not show tools", cause="refused")
    assert find(refused, build_group([0.0, 1.0])).keys() == {"prompts"}
    gone = TriedGroup(issued(), failure="the connection is refused", cause="lost")
    assert find(gone, build_group([0.0, 1.0])).keys() == {"samples"}


def test_prompts_that_the_time_limit_stopped_are_found_and_not_lost() -> None:
    stopped = TriedGroup(issued(), failure="0 of 2 samples had ended", cause="stopped")
    groups = [build_group([0.0, 1.0]), stopped]
    bounds: dict[str, Any] = {"max_new_tokens": 8, "max_context_tokens": 64, "num_asked": 3}
    (one,) = find_problems(groups, max_seconds=9.0, **bounds)
    assert one.what == "time"
    assert one.text.startswith("1 of 3 prompts ended within 9 s: raise --seconds")
    assert find_problems(groups, **bounds) == [], "Ctrl-C ended it"


def test_tools_that_no_sample_used_are_found() -> None:
    tools = '[{"type":"function","function":{"name":"f"}}]'
    assert "none of 2 samples" in find(build_group([0.0, 1.0], tools=tools))["tools"]
    turns = [ChatMessage.of_text("assistant", "f()"), ChatMessage.of_text("tool", "1")]
    assert "tools" not in find(build_group([0.0, 1.0], tools=tools, turns=turns))


def test_numbers_are_those_of_the_samples() -> None:
    groups = [build_group([0.0, 1.0]), build_group([1.0, 1.0]), build_group([None, 0.0])]
    one = summarise(groups, model="m", seconds=2.0, num_asked=3, prices=TokenPrices(1.0, 2.0))
    assert (one.num_samples, one.num_scored, one.num_reward_errors) == (6, 5, 1)
    assert one.reward_mean == pytest.approx(0.6)
    assert one.reward_spread == pytest.approx(0.24**0.5)
    # means 0.5, 1, 0: deviation with n - 1 is 0.5
    assert one.reward_stderr == pytest.approx(0.5 / 3**0.5)
    assert (one.num_equal, one.num_compared) == (1, 2)
    assert one.num_sampled_tokens == 12
    assert one.cost == pytest.approx((one.num_prompt_tokens + 24) / 1e6)
    billed = summarise(
        groups, model="m", seconds=2.0, num_asked=3, prices=TokenPrices(1.0, 2.0), billed=(3, 5)
    )
    assert billed.cost == pytest.approx(13e-6)


def test_histogram_counts_each_reward_once() -> None:
    assert [line.split()[-1] for line in draw_histogram([0.0, 1.0, 1.0])] == ["1", "2"]
    lines = draw_histogram([number / 100 for number in range(101)])
    assert len(lines) == 8
    assert sum(int(line.split()[-1]) for line in lines) == 101
    assert draw_histogram([]) == []
