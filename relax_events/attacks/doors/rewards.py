"""Hostile completions and rows against the rewards that compute their scores themselves, in the
children of `RewardPool`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import orjson

from relax_events.attacks.completions import completion_attacks
from relax_events.attacks.samples import (
    HONEST,
    IGNORE_TEXTS,
    ROWS,
    TASKS,
    Sample,
    fill,
    fits_a_record,
    generate_samples,
)
from relax_events.attacks.suite import HELD, Assault, Attack, NotPossible
from relax_events.attacks.targets import Targets
from relax_events.config import RewardConfig
from relax_events.confinement.entry_points import GRADED, Door, find_reward
from relax_events.errors import RewardError
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.scores import Score

TIMEOUT_SECONDS = 20.0
CHECK_EVERY = 5
"""So many hostile samples stand between two pairs of a right and a wrong one."""
Result = Score | RewardError


def reward_assaults() -> Iterator[Assault]:
    """Give the assaults on the rewards without a service; `reasoning_gym` has one for each task."""
    for function in HONEST:
        yield _assault(function, partial(_prepare, function))
    for task in TASKS:
        yield _assault("reasoning_gym", partial(_prepare_task, task), part=task)


def _assault(function: str, prepare: Any, part: str = "") -> Assault:
    point = find_reward(function)
    return Assault(point.name, GRADED, point.profile, prepare, part)


def _prepare_task(task: str, targets: Targets) -> Any:
    try:
        right, wrong, rows = generate_samples(task)
    except ModuleNotFoundError as error:
        raise NotPossible(f"{error.name} is not installed") from None
    return _attack("reasoning_gym", right, wrong, rows, targets)


def _prepare(function: str, targets: Targets) -> Any:
    right, wrong = HONEST[function]
    return _attack(function, right, wrong, ROWS.get(function, []), targets)


@contextmanager
def _attack(
    function: str, right: Sample, wrong: Sample, rows: Sequence[Any], targets: Targets
) -> Iterator[list[Attack]]:
    """Score all hostile samples in one batch, right and wrong ones between them, and give the
    attacks with their results.
    """
    samples = build_hostile_samples(right, rows, targets)
    names = list(samples)
    config = RewardConfig(function=function, timeout_seconds=TIMEOUT_SECONDS, processes=1)
    with RewardPool(config) as pool:
        best, worst = _score(pool, [right, wrong])
        batch: list[Sample] = []
        for start in range(0, len(names), CHECK_EVERY):
            batch += [samples[name] for name in names[start : start + CHECK_EVERY]]
            batch += [right, wrong]
        scores = iter(_score(pool, batch))
    attacks = [Attack("an honest answer", partial(_judge_honest, best, worst))]
    for start in range(0, len(names), CHECK_EVERY):
        some = names[start : start + CHECK_EVERY]
        achieved = {name: _judge(name, next(scores), best, function) for name in some}
        achieved[some[-1]] += _judge_next((next(scores), next(scores)), (best, worst))
        attacks += [Attack(name, partial(str, text)) for name, text in achieved.items()]
    yield attacks


def build_hostile_samples(
    right: Sample, rows: Sequence[Any], targets: Targets
) -> Mapping[str, Sample]:
    """Return samples that have each hostile text as completion, as answer and in metadata."""
    texts = completion_attacks(targets.canary, port=targets.outside["port"])
    payloads = {name: text for name, text in texts.items() if fits_a_record(text)}
    samples = {f"completion: {name}": right | {"completion": t} for name, t in payloads.items()}
    samples |= {f"answer: {name}": right | {"answer": text} for name, text in payloads.items()}
    return samples | {
        f"row {number}: {name}": right | {"metadata": fill(row, text)}
        for number, row in enumerate(rows)
        for name, text in payloads.items()
    }


def build_item(sample: Sample, sample_id: str = "attack") -> RewardItem:
    """Return a sample as a pool takes it."""
    return RewardItem(
        sample_id,
        sample["completion"],
        answer=sample["answer"],
        metadata=orjson.dumps(sample["metadata"]).decode(),
        prompt="p",
        turns=(("user", "p"), ("assistant", sample["completion"])),
        environment_rewards=sample.get("environment_rewards", [0.0]),
    )


def _score(pool: RewardPool, samples: Sequence[Sample]) -> list[Result]:
    return pool.score_batch([build_item(sample) for sample in samples])


def read_reward(result: Result) -> float | None:
    """Return a reward, or None of a sample that failed."""
    return result.reward if isinstance(result, Score) else None


def _judge_honest(best: Result, worst: Result) -> str:
    """Without a difference of right and wrong the other attacks say nothing."""
    rewards = read_reward(best), read_reward(worst)
    if rewards[0] is None or rewards[1] is None or rewards[0] <= rewards[1]:
        return f"a right and a wrong answer got {best} and {worst}"
    return HELD


def _judge(name: str, result: Result, best: Result, function: str) -> str:
    is_completion = name.startswith(Door.COMPLETION) and function not in IGNORE_TEXTS
    reward = read_reward(result)
    if is_completion and reward is not None and reward == read_reward(best):
        return "got the score of a right answer. "
    return HELD


def _judge_next(after: tuple[Result, Result], before: tuple[Result, Result]) -> str:
    rewards = [[read_reward(result) for result in results] for results in (after, before)]
    if rewards[0] == rewards[1]:
        return HELD
    return f"a right and a wrong answer after it got {rewards[0]}, and before {rewards[1]}"
