"""Hostile replies, completions and rows against the rewards that ask a service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from relax_events.attacks.doors.rewards import build_hostile_samples, build_item, read_reward
from relax_events.attacks.hostile_service import MARK, hostile_service, list_replies
from relax_events.attacks.samples import make_sample
from relax_events.attacks.suite import HELD, Assault, Attack
from relax_events.attacks.targets import Targets
from relax_events.config import RewardConfig
from relax_events.confinement.entry_points import SERVICE_REWARDS, find_reward
from relax_events.rewards.pool import RewardItem, RewardPool

REQUEST_SECONDS = 4.0
TIMEOUT_SECONDS = 20.0
GROUPS = frozenset({"remote_group", "genrm_pairwise"})
"""Score whole prompt groups."""


def judge_assaults() -> Iterator[Assault]:
    """Give the assaults on the rewards that ask a service."""
    for function in SERVICE_REWARDS:
        point = find_reward(function)
        yield Assault(point.name, point.doors, point.profile, partial(_prepare, function))


@contextmanager
def _prepare(function: str, targets: Targets) -> Iterator[list[Attack]]:
    """Score samples whose completions name the service's reply, and hostile samples that it answers
    with a number.
    """
    port = targets.outside["port"]
    by_reply = {name: make_sample(f"{MARK}{name};", "a") for name in list_replies(port)}
    right = make_sample("an answer", "a")
    texts = build_hostile_samples(right, [{"key": "PAYLOAD"}], targets)
    samples = {f"reply: {name}": sample for name, sample in by_reply.items()} | dict(texts)
    items = [
        build_item_of_group(sample, name)
        for name, sample in samples.items()
        for _ in range(2 if function in GROUPS else 1)
    ]
    with hostile_service(port) as url, RewardPool(_configure(function, url)) as pool:
        results = pool.score_batch(items)
    rewards = {item.sample_id: read_reward(r) for item, r in zip(items, results, strict=True)}
    yield [Attack(name, partial(_judge, name, reward)) for name, reward in rewards.items()]


def _configure(function: str, url: str) -> RewardConfig:
    options = {"url": url, "request_seconds": REQUEST_SECONDS, "retries": 0}
    return RewardConfig(
        function=function, options=options, timeout_seconds=TIMEOUT_SECONDS, processes=1
    )


def build_item_of_group(sample: dict[str, object], name: str) -> RewardItem:
    """Return a sample with a prompt group of its own."""
    from dataclasses import replace

    return replace(build_item(sample, name), prompt_group_id=name)


def _judge(name: str, reward: float | None) -> str:
    """A hostile reply must fail its sample; hostile samples may get the service's number."""
    if name.startswith("reply") and reward is not None:
        return f"the sample got {reward:g}"
    return HELD
