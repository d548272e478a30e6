"""Which complete prompt groups a train step takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SampleOrder = Literal["fifo", "ready_first"]


@dataclass(frozen=True, slots=True, order=True)
class ReadyGroup:
    """A prompt group whose samples are all ready; ordered by the step it was issued for, then by
    its place in it.
    """

    train_step: int
    group_index: int
    attempt: int
    policy_version: int
    prompt_group_id: str


def select_groups(
    ready: Iterable[ReadyGroup], *, trainer_version: int, count: int, order: SampleOrder
) -> list[ReadyGroup]:
    """Return at most `count` prompt groups for the step at `trainer_version`, oldest first.

    `"fifo"` takes only prompt groups that were issued for this step or an earlier one: since
    exactly as many are issued for each step as it takes, none is overtaken and so none expires for
    being slow. `ready_first` takes whatever
    is complete: the step never waits for a straggler, and a straggler may expire.
    """
    eligible = [
        group for group in ready if order == "ready_first" or group.train_step <= trainer_version
    ]
    return sorted(eligible)[:count]
