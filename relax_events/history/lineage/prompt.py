"""The history of a data row or of one prompt group: when it was issued, its outcome, and the steps
that trained it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_events.errors import ConfigError, CorruptRecord
from relax_events.events.parts import Outcome
from relax_events.events.types import PromptGroupIssued
from relax_events.history.lineage.reader import DataRow, data_rows, issued_groups
from relax_events.history.run_log import DecodedRecord, RunLog
from relax_events.history.samples.filter import SampleFilter
from relax_events.history.samples.reader import read_lines
from relax_events.history.samples.view import OPEN, SampleLine
from relax_events.staleness import IssuedGroup


@dataclass(frozen=True, slots=True)
class PromptUse:
    """A prompt group as it was issued and as it ended; times in microseconds since the epoch.

    `train_step` is the step that trained it: every version from `train_step + 1` on has learned
    from it.
    """

    prompt_group_id: str
    data_row: int | None
    row: int
    issued_for_step: int
    attempt: int
    issued_at: int
    issued_position: str
    prompt: str
    outcome: str
    reason: str
    ended_at: int | None
    ended_position: str
    train_step: int | None
    mean_reward: float | None
    samples: list[SampleLine] = field(default_factory=list)


def prompt_lineage(log: RunLog, prompt: str) -> list[PromptUse]:
    """Return every use of a prompt, in the order of its ids; for a prompt group with its samples.

    Args:
        log: The run's log.
        prompt: The number of a row of the data, from 0, or the id of a prompt group.
    Raises:
        ConfigError: It is neither, or was never issued, or the data that maps rows is not
            available.
    """
    uses = _uses_of_row(log, int(prompt)) if prompt.isdecimal() else _use_of_group(log, prompt)
    if not uses:
        raise ConfigError(
            f"run {log.config.run.id} never issued "
            f"{'row' if prompt.isdecimal() else 'prompt group'} {prompt}"
        )
    return sorted(uses, key=lambda use: use.prompt_group_id)


def _uses_of_row(log: RunLog, data_row: int) -> list[PromptUse]:
    row = data_rows(log.config, required=True)
    uses = {
        record.event.prompt_group_id: _use(log, record, row)
        for record in issued_groups(log)
        if row(record.event.row) == data_row
    }
    return list(uses.values())


def _use_of_group(log: RunLog, prompt_group_id: str) -> list[PromptUse]:
    try:
        IssuedGroup.parse(prompt_group_id)
    except CorruptRecord as error:
        raise ConfigError(f"{error}; rows of the data are numbers from 0") from None
    record = next(issued_groups(log, prompt_group_id), None)
    if record is None:
        return []
    samples = list(read_lines(log, SampleFilter(prompt_group_id=prompt_group_id)))
    return [_use(log, record, data_rows(log.config), samples)]


def _use(
    log: RunLog,
    record: DecodedRecord[PromptGroupIssued],
    row: DataRow,
    samples: list[SampleLine] | None = None,
) -> PromptUse:
    issued, end = record.event, log.outcomes.get(record.event.prompt_group_id)
    ended = end.event if end else None
    return PromptUse(
        prompt_group_id=issued.prompt_group_id,
        data_row=row(issued.row),
        row=issued.row,
        issued_for_step=issued.train_step,
        attempt=issued.attempt,
        issued_at=issued.issued_at,
        issued_position=record.position,
        prompt="\n".join(message.text for message in issued.messages),
        outcome=ended.outcome.value if ended else OPEN,
        reason=ended.reason if ended else "",
        ended_at=ended.ended_at if ended else None,
        ended_position=end.position if end else "",
        train_step=ended.trainer_version if ended and ended.outcome is Outcome.TRAINED else None,
        mean_reward=ended.mean_reward if ended else None,
        samples=samples or [],
    )
