"""Finds where to begin in the control log: each publication of a policy version sums up what lies before it.

    control.policy-versions   ... v-2  v-1  v      read backwards from the end, until enough publications are found
                                    │
    control.train-steps       ......└── steps from here on       PolicyVersionPublished.control_offsets
    control.group-outcomes    ......└── ends from here on        PolicyVersionPublished.num_steps_before, ended_before

So what a reader of the log takes to start does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relax_events.broker.consumer import LogReader
from relax_events.broker.records import Record
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.topics import TopicPlan

SUMMED_ENTITIES = ("control.train-steps", "control.group-outcomes", "control.policy-versions")
"""Topics that the trainer writes in the transactions that publish versions."""
PUBLICATIONS = "control.policy-versions"
RECENT_VERSIONS = 48
"""Policy versions that a follower reads back at its start: the last steps that are shown, and several windows of the usual bounds."""
Decode = Callable[[Record], Event | None]


def newest_publications(
    reader: LogReader, plan: TopicPlan, decode: Decode, *, enough: Callable[[Sequence[PolicyVersionPublished]], bool]
) -> list[PolicyVersionPublished]:
    """Return the newest publications of a run, oldest first: no more spans of the log than it takes for `enough` to hold.

    Args:
        reader: Its assignment is taken over.
        plan: The run's topics.
        decode: Turns a record into its event; None for one that can't be used.
        enough: Told the publications found so far, oldest first.
    """
    found: list[PolicyVersionPublished] = []
    for records in reader.backwards((plan.topic(PUBLICATIONS), 0)):
        events = [decode(record) for record in records]
        found = [*(event for event in events if isinstance(event, PolicyVersionPublished)), *found]
        if enough(found):
            break
    return found


def begins_of(published: Sequence[PolicyVersionPublished], plan: TopicPlan) -> Mapping[str, int]:
    """Return where a reader begins that is to miss nothing since the first of these publications, by entity; 0 is the oldest record left."""
    named = {plan.entity(at.topic): at.offset for at in published[0].control_offsets} if published else {}
    return {entity: named.get(entity, 0) for entity in SUMMED_ENTITIES}
