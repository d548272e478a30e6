"""What the log says about a run's training so far: the trainer's memory after a crash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_events.broker.consumer import LogReader
from relax_events.errors import BrokerUnavailable
from relax_events.events.parts import CheckpointRef
from relax_events.events.types import Event, PolicyVersionPublished, PromptGroupEnded, TrainStepCommitted
from relax_events.pipeline.worker import Worker

ENTITIES = ("control.train-steps", "control.group-outcomes", "control.policy-versions")


@dataclass(slots=True)
class TrainingHistory:
    """Committed steps, ended prompt groups and published versions, in log order."""

    steps: list[TrainStepCommitted] = field(default_factory=list)
    ended_group_ids: set[str] = field(default_factory=set)
    published: list[PolicyVersionPublished] = field(default_factory=list)
    checkpoint_positions: dict[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls, worker: Worker) -> TrainingHistory:
        """Read the control topics to their end; only committed records are seen.

        Raises:
            BrokerUnavailable: A committed step can't be read. Training must not go on from an older one: it would train twice.
        """
        history = cls()
        reader = LogReader(worker.connection)
        try:
            for record in reader.read_to_end([(worker.plan.topic(entity), 0) for entity in ENTITIES]):
                event = worker.decode(record)
                if event is not None:
                    history.note(event)
        finally:
            reader.close()
        history.refuse_gaps()
        return history

    def refuse_gaps(self) -> None:
        """Check that every published version has the step that made it; both were committed in one transaction.

        Raises:
            BrokerUnavailable: One has not: its record is damaged, or a transaction is just becoming visible.
        """
        known = {step.policy_version for step in self.steps}
        if lost := [event.policy_version for event in self.published[1:] if event.policy_version not in known]:
            raise BrokerUnavailable(
                f"policy version {lost[0]} was published, but train step {lost[0] - 1} can't be read from control.train-steps; "
                "relax deadletter list RUN_FILE --role trainer says why; nothing is trained until it can"
            )

    def note(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, TrainStepCommitted):
            self.steps.append(event)
        elif isinstance(event, PromptGroupEnded):
            self.ended_group_ids.add(event.prompt_group_id)
        elif isinstance(event, PolicyVersionPublished):
            self.published.append(event)

    @property
    def policy_version(self) -> int:
        """The newest version whose step was committed; 0 before the first step."""
        return self.steps[-1].policy_version if self.steps else 0

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was published yet."""
        return not self.published

    def checkpoint(self) -> CheckpointRef | None:
        """The newest checkpoint that a committed step names."""
        return next((step.checkpoint for step in reversed(self.steps) if step.checkpoint is not None), None)

    def take_checkpoint(self, extra: Mapping[str, Any]) -> None:
        """Take over a checkpoint's offsets and id window: they hold even where the control log was cut off or is behind."""
        self.ended_group_ids |= set(extra["id_window"])
        self.checkpoint_positions = dict(extra["consumed"])

    def positions(self) -> dict[int, int]:
        """Where reading advantage.samples goes on, by partition: below it everything was decided."""
        positions = dict(self.checkpoint_positions)
        for step in self.steps:
            positions |= {offset.partition: max(offset.offset, positions.get(offset.partition, 0)) for offset in step.consumed}
        return positions
