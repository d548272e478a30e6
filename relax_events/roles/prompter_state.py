"""Summaries of the prompter's state on control.prompter-state: a restarted prompter continues from
the newest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from relax_events.data.prompt_sampler import PromptSampler
from relax_events.data.stream import DatasetRow
from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.types import PrompterStateSaved
from relax_events.kafka.log_reader import LogReader
from relax_events.runtime.worker import Worker
from relax_events.staleness import BatchSupply, IssuedGroup
from relax_events.topics import TopicPlan
from relax_events.topics.names import PROMPTER_STATE

MAX_SUMMARY_REWARDS = 400_000
"""Maximum mean rewards in a summary record; with more, a restarted prompter reads the whole
log."""


def read_newest_summary(reader: LogReader, worker: Worker) -> PrompterStateSaved | None:
    """Return the newest summary that can be decoded; None without any."""
    topic_partition = (worker.plan.topic(PROMPTER_STATE), 0)
    for records in reader.read_backwards(topic_partition, num_offsets=1):
        for record in reversed(records):
            with suppress(CorruptRecord, SchemaError):
                event = worker.records.codec.decode(record.value)
                if isinstance(event, PrompterStateSaved):
                    return event
    return None


def saved_positions(summary: PrompterStateSaved, plan: TopicPlan) -> dict[tuple[str, int], int]:
    """Return the offsets from which to read on, by topic and partition."""
    return {
        (plan.topic(plan.parse_entity(at.topic)), at.partition): at.offset
        for at in summary.positions
    }


def saved_groups(summary: PrompterStateSaved) -> dict[str, IssuedGroup]:
    """Return the prompt groups that were in flight, by id."""
    return _parse_groups(summary.in_flight)


def _parse_groups(rows: Mapping[str, int]) -> dict[str, IssuedGroup]:
    return {name: replace(IssuedGroup.parse(name), row=row) for name, row in rows.items()}


def restore_supply(supply: BatchSupply, summary: PrompterStateSaved) -> None:
    """Restore the batch slots of the steps that were not trained."""
    supply.open_step = max(supply.open_step, summary.open_step)
    supply.slots_used.extend(summary.slots_used)
    for group in saved_groups(summary).values():
        supply.add(group)
    for group in _parse_groups(summary.ended).values():
        supply.add(group)
        supply.end(group, Outcome.FILTERED)
    supply.returned_rows |= set(summary.returned_rows)


def saved_rewards(summary: PrompterStateSaved) -> Iterator[tuple[DatasetRow, float]]:
    """Yield the mean rewards of rows."""
    for (dataset, index), reward in zip(
        np.asarray(summary.reward_history_rows).tolist(),
        np.asarray(summary.reward_history_values).tolist(),
        strict=True,
    ):
        yield DatasetRow(dataset, index), reward


def build_summary(
    sampler: PromptSampler,
    *,
    positions: Mapping[tuple[str, int], int],
    next_step: int,
    in_flight: Mapping[str, IssuedGroup],
    num_trained: Mapping[int, int],
    supply: BatchSupply | None,
    rewards: Sequence[tuple[DatasetRow, float]],
) -> PrompterStateSaved:
    """Return a summary as an event.

    Args:
        sampler: Knows the rows that were issued or skipped.
        positions: Offsets, by topic and partition, up to which the state includes the log.
        next_step: First train step that is not admitted.
        in_flight: Prompt groups without an outcome, by id.
        num_trained: Trained prompt groups of the steps that are not complete.
        supply: The batch slots of the steps that are not trained; None where prompt groups may be
            trained out of their order.
        rewards: Mean rewards of the sampler's history.
    """
    return PrompterStateSaved(
        positions=[
            TopicOffset(*topic_partition, offset)
            for topic_partition, offset in sorted(positions.items())
        ],
        next_step=next_step,
        next_row=sampler.floor,
        later_rows=sampler.later_rows,
        in_flight={name: group.row for name, group in in_flight.items()},
        num_trained={str(step): count for step, count in num_trained.items()},
        open_step=-1 if supply is None else supply.open_step,
        ended={} if supply is None else supply.ended,
        returned_rows=[] if supply is None else sorted(supply.returned_rows),
        slots_used=[] if supply is None else list(supply.slots_used),
        reward_history_rows=np.array(
            [(row.dataset, row.index) for row, _ in rewards], np.int64
        ).reshape(-1, 2),
        reward_history_values=np.array([reward for _, reward in rewards], np.float64),
    )
