"""Summaries of the prompter's state on control.prompter-state: a restarted prompter continues from
the newest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from relax_events.data.prompt_sampler import PromptSampler
from relax_events.data.stream import DatasetRow
from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.parts import TopicOffset
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
    return {name: IssuedGroup.parse(name, row=row) for name, row in summary.in_flight.items()}


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
    supply: BatchSupply,
    rewards: Sequence[tuple[DatasetRow, float]],
) -> PrompterStateSaved:
    """Return a summary as an event.

    Args:
        sampler: Knows the rows that were issued or skipped.
        positions: Offsets, by topic and partition, up to which the state includes the log.
        next_step: First train step that is not admitted.
        in_flight: Prompt groups without an outcome, by id.
        supply: The batch slots of the steps that are not trained.
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
        num_trained={str(step): count for step, count in supply.num_trained.items()},
        open_step=supply.open_step,
        ended=supply.ended,
        returned_rows=sorted(supply.returned_rows),
        slots_used=list(supply.slots_used),
        reward_history_rows=np.array(
            [(row.dataset, row.index) for row, _ in rewards], np.int64
        ).reshape(-1, 2),
        reward_history_values=np.array([reward for _, reward in rewards], np.float64),
    )
