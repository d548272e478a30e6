"""Decide which prompt groups may be issued, from the issued prompt groups and their outcomes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from relax_events.errors import CorruptRecord
from relax_events.events.parts import Outcome
from relax_events.events.types import PromptGroupEnded

ID_PATTERN = re.compile("([0-9]{6,12})-([0-9]{4,12})-([0-9]{1,12})")
NUM_REMEMBERED_IDS = 1024
"""The records of a prompt group come together, and each names it several times."""
FIRST_EXTERNAL_INDEX = 1_000_000
"""The first `group_index` of external prompt groups. It exceeds the size of every train batch."""


@dataclass(frozen=True, slots=True, order=True)
class BatchSlot:
    """A slot in a train step's batch."""

    train_step: int
    group_index: int


@dataclass(frozen=True, slots=True)
class IssuedGroup:
    """A prompt group as it was issued: its batch slot, the attempt, and its row in the prompt
    stream.
    """

    slot: BatchSlot
    attempt: int
    row: int

    @property
    def prompt_group_id(self) -> str:
        """Return the derived id: the same slot and attempt always give the same id."""
        return f"{self.slot.train_step:06d}-{self.slot.group_index:04d}-{self.attempt}"

    @classmethod
    def parse(cls, prompt_group_id: str) -> IssuedGroup:
        """Parse batch slot and attempt from an id, which does not contain the row: it becomes -1.

        Raises:
            CorruptRecord: The text is not a prompt group id.
        """
        return _parse(prompt_group_id)


@lru_cache(maxsize=NUM_REMEMBERED_IDS)
def _parse(prompt_group_id: str) -> IssuedGroup:
    match = ID_PATTERN.fullmatch(prompt_group_id)
    group = match and IssuedGroup(BatchSlot(int(match[1]), int(match[2])), int(match[3]), -1)
    if group is None or group.prompt_group_id != prompt_group_id:
        raise CorruptRecord(
            f"{prompt_group_id[:64]!r} is not a prompt group id; an example is 000012-0003-0"
        )
    return group


def is_external(prompt_group_id: str) -> bool:
    """Return whether a prompt group was issued by a producer other than the prompter.

    An external prompt group is generated and scored, never trained. A text that is not a prompt
    group id is not external.
    """
    match = ID_PATTERN.fullmatch(prompt_group_id)
    return match is not None and int(match[2]) >= FIRST_EXTERNAL_INDEX


def build_group_end(
    prompt_group_id: str,
    outcome: Outcome,
    *,
    policy_version: int,
    trainer_version: int,
    reason: str = "",
    mean_reward: float | None = None,
) -> PromptGroupEnded:
    """Build the end of a prompt group of which only the id is known; its row is -1.

    Raises:
        CorruptRecord: The text is not a prompt group id.
    """
    group = IssuedGroup.parse(prompt_group_id)
    return PromptGroupEnded(
        prompt_group_id=prompt_group_id,
        train_step=group.slot.train_step,
        group_index=group.slot.group_index,
        attempt=group.attempt,
        row=group.row,
        outcome=outcome,
        reason=reason,
        policy_version=policy_version,
        trainer_version=trainer_version,
        mean_reward=mean_reward,
    )


def admitted_steps(published_version: int, *, max_staleness: int, num_steps: int) -> range:
    """Return the train steps whose prompt groups may be issued once `published_version` is
    published.

    Step s is admitted when version s - max_staleness is published: a sample that starts on that
    version is then at most max_staleness behind when step s trains it. Before the first version no
    step is admitted.
    """
    return range(
        0 if published_version < 0 else min(published_version + max_staleness + 1, num_steps)
    )


def find_unissued_slots(
    issued: Iterable[BatchSlot], *, steps: range, prompts_per_step: int
) -> list[BatchSlot]:
    """Return the batch slots of the admitted steps for which no prompt group was ever issued, in
    order.
    """
    used = set(issued)
    return [
        slot
        for step in steps
        for index in range(prompts_per_step)
        if (slot := BatchSlot(step, index)) not in used
    ]


def build_reissue(ended: IssuedGroup, *, outcome: Outcome, next_row: int) -> IssuedGroup | None:
    """Return the next attempt for the batch slot of an untrained prompt group, or None if it was
    trained.

    An expired prompt group is issued again with the same prompt, so that slow prompts are not
    selected against. After a filtered or failed one, the slot gets the next prompt of the stream.
    """
    if outcome is Outcome.TRAINED:
        return None
    row = ended.row if outcome is Outcome.EXPIRED else next_row
    return IssuedGroup(ended.slot, ended.attempt + 1, row)
