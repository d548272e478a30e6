"""Reads the whole log of a run and proves what was promised about it.

issued = trained + filtered + expired + failed + in flight; no sample trained twice; none older than the bound; none
trained that was never generated or issued; versions and steps without gap; every generated prompt group accounted for.
What strangers write is counted apart: it may be refused, it must not be trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from relax_events.broker.connection import Connection
from relax_events.broker.consumer import LogReader
from relax_events.broker.damage import damage_error
from relax_events.broker.records import Record
from relax_events.config import RunConfig
from relax_events.control.topics.purged import PurgedLog
from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.codec import EventCodec
from relax_events.events.types import Event, PolicyVersionPublished, PromptGroupEnded, PromptGroupIssued, SampleRolledOut, TrainStepCommitted
from relax_events.pipeline.source_run import SourceRun
from relax_events.policy import is_guest
from relax_events.topics import TopicPlan

log = structlog.get_logger()


@dataclass(slots=True)
class Ledger:
    """The books of a run. Feed it every event of the four topics, in any order between topics and in log order within."""

    max_staleness: int
    first_version: int = 0
    purged: PurgedLog | None = None
    issued: set[str] = field(default_factory=set)
    passed_over: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    ended_versions: dict[str, int] = field(default_factory=dict)
    rolled_out: Counter[str] = field(default_factory=Counter)
    versions_of: dict[str, set[int]] = field(default_factory=dict)
    trained: Counter[str] = field(default_factory=Counter)
    trained_groups: dict[str, int] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    second_ends: list[str] = field(default_factory=list)
    num_unreadable: int = 0
    damaged_group_ids: set[str] = field(default_factory=set)

    def note(self, event: Event) -> None:
        """Enter an event."""
        if isinstance(event, PromptGroupIssued):
            self.issued.add(event.prompt_group_id)
            self.passed_over.update(event.passed_over)
        elif isinstance(event, SampleRolledOut):
            self.rolled_out[event.sample_id] += 1
            self.versions_of.setdefault(event.sample_id, set()).add(event.min_policy_version)
        elif isinstance(event, PromptGroupEnded):
            self.ended_versions[event.prompt_group_id] = event.policy_version
            if self.outcomes.setdefault(event.prompt_group_id, event.outcome.value) != event.outcome.value:
                self.second_ends.append(f"{event.prompt_group_id}: {self.outcomes[event.prompt_group_id]}, then {event.outcome.value}")
        elif isinstance(event, PolicyVersionPublished):
            self.versions.append(event.policy_version)
            if self.purged is not None:
                self.purged.note(event)
        elif isinstance(event, TrainStepCommitted):
            self.steps.append(event.train_step)
            self.trained.update(event.sample_ids)
            self.trained_groups |= dict.fromkeys(event.prompt_group_ids, event.train_step)
            self.staleness.update({age: count for age, count in enumerate(event.staleness_counts) if count})

    def note_source(self, step: TrainStepCommitted) -> None:
        """Enter a step of the run that this one replays: its prompt groups are what is issued here, and were generated there."""
        self.issued.update(step.prompt_group_ids)
        self.rolled_out.update(dict.fromkeys(step.sample_ids, 1))

    def figures(self) -> dict[str, Any]:
        """Return the books' sums."""
        purged_groups = self.purged_groups()
        everyone = self.issued | purged_groups
        issued = {name for name in everyone if not is_guest(name)}
        ended = Counter(outcome for name, outcome in self.outcomes.items() if name in issued)
        total = sum(self.staleness.values())
        ours = {name: count for name, count in self.rolled_out.items() if name.rpartition("/")[0] in issued}
        return {
            "steps": len(set(self.steps)),
            "outcomes": {
                "issued": len(issued),
                **{name: ended[name] for name in ("trained", "filtered", "expired", "failed")},
                "in_flight": len(issued - self.outcomes.keys()),
            },
            "prompts_passed_over": dict(sorted(Counter(self.passed_over.values()).items())),
            "prompt_groups_of_guests": len(everyone) - len(issued),
            "prompt_groups_purged": len(purged_groups),
            "samples_purged": len(self.purged_samples()),
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

    def note_damaged(self, record: Record, *, is_decision: bool) -> None:
        """Enter a record that fails its checksum: its prompt group may have been issued or generated, which it can't show any more.

        Raises:
            BrokerError: It held a decision of the trainer's, without which nothing can be proved.
        """
        if is_decision:
            raise damage_error(record.topic, record.partition, record.offset)
        self.num_unreadable += 1
        self.damaged_group_ids.add(record.key)
        log.warning("record.unreadable", place=record.place, error="its record batch fails its checksum")

    def purged_groups(self) -> set[str]:
        """Return prompt groups that ended and whose issue was purged: the log can't show any more that they were issued."""
        return {name for name in self.outcomes.keys() - self.issued if self.purged is not None and self.purged.had_issue(name)}

    def purged_samples(self) -> set[str]:
        """Return trained samples whose generation was purged: the log can't show any more that they were generated."""
        return {name for name in self._not_seen_generated() if self._were_purged(name.rpartition("/")[0])}

    def never_generated(self) -> set[str]:
        """Return trained samples whose generation the log should show, and does not."""
        return self._not_seen_generated() - self.purged_samples()

    def _not_seen_generated(self) -> set[str]:
        missing = self.trained.keys() - self.rolled_out.keys()
        return {name for name in missing if name.rpartition("/")[0] not in self.damaged_group_ids}

    def _were_purged(self, group_id: str) -> bool:
        return self.purged is not None and group_id in self.ended_versions and self.purged.had_samples(group_id, self.ended_versions[group_id])

    def unproven(self) -> list[str]:
        """Return what a purge has left without proof; nothing where all records are kept."""
        claims = {"prompt groups were issued before they ended": self.purged_groups(), "trained samples were generated": self.purged_samples()}
        return [f"that {len(names)} {what}, since run.retain_versions no longer retains it" for what, names in claims.items() if names]

    def lost(self) -> set[str]:
        """Return samples of prompt groups whose end says trained, but that no step trained."""
        trained = {name for name, outcome in self.outcomes.items() if outcome == "trained"}
        return {sample_id for sample_id in self.rolled_out if sample_id.rpartition("/")[0] in trained and sample_id not in self.trained}

    def problems(self) -> list[str]:
        """Return every broken promise, each with an example; an empty list is the proof."""
        checks = {
            "sample trained twice": [name for name, count in self.trained.items() if count > 1],
            "sample of a trained prompt group was not trained": sorted(self.lost()),
            "sample trained that was never generated": sorted(self.never_generated()),
            "prompt group trained without an end on control.group-outcomes": sorted(self.trained_groups.keys() - self.outcomes.keys()),
            "prompt group ended as trained that no step trained": sorted(
                name for name, outcome in self.outcomes.items() if outcome == "trained" and name not in self.trained_groups
            ),
            "prompt group of a guest was trained": sorted(filter(is_guest, self.trained_groups)),
            "prompt group ended in two ways": self.second_ends,
            "prompt group trained that was never issued": sorted(
                self.trained_groups.keys() - self.issued - self.purged_groups() - self.damaged_group_ids
            ),
            f"staleness above max_staleness = {self.max_staleness}": [str(age) for age in self.staleness if age > self.max_staleness],
            f"train steps not {self._numbers()}": self._out_of_order(self.steps),
            f"policy versions not {self._numbers()}": self._out_of_order(self.versions),
        }
        return [f"{what}: {len(found)}, for example {found[0]}" for what, found in checks.items() if found]

    def _numbers(self) -> str:
        return ", ".join(str(self.first_version + place) for place in range(3)) + ", ..."

    def _out_of_order(self, numbers: list[int]) -> list[str]:
        return [str(numbers)] if numbers != list(range(self.first_version, self.first_version + len(numbers))) else []


def read_ledger(config: RunConfig) -> Ledger:
    """Read a run's log into a ledger; of a replay also which steps of its source it was to train."""
    plan, codec = TopicPlan.of(config), EventCodec()
    ledger = Ledger(config.run.max_staleness, first_version=config.first_version)
    connection = Connection.of(config.broker, client_id=f"{config.run.id}.ledger")
    reader = LogReader(connection)
    decisions = [(plan.topic(entity), 0) for entity in ("control.policy-versions", "control.train-steps", "control.group-outcomes")]
    places: list[tuple[str, int]] = []
    if config.is_replay:
        _enter_source(ledger, config, connection)
    else:
        places += [(plan.topic("prompt.groups"), partition) for partition in range(plan.queue_partitions)]
        places += [(plan.topic("rollout.samples"), partition) for partition in range(plan.num_sample_partitions)]
        ledger.purged = PurgedLog(plan, {(plan.entity(place[0]), place[1]): reader.watermarks(*place)[0] for place in places})
    try:
        for record in reader.read_to_end([(plan.topic("control.schemas"), 0)]):
            if record.value:
                codec.learn(record.value)
        spans = between_commits(reader, decisions)
        spans |= {place: (0, reader.watermarks(*place)[1]) for place in places}  # what was decided on was written before
        for record in reader.stream(spans, with_damaged=True):
            if record.is_damaged:
                ledger.note_damaged(record, is_decision=(record.topic, record.partition) in decisions)
                continue
            try:
                ledger.note(codec.decode(record.value))
            except (CorruptRecord, SchemaError) as error:
                ledger.num_unreadable += 1
                log.warning("record.unreadable", place=record.place, error=str(error))
    finally:
        reader.close()
    return ledger


def between_commits(reader: LogReader, decisions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return spans of these topics that end all before or all after any commit of the trainer's, while it goes on.

    A step's records become visible together, but ends are asked for one after the other: so again until none has moved meanwhile.
    """
    seen: dict[tuple[str, int], tuple[int, int]] = {}
    while (spans := {place: (0, reader.watermarks(*place)[1]) for place in decisions}) != seen:
        seen = spans
    return spans


def _enter_source(ledger: Ledger, config: RunConfig, connection: Connection) -> None:
    until = config.source.until_version
    for step in SourceRun.read(connection, config.source.run).steps():
        if config.first_version <= step.train_step and (until < 0 or step.train_step < until):
            ledger.note_source(step)
