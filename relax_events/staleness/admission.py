"""Decide which prompt groups may be issued, from the issued prompt groups and their outcomes."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from relax_events.errors import CorruptRecord
from relax_events.events.parts import Outcome
from relax_events.events.types import PromptGroupEnded

ID_PATTERN = re.compile("([0-9]{6,12})-([0-9]{4,12})-([0-9]{1,12})")
NUM_REMEMBERED_IDS = 1024
"""The records of a prompt group come together, and each names it several times."""
FIRST_EXTERNAL_INDEX = 1_000_000
"""The first `group_index` of external prompt groups. It exceeds the size of every train batch."""
SLOTS_PER_PROMPT = 16
"""Batch slots of a train step, in multiples of `run.prompts_per_step`: those behind the first are
spares."""
NUM_DEVIATIONS = 2.0
"""Margin of the spares, in standard deviations of the number of prompt groups that pass."""
MAX_MARGIN = 0.25
"""Largest margin, as a share of what is needed: few prompt groups would get many spares."""
MIN_RATIO_STEPS, MIN_RATIO_GROUPS = 4, 256
"""Train steps and prompt groups that the measured pass ratio covers at least."""


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


def count_missing(
    rounds: Sequence[tuple[int, int]],
    *,
    prompts_per_step: int,
    pass_ratio: float,
    num_measured: int,
) -> int:
    """Return how many more prompt groups to issue, so that a train step gets its batch.

    After that at least `prompts_per_step` have not ended. At a pass ratio of 1 exactly as many are.
    The margin of `NUM_DEVIATIONS` counts those that pass, and the measured ratio, as random.

    Args:
        rounds: (issued, ended untrained) prompt groups: the first ones, then those that replaced
            others, and so on.
        prompts_per_step: Prompt groups of a batch.
        pass_ratio: Expected share of prompt groups that can be trained, above 0.
        num_measured: Trained prompt groups by which it was measured. If 0, it is a guess that can
            only be too high, and what is in flight must reach the margin too.
    """
    *earlier, (issued, ended) = rounds or [(0, 0)]
    needed = prompts_per_step - sum(
        min(number * pass_ratio, number - num_ended) for number, num_ended in earlier
    )
    lacking = needed - min(issued * pass_ratio, issued - ended)
    if lacking < 1 and num_measured:
        return 0
    needed = max(needed, 0.0)
    variance = needed * (1 - pass_ratio) * (1 + needed / (num_measured or math.inf))
    margin = min(NUM_DEVIATIONS * math.sqrt(variance), needed * MAX_MARGIN)
    return max(int((lacking + margin) / pass_ratio), 0)


@dataclass(slots=True)
class _SlotState:
    """The newest prompt group of a batch slot."""

    group: IssuedGroup
    outcome: Outcome | None = None


@dataclass(slots=True)
class _StepSlots:
    """The issued batch slots of a train step, and their numbers by attempt."""

    states: dict[int, _SlotState] = field(default_factory=dict)
    num_issued: Counter[int] = field(default_factory=Counter)
    num_ended: Counter[int] = field(default_factory=Counter)
    stop: int = 0
    holes: set[int] = field(default_factory=set)
    """Indexes below `stop` that are not issued."""
    trained: set[int] = field(default_factory=set)

    def add(self, group: IssuedGroup) -> None:
        """Add a prompt group, in the place of an earlier attempt."""
        index, former = group.slot.group_index, self.states.get(group.slot.group_index)
        if former is not None:
            if former.group.attempt >= group.attempt:
                return
            self.num_issued[former.group.attempt] -= 1
            self.num_ended[former.group.attempt] -= former.outcome is not None
        self.states[index] = _SlotState(group)
        self.num_issued[group.attempt] += 1
        self.holes.discard(index)
        self.holes.update(range(self.stop, index))
        self.stop = max(self.stop, index + 1)

    def end(self, group: IssuedGroup, outcome: Outcome) -> None:
        """Apply the outcome of an untrained prompt group, unless its slot has a later attempt."""
        state = self.states.get(group.slot.group_index)
        if state is not None and state.group.attempt == group.attempt and state.outcome is None:
            state.outcome = outcome
            self.num_ended[group.attempt] += 1

    def count_missing(self, *, prompts_per_step: int, pass_ratio: float, num_measured: int) -> int:
        """See the function. Of the first ones, no larger share passes than has not ended so far;
        one more counts as not ended, since a few say little.
        """
        rounds = [
            (number, self.num_ended[attempt])
            for attempt, number in sorted(self.num_issued.items())
            if number
        ]
        issued, ended = rounds[0] if rounds else (0, 0)
        return count_missing(
            rounds,
            prompts_per_step=prompts_per_step,
            pass_ratio=max(min(pass_ratio, 1 - ended / (issued + 1)), 1 / SLOTS_PER_PROMPT),
            num_measured=num_measured,
        )


class BatchSupply:
    """The batch slots of the train steps that are not trained yet, under the order `fifo`.

    A step trains the first `prompts_per_step` prompt groups that can be trained, by their index.
    Indexes are issued without a gap, and a prompt group that can't be trained is replaced at the
    next index. Rows behind the last trained index are issued again, for a later step.
    """

    def __init__(
        self, *, prompts_per_step: int, first_step: int, returns_filtered: bool = False
    ) -> None:
        """Start with no step issued.

        Args:
            prompts_per_step: Prompt groups of a batch.
            first_step: First train step of the run.
            returns_filtered: Whether rows behind the last trained index are also issued again if
                they were filtered or failed: then the prompts of a step do not depend on how many
                were issued ahead.
        """
        self._size, self._returns_filtered = prompts_per_step, returns_filtered
        self.open_step = first_step
        """First step whose batch is not trained."""
        self._steps: dict[int, _StepSlots] = {}
        self._newest_slot: dict[int, BatchSlot] = {}
        """Of the rows of those steps."""
        num_steps = max(MIN_RATIO_STEPS, -(-MIN_RATIO_GROUPS // prompts_per_step))
        self.slots_used: deque[int] = deque(maxlen=num_steps)
        """Batch slots that each of the newest complete steps took, without unused spares."""
        self.returned_rows: set[int] = set()

    @property
    def pass_ratio(self) -> float:
        """Share of prompt groups that could be trained in the newest complete steps; 1 before."""
        num_used = sum(self.slots_used)
        return self._size * len(self.slots_used) / num_used if num_used else 1.0

    @property
    def is_between_steps(self) -> bool:
        """Whether of each step the outcomes of all trained prompt groups were applied, or none."""
        return not any(slots.trained for slots in self._steps.values())

    @property
    def ended(self) -> dict[str, int]:
        """Rows of the prompt groups of open steps that were filtered or failed, by id."""
        return {
            state.group.prompt_group_id: state.group.row
            for slots in self._steps.values()
            for state in slots.states.values()
            if state.outcome in (Outcome.FILTERED, Outcome.FAILED)
        }

    def add(self, group: IssuedGroup) -> None:
        """Add a prompt group that was issued, or is about to be."""
        self.returned_rows.discard(group.row)
        if group.slot.train_step >= self.open_step:
            self._steps.setdefault(group.slot.train_step, _StepSlots()).add(group)
            former = self._newest_slot.get(group.row, group.slot)
            self._newest_slot[group.row] = max(former, group.slot)

    def end(self, group: IssuedGroup, outcome: Outcome) -> None:
        """Apply the outcome of an untrained prompt group."""
        if (slots := self._steps.get(group.slot.train_step)) is not None:
            slots.end(group, outcome)

    def train(self, slot: BatchSlot) -> bool:
        """Apply that the prompt group of a batch slot was trained; return whether its step is
        complete now.
        """
        if slot.train_step < self.open_step:
            return False
        trained = self._steps.setdefault(slot.train_step, _StepSlots()).trained
        trained.add(slot.group_index)
        if len(trained) < self._size:
            return False
        self.slots_used.append(max(trained) + 1)
        for step in range(self.open_step, slot.train_step + 1):
            for state in self._steps.pop(step, _StepSlots()).states.values():
                self._forget(state, last_index=max(trained))
        self.open_step = slot.train_step + 1
        return True

    def _forget(self, state: _SlotState, *, last_index: int) -> None:
        """Drop a batch slot of a complete step; its row is to be issued again if it is behind the
        last trained one, and was not issued again yet.
        """
        group = state.group
        if self._newest_slot.get(group.row) != group.slot:
            return
        del self._newest_slot[group.row]
        is_final = state.outcome in (Outcome.FILTERED, Outcome.FAILED)
        if group.slot.group_index > last_index and (self._returns_filtered or not is_final):
            self.returned_rows.add(group.row)

    def find_empty_slots(self, step: int, *, uses_spares: bool) -> list[BatchSlot]:
        """Return the batch slots for which a prompt group is to be issued now, in order: those that
        a step lacks, and the ones that a crash left out.

        Args:
            step: An admitted train step that is not complete.
            uses_spares: Whether the trainer takes prompt groups of spare slots.
        """
        slots = self._steps.get(step) or _StepSlots()
        stop = self._size
        if uses_spares:
            num_added = max(self._count_missing(slots) - len(slots.holes), 0)
            stop = min(slots.stop + num_added, SLOTS_PER_PROMPT * self._size)
        return [
            BatchSlot(step, index)
            for index in (*sorted(slots.holes), *range(slots.stop, stop))
            if index not in slots.trained
        ]

    def find_replacements(
        self, ended: IssuedGroup, *, uses_spares: bool
    ) -> list[tuple[BatchSlot, int]]:
        """Return batch slots and attempts to issue for a prompt group of an open step that was
        filtered or failed. Where no slot is left, its own is used again.
        """
        again, slots = (ended.slot, ended.attempt + 1), self._steps.get(ended.slot.train_step)
        if not uses_spares or slots is None:
            return [again]
        if empty := self.find_empty_slots(ended.slot.train_step, uses_spares=True):
            return [(slot, ended.attempt + 1) for slot in empty]
        return [again] if self._count_missing(slots) else []

    def _count_missing(self, slots: _StepSlots) -> int:
        return slots.count_missing(
            prompts_per_step=self._size,
            pass_ratio=self.pass_ratio,
            num_measured=self._size * len(self.slots_used),
        )
