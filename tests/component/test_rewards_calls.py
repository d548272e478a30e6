"""Reward functions for whole prompt groups, and with several calls at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_events.config import RewardConfig
from relax_events.errors import ConfigError, RewardError
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.scores import Score

pytestmark = pytest.mark.unit
USER_FILE = """
import asyncio, itertools, os, threading

BARRIER, CALLS = {}, itertools.count()

def rank(completions, *, answer, metadata, prompt):
    if "hang" in completions:
        threading.Event().wait()
    if "short" in completions:
        return [1.0]
    if "one" in completions:
        return [ValueError("no opinion") if one == "one" else 1.0 for one in completions]
    order = sorted(completions)
    return [{"rank": order.index(one), "size": len(completions)} for one in completions]

def holes(completions, *, answer, metadata, prompt):
    return [{"none": None, "nan": float("nan")}.get(one, float(len(one))) for one in completions]

def short(completion):
    return float(len(completion))

def by_turn(completion, *, answer, metadata, prompt, turns, token_ids):
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    return {"reward": float(said[-1] == completion), "turn_rewards": [float(len(text)) for text in said], "token_rewards": token_ids}

def ranked_by_turn(completions, *, answer, metadata, prompt, turns):
    return [{"turn_rewards": [len(said)] * 2} for said in turns]

async def meet(completion, *, answer, metadata, prompt):
    if completion == "block":
        threading.Event().wait()
    if completion == "sleep":
        await asyncio.Event().wait()
    if completion == "raise":
        raise KeyError("colour")
    if completion == "leave":
        os._exit(9)
    if completion == "meet":
        barrier = BARRIER.setdefault("all", asyncio.Barrier(4))
        await barrier.wait()
        return float(next(CALLS))
    return float(completion == answer)
"""


@pytest.fixture
def pool_of(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    """Return what opens a pool for a function of the file; all are closed at the end."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    opened: list[RewardPool] = []

    def open_pool(function: str, **settings: Any) -> RewardPool:
        opened.append(
            RewardPool(
                RewardConfig(
                    function=f"{tmp_path / 'mine.py'}:{function}",
                    **({"timeout_seconds": 100.0} | settings),
                )
            )
        )
        return opened[-1]

    yield open_pool
    for pool in opened:
        pool.close()


def prompt_group(name: str, *completions: str) -> list[RewardItem]:
    return [
        RewardItem(f"{name}/{index}", text, "good", prompt_group_id=name)
        for index, text in enumerate(completions)
    ]


def test_reward_function_with_turns_parameter_may_reward_each_turn(
    pool_of: Callable[..., RewardPool],
) -> None:
    said = [("assistant", "abc"), ("user", "continue"), ("assistant", "de")]
    items = [
        RewardItem("a", "de", turns=said, token_ids=np.array([3, 1], np.int32)),
        RewardItem("b", "four"),
    ]
    both, lone = pool_of("by_turn").score_batch(items)
    assert isinstance(both, Score)
    assert isinstance(lone, Score)
    assert (both.reward, both.turn_rewards, both.token_rewards) == (
        1 + 5 + 4,
        (3.0, 2.0),
        (3.0, 1.0),
    )
    assert (lone.reward, lone.turn_rewards, lone.token_rewards) == (5.0, (4.0,), None)
    pool = pool_of("ranked_by_turn")
    assert pool.optional_arguments == ["turns"]
    given = [
        RewardItem(name, "de", prompt_group_id="g", turns=turns)
        for name, turns in (("a", said), ("b", said[:1]))
    ]
    assert rewards(pool.score_batch(given)) == [6.0, 2.0]


def test_reward_function_with_one_parameter_is_called_with_the_completion_alone(
    pool_of: Callable[..., RewardPool],
) -> None:
    items = [RewardItem("a", "four", "answer", prompt="why"), RewardItem("b", "")]
    assert rewards(pool_of("short").score_batch(items)) == [4.0, 0.0]


def rewards(results: list[Score | RewardError]) -> list[float | None]:
    return [result.reward if isinstance(result, Score) else None for result in results]


def errors(results: list[Score | RewardError]) -> list[str]:
    return [
        str(result).partition(" ")[2].partition(" ")[2].partition(" ")[2]
        for result in results
        if isinstance(result, RewardError)
    ]


def test_pool_gives_a_function_the_whole_prompt_group(pool_of: Callable[..., RewardPool]) -> None:
    pool = pool_of("rank", weights={"rank": 1.0}, processes=2)
    results = pool.score_batch(
        [*prompt_group("a", "z", "y", "x"), *prompt_group("b", "k"), *prompt_group("c", "m", "n")]
    )
    assert pool.takes_prompt_group
    assert rewards(results) == [2.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert [result.components["size"] for result in results if isinstance(result, Score)] == [
        3,
        3,
        3,
        1,
        2,
        2,
    ]


def test_reward_failure_affects_only_its_prompt_group_or_sample(
    pool_of: Callable[..., RewardPool],
) -> None:
    batch = [
        *prompt_group("a", "z", "y"),
        *prompt_group("b", "hang", "y"),
        *prompt_group("c", "short", "y"),
        *prompt_group("d", "one", "two"),
    ]
    results = pool_of("rank", timeout_seconds=6).score_batch(batch)
    assert rewards(results) == [3.0, 2.0, None, None, None, None, None, 1.0]
    texts = errors(results)
    assert texts[0] == "took longer than 6 s (reward.timeout_seconds) on sample b/0"
    assert texts[2] == (
        "returned 1 elements; for a prompt group of 2 samples it must return a list of 2 on "
        "sample c/0"
    )
    assert texts[4] == "failed: no opinion on sample d/0"


def test_reward_that_is_missing_or_no_number_is_named_and_others_are_scored(
    pool_of: Callable[..., RewardPool],
) -> None:
    results = pool_of("holes").score_batch(
        [
            *prompt_group("a", "z", "yy"),
            *prompt_group("b", "none", "yy"),
            *prompt_group("c", "nan", "yy"),
            *prompt_group("d", "x", "yyy"),
        ]
    )
    numbers = rewards(results)
    assert (numbers[:2], numbers[2], numbers[4], numbers[6:]) == (
        [1.0, 2.0],
        None,
        None,
        [1.0, 3.0],
    )
    texts = errors(results)
    without_reward = "returned None, so the sample has no reward and is not trained; "
    assert any(text.startswith(without_reward) and "b/0" in text for text in texts), texts
    assert any("nan" in text and "c/0" in text for text in texts), texts


def test_pool_runs_several_coroutine_calls_concurrently(
    pool_of: Callable[..., RewardPool],
) -> None:
    results = pool_of("meet", concurrency=4, processes=1).score_batch(
        [RewardItem(str(index), "meet") for index in range(8)]
    )
    assert sorted(reward for reward in rewards(results) if reward is not None) == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
    ]


def test_coroutine_timeout_fails_only_its_own_sample(pool_of: Callable[..., RewardPool]) -> None:
    results = pool_of("meet", concurrency=3, timeout_seconds=6).score_batch(
        [
            RewardItem(text, text, "good")
            for text in ("good", "sleep", "raise", "bad", "sleep", "good")
        ]
    )
    assert rewards(results) == [1.0, None, None, 0.0, None, 1.0]
    assert errors(results)[0] == "took longer than 6 s (reward.timeout_seconds) on sample sleep"


@pytest.mark.parametrize("culprit", ["block", "leave"])
def test_pool_identifies_which_concurrent_call_killed_the_child(
    pool_of: Callable[..., RewardPool], culprit: str
) -> None:
    batch = [RewardItem(f"{index}", "good", "good") for index in range(5)]
    batch[3] = RewardItem("3", culprit)
    pool = pool_of("meet", concurrency=5, timeout_seconds=6)
    results = pool.score_batch(batch)
    assert rewards(results) == [1.0, 1.0, 1.0, None, 1.0]
    assert errors(results)[0].endswith("on sample 3")


def test_pool_routes_samples_to_the_function_of_their_source(
    pool_of: Callable[..., RewardPool], tmp_path: Path
) -> None:
    (tmp_path / "other.py").write_text(
        "def length(completion, *, answer, metadata, prompt, scale: float = 1.0):\n    "
        "return {'long': len(completion) * scale}\n"
        "def zero(completion, *, answer, metadata, prompt):\n    return 0\n"
    )
    length = {
        "function": f"{tmp_path / 'other.py'}:length",
        "options": {"scale": 2},
        "weights": {"long": 10},
    }
    settings = {
        "function": f"{tmp_path / 'other.py'}:zero",
        "routes": {"books": length},
        "route_key": "from",
    }
    batch = [
        RewardItem(str(index), "abc", metadata=text)
        for index, text in enumerate(
            ['{"from": "books"}', '{"from": "films"}', "{}", '{"from": [1]}']
        )
    ]
    with (
        RewardPool(RewardConfig.model_validate(settings)) as pool,
        RewardPool(RewardConfig.model_validate({**settings, "routes": {}})) as plain,
    ):
        assert rewards(pool.score_batch(batch)) == [60.0, 0.0, 0.0, 0.0]
        assert pool.name == f"{tmp_path / 'other.py'}:zero; books: {tmp_path / 'other.py'}:length"
        assert len(pool.digest) == 64
        assert pool.digest != plain.digest


def test_reward_functions_of_a_run_must_share_one_calling_convention(
    pool_of: Callable[..., RewardPool],
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"rank takes whole prompt groups, unlike exact_match; .* see reward.routes",
    ):
        pool_of("rank", routes={"books": {"function": "exact_match"}})
    with pytest.raises(ConfigError, match=r"meet is async def, unlike exact_match"):
        pool_of("meet", routes={"books": {"function": "exact_match"}})
