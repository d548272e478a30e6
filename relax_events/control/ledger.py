"""Reads the whole log of a run and proves what was promised about it.

issued = trained + filtered + expired + failed + in flight; no sample trained twice; none older than the bound; none
trained that was never generated or issued; versions and steps without gap; every generated prompt group accounted for.
What strangers write is counted apart: it may be refused, it must not be trained.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import structlog

from relax_events.broker.connection import Connection
from relax_events.broker.consumer import LogReader
from relax_events.config import RunConfig
from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.codec import EventCodec
from relax_events.events.types import Event, PolicyVersionPublished, PromptGroupEnded, PromptGroupIssued, SampleRolledOut, TrainStepCommitted
from relax_events.topics import TopicPlan

log = structlog.get_logger()


@dataclass(slots=True)
class Ledger:
    """The books of a run. Feed it every event of the four topics, in any order between topics and in log order within."""

    max_staleness: int
    issued: set[str] = field(default_factory=set)
    outcomes: dict[str, str] = field(default_factory=dict)
    rolled_out: Counter[str] = field(default_factory=Counter)
    versions_of: dict[str, set[int]] = field(default_factory=dict)
    trained: Counter[str] = field(default_factory=Counter)
    trained_groups: dict[str, int] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    second_ends: list[str] = field(default_factory=list)
    num_unreadable: int = 0

    def note(self, event: Event) -> None:
        """Enter an event."""
        if isinstance(event, PromptGroupIssued):
            self.issued.add(event.prompt_group_id)
        elif isinstance(event, SampleRolledOut):
            self.rolled_out[event.sample_id] += 1
            self.versions_of.setdefault(event.sample_id, set()).add(event.min_policy_version)
        elif isinstance(event, PromptGroupEnded):
            if self.outcomes.setdefault(event.prompt_group_id, event.outcome.value) != event.outcome.value:
                self.second_ends.append(f"{event.prompt_group_id}: {self.outcomes[event.prompt_group_id]}, then {event.outcome.value}")
        elif isinstance(event, PolicyVersionPublished):
            self.versions.append(event.policy_version)
        elif isinstance(event, TrainStepCommitted):
            self.steps.append(event.train_step)
            self.trained.update(event.sample_ids)
            self.trained_groups |= dict.fromkeys(event.prompt_group_ids, event.train_step)
            self.staleness.update({age: count for age, count in enumerate(event.staleness_counts) if count})

    def figures(self) -> dict[str, Any]:
        """Return the books' sums."""
        ended = Counter(outcome for name, outcome in self.outcomes.items() if name in self.issued)
        total = sum(self.staleness.values())
        ours = {name: count for name, count in self.rolled_out.items() if name.rpartition("/")[0] in self.issued}
        return {
            "steps": len(set(self.steps)),
            "outcomes": {
                "issued": len(self.issued),
                **{name: ended[name] for name in ("trained", "filtered", "expired", "failed")},
                "in_flight": len(self.issued - self.outcomes.keys()),
            },
            "samples_rolled_out": len(ours),
            "samples_foreign": len(self.rolled_out) - len(ours),
            "records_unreadable": self.num_unreadable,
            "samples_trained": len(self.trained),
            "samples_trained_twice": sum(1 for count in self.trained.values() if count > 1),
            "samples_lost": len(self.lost()),
            "rollouts_regenerated": sum(count - 1 for count in ours.values()),
            "staleness_max": max(self.staleness, default=0),
            "staleness_mean": sum(age * count for age, count in self.staleness.items()) / total if total else 0.0,
            "staleness_counts": [self.staleness[age] for age in range(max(self.staleness, default=0) + 1)],
        }

    def lost(self) -> set[str]:
        """Return samples of prompt groups whose end says trained, but that no step trained."""
        trained = {name for name, outcome in self.outcomes.items() if outcome == "trained"}
        return {sample_id for sample_id in self.rolled_out if sample_id.rpartition("/")[0] in trained and sample_id not in self.trained}

    def problems(self) -> list[str]:
        """Return every broken promise, each with an example; an empty list is the proof."""
        checks = {
            "sample trained twice": [name for name, count in self.trained.items() if count > 1],
            "sample of a trained prompt group was not trained": sorted(self.lost()),
            "sample trained that was never generated": sorted(self.trained.keys() - self.rolled_out.keys()),
            "prompt group trained without an end on control.group-outcomes": sorted(self.trained_groups.keys() - self.outcomes.keys()),
            "prompt group ended as trained that no step trained": sorted(
                name for name, outcome in self.outcomes.items() if outcome == "trained" and name not in self.trained_groups
            ),
            "prompt group ended in two ways": self.second_ends,
            "prompt group trained that was never issued": sorted(self.trained_groups.keys() - self.issued),
            f"staleness above max_staleness = {self.max_staleness}": [str(age) for age in self.staleness if age > self.max_staleness],
            "train steps not 0, 1, 2, ...": [str(self.steps)] if self.steps != list(range(len(self.steps))) else [],
            "policy versions not 0, 1, 2, ...": [str(self.versions)] if self.versions != list(range(len(self.versions))) else [],
        }
        return [f"{what}: {len(found)}, for example {found[0]}" for what, found in checks.items() if found]


def read_ledger(config: RunConfig) -> Ledger:
    """Read a run's log into a ledger."""
    plan, codec = TopicPlan.of(config), EventCodec()
    ledger = Ledger(config.run.max_staleness)
    reader = LogReader(Connection.of(config.broker, client_id=f"{config.run.id}.ledger"))
    places = [(plan.topic(entity), 0) for entity in ("control.policy-versions", "control.train-steps", "control.group-outcomes")]
    places += [(plan.topic("prompt.groups"), partition) for partition in range(plan.queue_partitions)]
    places += [(plan.topic("rollout.samples"), partition) for partition in range(plan.num_sample_partitions)]
    try:
        for record in reader.read_to_end([(plan.topic("control.schemas"), 0)]):
            if record.value:
                codec.learn(record.value)
        for record in reader.read_to_end(places):
            try:
                ledger.note(codec.decode(record.value))
            except (CorruptRecord, SchemaError) as error:
                ledger.num_unreadable += 1
                log.warning("record.unreadable", place=record.place, error=str(error))
    finally:
        reader.close()
    return ledger
