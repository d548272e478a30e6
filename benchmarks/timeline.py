"""Reads from a run's log where the time of its steps went: when prompts were issued, samples
written and joined, steps committed."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from relax_events.config import BrokerConfig
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.staleness import IssuedGroup

STAGES = ("prompt.groups", "rollout.samples", "advantage.samples")


@dataclass(slots=True)
class Timeline:
    """Seconds since the epoch at which the broker appended records."""

    published: dict[int, float] = field(default_factory=dict)
    groups: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """By stage and prompt group: the last record."""

    @classmethod
    def read(cls, bootstrap_servers: str, *, run_id: str, num_sample_partitions: int) -> Timeline:
        """Read a whole run; values are not decoded."""
        timeline = cls()
        connection = Connection.from_config(
            BrokerConfig(bootstrap_servers=bootstrap_servers), client_id=f"{run_id}.timeline"
        )
        partitions = {"prompt.groups": 1, "control.policy-versions": 1}
        entities = {
            f"relax.{run_id}.{entity}": entity for entity in (*STAGES, "control.policy-versions")
        }
        topic_partitions = [
            (topic, partition)
            for topic, entity in entities.items()
            for partition in range(partitions.get(entity, num_sample_partitions))
        ]
        reader = LogReader(connection)
        for record in reader.read_to_end(topic_partitions):
            entity, seconds = entities[record.topic], record.timestamp_ms / 1000
            if entity == "control.policy-versions":
                if record.key.isdigit():  # the topic has the lists of engines, too
                    timeline.published[int(record.key)] = seconds
            else:
                timeline.groups[entity][record.key] = max(
                    seconds, timeline.groups[entity].get(record.key, 0.0)
                )
        reader.close()
        return timeline

    def ends(self, stage: str) -> dict[int, float]:
        """Return when the last prompt group of each train step was through a stage."""
        ends: dict[int, float] = {}
        for prompt_group_id, seconds in self.groups[stage].items():
            step = IssuedGroup.parse(prompt_group_id).slot.train_step
            ends[step] = max(seconds, ends.get(step, 0.0))
        return ends

    def stage_seconds(self, steps: Sequence[int], *, max_staleness: int) -> dict[str, float]:
        """Return the mean seconds between the marks of a step, from the publication that admitted
        it to the one that it makes."""
        issued, generated, joined = (self.ends(stage) for stage in STAGES)
        parts: dict[str, list[float]] = defaultdict(list)
        for step in steps:
            parts["published to issued"].append(
                issued[step] - self.published[max(step - max_staleness, 0)]
            )
            parts["issued to generated"].append(generated[step] - issued[step])
            parts["generated to joined"].append(joined[step] - generated[step])
            parts["joined to published"].append(self.published[step + 1] - joined[step])
        return {name: statistics.mean(values) for name, values in parts.items()}

    def join_seconds(self, start: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return how long each prompt group took from its last sample on the log to the trainer's
        input, sorted; those sampled in an interval."""
        joined, sampled = self.groups["advantage.samples"], self.groups["rollout.samples"]
        return sorted(
            joined[group] - seconds
            for group, seconds in sampled.items()
            if group in joined and start <= seconds <= end
        )
