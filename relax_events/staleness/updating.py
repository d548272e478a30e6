"""Decide when an engine loads a policy version, and which waiting prompt groups it takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol, TypeVar, get_args

WeightUpdateMode = Literal["drain", "in_flight", "recompute"]


class WaitingGroup(Protocol):
    """What the submission of a leased prompt group depends on; see `PromptGroupIssued`."""

    @property
    def train_step(self) -> int: ...  # noqa: D102
    @property
    def group_index(self) -> int: ...  # noqa: D102
    @property
    def required_policy_version(self) -> int: ...  # noqa: D102
    @property
    def samples_per_prompt(self) -> int: ...  # noqa: D102


Group = TypeVar("Group", bound=WaitingGroup)


def may_load(mode: WeightUpdateMode, *, num_running: int) -> bool:
    """Return whether an engine with `num_running` unfinished samples may load a newer version.

    Raises:
        ValueError: The mode is not resolved.
    """
    return not _is_drain(mode) or num_running == 0


def may_submit(mode: WeightUpdateMode, *, published: int, loaded: int, refused: int) -> bool:
    """Return whether an engine may take prompt groups while a version is published.

    With `drain`, a published version stops admission until the running samples have ended and the
    version is loaded, unless the engine could not load it.

    Args:
        mode: Of the run, `run.weight_update_mode`.
        published: Newest published version.
        loaded: The engine's version.
        refused: The last version that the engine failed to load, or -1.
    Raises:
        ValueError: The mode is not resolved.
    """
    return not _is_drain(mode) or published <= loaded or published == refused


def _is_drain(mode: WeightUpdateMode) -> bool:
    if mode not in get_args(WeightUpdateMode):
        raise ValueError(
            f"mode must be one of {get_args(WeightUpdateMode)}, got {mode!r}; set "
            "run.weight_update_mode, or resolve the run file's defaults"
        )
    return mode == "drain"


def choose_submissions(
    waiting: Iterable[Group], *, loaded: int, room: int, num_running: int
) -> list[Group]:
    """Return the waiting prompt groups that an engine may take now, oldest first.

    A prompt group that exceeds the room is passed over, except by an idle engine, which takes it
    alone.

    Args:
        waiting: Leased prompt groups in any order.
        loaded: The engine's version; prompt groups that require a newer one wait.
        room: Samples that the engine may take beyond the running ones.
        num_running: Unfinished samples of the engine.
    """
    chosen: list[Group] = []
    for group in sorted(waiting, key=lambda group: (group.train_step, group.group_index)):
        is_next = group.samples_per_prompt <= room or not (num_running or chosen)
        if is_next and group.required_policy_version <= loaded:
            chosen.append(group)
            room -= group.samples_per_prompt
    return chosen


def count_spare_leases(*, num_groups: int, num_running: int, samples_per_prompt: int) -> int:
    """Return how many more prompt groups an engine can hold, since samples of running prompt groups
    have ended: a prompt group holds its lease until its longest sample has ended.

    Args:
        num_groups: Prompt groups with unfinished samples.
        num_running: Unfinished samples.
        samples_per_prompt: Samples of a prompt group.
    """
    return max(num_groups * samples_per_prompt - num_running, 0) // samples_per_prompt
