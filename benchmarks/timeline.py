"""Reads from a run's log when its versions were published, and its samples written and joined."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from relax_events.config import BrokerConfig
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader

STAGES = ("rollout.samples", "advantage.samples")


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
        partitions = {"control.policy-versions": 1}
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

    def join_seconds(self, start: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return how long each prompt group took from its last sample on the log to the trainer's
        input, sorted; those sampled in an interval."""
        joined, sampled = self.groups["advantage.samples"], self.groups["rollout.samples"]
        return sorted(
            joined[group] - seconds
            for group, seconds in sampled.items()
            if group in joined and start <= seconds <= end
        )
