"""Code of a user that fails in every way against the promises that hold for it as well: the
worker's memory, variables and secrets stay closed, and other samples stay unharmed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from relax_events.attacks import user_code
from relax_events.attacks.doors.environments import (
    SAMPLE_FAILURES,
    Ask,
    open_function,
    open_sessions,
)
from relax_events.attacks.doors.rewards import build_item, read_reward
from relax_events.attacks.samples import make_sample
from relax_events.attacks.suite import HELD, Assault, Attack
from relax_events.attacks.targets import Targets
from relax_events.attacks.user_code import FAILURES, WELL
from relax_events.config import RewardConfig
from relax_events.confinement.entry_points import USER_ENVIRONMENT, USER_REWARD, USER_SESSIONS
from relax_events.rewards.pool import RewardPool

TIMEOUT_SECONDS = 10.0
HONEST_REWARD = 0.5
Open = Callable[[dict[str, Any]], AbstractContextManager[Ask]]


def user_assaults() -> Iterator[Assault]:
    """Give the assaults of a user's code."""
    environments: dict[Any, tuple[Open, dict[str, Any]]] = {
        USER_ENVIRONMENT: (open_function, {"function": f"{user_code.__file__}:reply"}),
        USER_SESSIONS: (
            open_sessions,
            {"function": f"{user_code.__file__}:Session", "interface": "gymnasium"},
        ),
    }
    yield Assault(USER_REWARD.name, USER_REWARD.doors, USER_REWARD.profile, _prepare_reward)
    for point, (open_it, settings) in environments.items():
        prepare = partial(_prepare_environment, open_it, settings)
        yield Assault(point.name, point.doors, point.profile, prepare)


@contextmanager
def _prepare_reward(_: Targets) -> Iterator[list[Attack]]:
    function = f"{user_code.__file__}:score"
    config = RewardConfig(function=function, timeout_seconds=TIMEOUT_SECONDS, processes=1)
    with RewardPool(config) as pool:
        yield [Attack(what, partial(_score, pool, what)) for what in FAILURES]


def _score(pool: RewardPool, what: str) -> str:
    """The failing sample gets no reward, and the samples next to it get theirs."""
    samples = [make_sample(text) for text in (WELL, what, WELL)]
    rewards = [read_reward(one) for one in pool.score_batch([build_item(one) for one in samples])]
    expected = [HONEST_REWARD, None, HONEST_REWARD]
    return HELD if rewards == expected else f"the rewards are {rewards}, and not {expected}"


@contextmanager
def _prepare_environment(
    open_it: Open, settings: dict[str, Any], _: Targets
) -> Iterator[list[Attack]]:
    with open_it(settings | {"timeout_seconds": TIMEOUT_SECONDS}) as ask:
        yield [Attack(what, partial(_play, ask, what)) for what in FAILURES]


def _play(ask: Ask, what: str) -> str:
    """The failing sample gets no reply, and the next one an honest one."""
    try:
        reply = ask(what, {})
        achieved = f"it got the reply {reply[:100]!r}" if reply else HELD
    except SAMPLE_FAILURES:
        achieved = HELD
    except TimeoutError:
        return "the sample hangs"
    try:
        after = ask(WELL, {})
    except (*SAMPLE_FAILURES, TimeoutError) as error:
        return f"{achieved} the next sample failed: {error}"
    return achieved if after == WELL else f"{achieved} the next sample got {after[:100]!r}"
