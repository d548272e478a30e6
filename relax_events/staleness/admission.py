"""Decide which prompt groups may be issued, from the issued prompt groups and their outcomes."""

from __future__ import annotations

import heapq
import math
import re
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from relax_events.errors import CorruptRecord
from relax_events.events.parts import Outcome
from relax_events.events.types import PrompterStateSaved, PromptGroupEnded

ID_PATTERN = re.compile("([0-9]{6,12})-([0-9]{4,12})-([0-9]{1,12})")
NUM_REMEMBERED_IDS = 1024
"""The records of a prompt group come together, and each names it several times."""
FIRST_EXTERNAL_INDEX = 1_000_000
"""The first `group_index` of external prompt groups. It exceeds the size of every train batch."""
LEFT = "its step was trained before version"
"""Begins the reason why a prompt group ends that its step does not need."""
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
    def parse(cls, prompt_group_id: str, *, row: int = -1) -> IssuedGroup:
        """Parse batch slot and attempt from an id, which does not contain the row.

        Raises:
            CorruptRecord: The text is not a prompt group id.
        """
        group = _parse(prompt_group_id)
        return group if row == group.row else replace(group, row=row)


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


def describe_left(version: int) -> str:
    """Return why a prompt group ends whose step has its batch, with or without it: the step was
    trained before this version.
    """
    return f"{LEFT} {version}"


def was_left(event: PromptGroupEnded) -> bool:
    """Return whether a prompt group ended because its step had its batch: it was a spare, or was
    delivered again.
    """
    return event.reason.startswith(LEFT)


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


class BatchSupply(ABC):
    """The batch slots for which the prompter issues prompt groups. Issued prompt groups and
    outcomes go in; what it returns to be issued is added before it is asked again.
    """

    first_step: int
    """First step for which prompt groups may have to be issued."""
    open_step: int = -1
    """First step whose batch is not trained; -1 where a step may train prompt groups that were
    issued for any other."""
    slots_used: Sequence[int] = ()
    """Batch slots that each of the newest complete steps took, without unused spares."""
    returned_rows: Collection[int] = frozenset()
    """Rows that are to be issued again first."""
    num_trained: Mapping[int, int] = MappingProxyType({})
    """Number of trained prompt groups of each step that is not complete."""

    @property
    def is_between_steps(self) -> bool:
        """Whether of each step the outcomes of all trained prompt groups were applied, or none;
        True where it does not matter.
        """
        return True

    @property
    def ended(self) -> dict[str, int]:
        """Rows of the prompt groups of open steps that were filtered or failed, by id."""
        return {}

    @abstractmethod
    def restore(self, summary: PrompterStateSaved) -> bool:
        """Continue from a summary; return whether it has all that earlier outcomes say."""

    @abstractmethod
    def recover(self, trained: Iterable[tuple[BatchSlot, bool]]) -> None:
        """Apply the batch slots that were trained before this process started, and whether their
        outcomes were applied before the summary was written.
        """

    @abstractmethod
    def add(self, group: IssuedGroup) -> None:
        """Add a prompt group that was issued, or is about to be."""

    @abstractmethod
    def end(self, group: IssuedGroup, outcome: Outcome) -> None:
        """Apply the outcome of an untrained prompt group."""

    @abstractmethod
    def train(self, slot: BatchSlot, *, trainer_version: int) -> int | None:
        """Apply that the step at `trainer_version` trained the prompt group of a batch slot; return
        the version that the step makes once it is complete.
        """

    def take_returned_rows(self, count: int) -> list[int]:
        """Remove and return at most `count` returned rows, lowest first."""
        return []

    @abstractmethod
    def bound_version(self, published: int, *, uses_spares: bool) -> int:
        """Return the version by which steps are admitted: at most the newest published one."""

    @abstractmethod
    def find_empty_slots(self, step: int, *, uses_spares: bool) -> list[BatchSlot]:
        """Return the batch slots for which a prompt group is to be issued now, in order: those that
        a step lacks, and the ones that a crash left out.

        Args:
            step: An admitted train step, at least `first_step`.
            uses_spares: Whether the trainer takes prompt groups of spare slots.
        """

    @abstractmethod
    def find_replacements(
        self, ended: IssuedGroup, outcome: Outcome, *, uses_spares: bool
    ) -> list[tuple[BatchSlot, int]]:
        """Return batch slots and attempts to issue for an untrained prompt group. An expired one is
        replaced in its slot, so that its prompt is not selected against.
        """


class ReadySupply(BatchSupply):
    """Under the order `ready_first`: each step has `prompts_per_step` batch slots, and a prompt
    group is replaced in its own until any step has trained one.
    """

    def __init__(self, *, prompts_per_step: int, first_step: int) -> None:
        """Start with no step issued; `first_step` is the run's first one."""
        self._size, self.first_step = prompts_per_step, first_step
        self._issued: dict[int, set[int]] = {}
        """Issued indexes of the steps that are not wholly issued."""
        self.num_trained: Counter[int] = Counter()

    def restore(self, summary: PrompterStateSaved) -> bool:
        """Continue behind the steps that the summary's prompter has issued."""
        self.first_step = max(self.first_step, summary.next_step)
        self.num_trained.update({int(step): count for step, count in summary.num_trained.items()})
        return True

    def recover(self, trained: Iterable[tuple[BatchSlot, bool]]) -> None:
        """Count trained batch slots as issued, also those whose records are purged."""
        for slot, _ in trained:
            self._add_slot(slot)

    def add(self, group: IssuedGroup) -> None:
        """Count a prompt group's batch slot as issued."""
        self._add_slot(group.slot)

    def _add_slot(self, slot: BatchSlot) -> None:
        if slot.train_step < self.first_step or slot.group_index >= self._size:
            return
        self._issued.setdefault(slot.train_step, set()).add(slot.group_index)
        while len(self._issued.get(self.first_step, ())) == self._size:
            del self._issued[self.first_step]
            self.first_step += 1

    def end(self, group: IssuedGroup, outcome: Outcome) -> None:
        """Do nothing: a batch slot stays issued."""

    def train(self, slot: BatchSlot, *, trainer_version: int) -> int | None:
        """Count the prompt groups of the step that trains."""
        self.num_trained[trainer_version] += 1
        if self.num_trained[trainer_version] < self._size:
            return None
        del self.num_trained[trainer_version]
        return trainer_version + 1

    def bound_version(self, published: int, *, uses_spares: bool) -> int:
        """Return the newest published version."""
        return published

    def find_empty_slots(self, step: int, *, uses_spares: bool) -> list[BatchSlot]:
        """Return the batch slots for which no prompt group was issued, in order."""
        issued = self._issued.get(step, set())
        return [BatchSlot(step, index) for index in range(self._size) if index not in issued]

    def find_replacements(
        self, ended: IssuedGroup, outcome: Outcome, *, uses_spares: bool
    ) -> list[tuple[BatchSlot, int]]:
        """Return the prompt group's own batch slot."""
        return [(ended.slot, ended.attempt + 1)]


class OrderedSupply(BatchSupply):
    """Under the order `fifo`: a step trains the first `prompts_per_step` prompt groups that can be
    trained, by their index.

    Indexes are issued without a gap, and a prompt group that can't be trained is replaced at the
    next index. Rows behind the last trained index are issued again, for a later step. After a
    restart steps may be trained whose outcomes are not applied yet: `first_step` lies behind them.
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
        self.first_step = self.open_step = first_step
        self._steps: dict[int, _StepSlots] = {}
        self._newest_slot: dict[int, BatchSlot] = {}
        """Of the rows of those steps."""
        num_steps = max(MIN_RATIO_STEPS, -(-MIN_RATIO_GROUPS // prompts_per_step))
        self.slots_used: deque[int] = deque(maxlen=num_steps)
        self.returned_rows: set[int] = set()

    def restore(self, summary: PrompterStateSaved) -> bool:
        """Continue with the batch slots of open steps; a summary of an older release has none."""
        is_complete = summary.open_step >= self.open_step
        self.open_step = max(self.open_step, summary.open_step)
        self.first_step = self.open_step
        self.slots_used.extend(summary.slots_used)
        for name, row in summary.in_flight.items():
            self.add(IssuedGroup.parse(name, row=row))
        for name, row in summary.ended.items():
            group = IssuedGroup.parse(name, row=row)
            self.add(group)
            self.end(group, Outcome.FILTERED)
        self.returned_rows |= set(summary.returned_rows)
        return is_complete

    def recover(self, trained: Iterable[tuple[BatchSlot, bool]]) -> None:
        """Count on from the summary, and find the first step that is not trained."""
        newest = OrderedSupply(prompts_per_step=self._size, first_step=self.open_step)
        for slot, is_applied in trained:
            newest.train(slot, trainer_version=slot.train_step)
            if is_applied:
                self.train(slot, trainer_version=slot.train_step)
        self.first_step = max(self.first_step, newest.open_step)

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
        """Add a prompt group, and give its row no other batch slot."""
        self.returned_rows.discard(group.row)
        if group.slot.train_step >= self.open_step:
            self._steps.setdefault(group.slot.train_step, _StepSlots()).add(group)
            former = self._newest_slot.get(group.row, group.slot)
            self._newest_slot[group.row] = max(former, group.slot)

    def end(self, group: IssuedGroup, outcome: Outcome) -> None:
        """Apply the outcome of an untrained prompt group, unless its slot has a later attempt."""
        if (slots := self._steps.get(group.slot.train_step)) is not None:
            slots.end(group, outcome)

    def train(self, slot: BatchSlot, *, trainer_version: int) -> int | None:
        """Close the step, and those before, once `prompts_per_step` are trained."""
        if slot.train_step < self.open_step:
            return None
        trained = self._steps.setdefault(slot.train_step, _StepSlots()).trained
        trained.add(slot.group_index)
        if len(trained) < self._size:
            return None
        self.slots_used.append(max(trained) + 1)
        for step in range(self.open_step, slot.train_step + 1):
            for state in self._steps.pop(step, _StepSlots()).states.values():
                self._forget(state, last_index=max(trained))
        self.open_step = slot.train_step + 1
        self.first_step = max(self.first_step, self.open_step)
        return self.open_step

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

    def take_returned_rows(self, count: int) -> list[int]:
        """Remove and return at most `count` returned rows, lowest first."""
        rows = heapq.nsmallest(count, self.returned_rows)
        self.returned_rows.difference_update(rows)
        return rows

    def bound_version(self, published: int, *, uses_spares: bool) -> int:
        """Return the version of which all outcomes were applied, for spares: how many a step needs
        follows from them.
        """
        return min(published, self.open_step) if uses_spares else published

    def find_empty_slots(self, step: int, *, uses_spares: bool) -> list[BatchSlot]:
        """Return the slots that a step lacks to get its batch, in order; see the base class."""
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
        self, ended: IssuedGroup, outcome: Outcome, *, uses_spares: bool
    ) -> list[tuple[BatchSlot, int]]:
        """Return none for a step that has its batch. Where no slot is left, a filtered or failed
        prompt group is replaced in its own, too.
        """
        again, slots = (ended.slot, ended.attempt + 1), self._steps.get(ended.slot.train_step)
        if ended.slot.train_step < self.first_step:
            return []
        if outcome is Outcome.EXPIRED or not uses_spares or slots is None:
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
