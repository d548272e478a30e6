"""Writes the control log and the prompt queue of a long run, and starts roles on it: `python
long_log.py ROLE... CONFIG`.

The program prints the costs of each start: seconds, decoded records, and the process's peak memory.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from relax_events.config import RunConfig
from relax_events.data.sources import open_stream
from relax_events.events.codec import EventCodec
from relax_events.events.parts import (
    ChatMessage,
    CheckpointRef,
    ObjectRef,
    Outcome,
    TopicOffset,
    WorkerState,
)
from relax_events.events.types import (
    Event,
    MetricsReported,
    PolicyVersionPublished,
    PrompterStateSaved,
    PromptGroupIssued,
    TrainStepCommitted,
    WorkerHeartbeat,
)
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.projections.run_state import RunState
from relax_events.projections.training_history import TrainingHistory
from relax_events.runtime.control_follower import ControlFollower
from relax_events.staleness import BatchSlot, IssuedGroup, build_group_end
from relax_events.topics import TopicPlan

WORKERS = 20
PROMPT = (
    "A farmer has seventeen sheep and all but nine run away; how many are left? Say how you know. "
    * 10
)
ARTIFACT = ObjectRef("file:///objects/weights/00000000/manifest.json", bytes(32), 4096)


class LongLog:
    """A run that has come to a step. Nothing was filtered, so that offsets are known: one record
    for each step, version and end.

    Args:
        config: Says how many prompt groups a step has, and how many samples those.
        num_steps: Steps that are committed.
        reports: Reports of metrics for each step, and as many heartbeats; there are more in truth,
            and they are not kept for so long.
    """

    def __init__(self, config: RunConfig, *, num_steps: int, reports: int) -> None:
        self._config, self._num_steps, self._reports = config, num_steps, reports
        self._plan, self._codec = TopicPlan.from_config(config), EventCodec()
        self._groups, self._staleness = config.run.prompts_per_step, config.run.max_staleness
        self.bytes: dict[str, int] = {}

    def write(self) -> None:
        """Write all of it, step by step, as the roles would."""
        producer = RecordProducer(
            Connection.from_config(self._config.broker, client_id=f"{self._config.run.id}.long"),
            linger_ms=50,
        )
        schemas = self._codec.published_form()
        producer.write(
            ProducerRecord(self._plan.topic("control.schemas"), schema, key=name.hex())
            for name, schema in schemas.items()
        )
        start: list[tuple[str, str, Event]] = [
            *self._issues(range(self._staleness + 1)),
            ("control.policy-versions", "0", self._published(0)),
        ]
        producer.write(self._out(*item) for item in start)
        for first in range(0, self._num_steps, 64):
            steps = range(first, min(first + 64, self._num_steps))
            producer.write(self._out(*item) for step in steps for item in self._step(step))
        producer.close()

    def _out(self, entity: str, key: str, event: Event) -> ProducerRecord:
        value = self._codec.encode(event)
        self.bytes[entity] = self.bytes.get(entity, 0) + len(value)
        return ProducerRecord(self._plan.topic(entity), value, key=key, partition=0)

    def _group_ids(self, step: int) -> list[str]:
        return [
            IssuedGroup(BatchSlot(step, index), 0, -1).prompt_group_id
            for index in range(self._groups)
        ]

    def _step(self, step: int) -> Iterator[tuple[str, str, Event]]:
        group_ids = self._group_ids(step)
        yield "control.train-steps", str(step), self._committed(step, group_ids)
        for group_id in group_ids:
            end = build_group_end(
                group_id,
                Outcome.TRAINED,
                policy_version=step,
                trainer_version=step,
                mean_reward=0.5,
            )
            yield "control.prompt-group-outcomes", group_id, end
        yield "control.policy-versions", str(step + 1), self._published(step + 1)
        yield from self._issues(range(step + self._staleness + 1, step + self._staleness + 2))
        if (step + 1) % 8 == 0:
            yield "control.prompter-state", "prompter", self._summed(step)
        for number in range(self._reports):
            worker_id, values = (
                f"rollout-{number % WORKERS}",
                {f"metric_{number}": 0.5 for number in range(8)},
            )
            yield (
                "control.metrics.rollout",
                worker_id,
                MetricsReported(
                    worker_id=worker_id, role="rollout", policy_version=step, values=values
                ),
            )
            heartbeat = WorkerHeartbeat(
                worker_id=worker_id,
                role="rollout",
                host="h",
                pid=1,
                state=WorkerState.WORKING,
                num_processed=1,
                num_in_flight=1,
                last_progress_at=1,
            )
            yield f"control.heartbeats.{heartbeat.role}", worker_id, heartbeat

    def _issues(self, steps: range) -> Iterator[tuple[str, str, Event]]:
        for step in steps:
            for index, group_id in enumerate(self._group_ids(step)):
                row = step * self._groups + index
                yield (
                    "prompt.groups",
                    group_id,
                    PromptGroupIssued(
                        prompt_group_id=group_id,
                        train_step=step,
                        group_index=index,
                        attempt=0,
                        row=row,
                        required_policy_version=max(step - self._staleness, 0),
                        samples_per_prompt=self._config.run.samples_per_prompt,
                        messages=[ChatMessage.of_text("user", PROMPT)],
                        answer="9",
                        seed=row,
                    ),
                )

    def _committed(self, step: int, group_ids: list[str]) -> TrainStepCommitted:
        samples = [
            f"{group_id}/{index}"
            for group_id in group_ids
            for index in range(self._config.run.samples_per_prompt)
        ]
        count, every = len(samples), self._config.trainer.checkpoint_every
        named = (step - 1) // every * every  # it is written with the step that follows it
        checkpoint = (
            CheckpointRef(
                named, f"file:///objects/checkpoints/{named:08d}/manifest.json", bytes(32)
            )
            if named > 0
            else None
        )
        return TrainStepCommitted(
            train_step=step,
            policy_version=step + 1,
            prompt_group_ids=group_ids,
            sample_ids=samples,
            partitions=np.zeros(count, np.int32),
            offsets=np.arange(step * count, (step + 1) * count, dtype=np.int64),
            ranks=np.zeros(count, np.int32),
            micro_batches=np.arange(count, dtype=np.int32) // 8,
            consumed=[
                TopicOffset(self._plan.topic("advantage.samples"), partition, step)
                for partition in range(self._plan.num_sample_partitions)
            ],
            staleness_counts=[count],
            metrics={f"metric_{number}": 0.5 for number in range(30)} | {"reward_mean": 0.5},
            phase_seconds={"wait": 1.0, "forward_backward": 90.0, "update": 1.0},
            weights_digest=bytes(32),
            checkpoint=checkpoint,
        )

    def _published(self, version: int) -> PolicyVersionPublished:
        before = max(version - 1, 0)
        ends = {
            "control.train-steps": before,
            "control.prompt-group-outcomes": before * self._groups,
            "control.policy-versions": version,
        }
        starts = [
            TopicOffset(topic, at, version * 64)
            for topic in self._plan.sample_topics()
            for at in self._plan.partitions_of_version(version)
        ]
        return PolicyVersionPublished(
            policy_version=version,
            artifact=ARTIFACT,
            transports=["store"],
            start_offsets=starts,
            control_offsets=[
                TopicOffset(self._plan.topic(entity), 0, offset) for entity, offset in ends.items()
            ],
            num_steps_before=before,
            outcome_counts_before={"trained": before * self._groups} if before else {},
        )

    def _summed(self, step: int) -> PrompterStateSaved:
        next_step = step + self._staleness + 2
        in_flight = [
            group_id for other in range(step + 1, next_step) for group_id in self._group_ids(other)
        ]
        ends = {
            "prompt.groups": next_step * self._groups,
            "control.prompt-group-outcomes": (step + 1) * self._groups,
        }
        return PrompterStateSaved(
            positions=[
                TopicOffset(self._plan.topic(entity), 0, offset) for entity, offset in ends.items()
            ],
            next_step=next_step,
            next_row=next_step * self._groups,
            later_rows=[],
            in_flight={
                group_id: (step + 1) * self._groups + number
                for number, group_id in enumerate(in_flight)
            },
            num_trained={},
            open_step=step + 1,
            slots_used=[self._groups],
            reward_history_rows=np.zeros((0, 2), np.int64),
            reward_history_values=np.zeros(0, np.float64),
        )


def start_trainer(config: RunConfig) -> Any:
    """Read what a trainer reads before it loads its checkpoint."""
    from relax_events.roles.worker_factory import open_worker

    with open_worker("trainer", config, index=0) as worker:
        history = TrainingHistory.read(worker)
        return {
            "steps_held": len(history.steps),
            "num_steps": history.num_steps,
            "trained": history.outcomes["trained"],
        }


def start_prompter(config: RunConfig) -> Any:
    """Recover, and follow the control log."""
    from relax_events.roles.worker_factory import open_worker
    from workers.prompter import PrompterLoop

    with open_worker(
        "prompter", config, index=0, follow=("control.prompt-group-outcomes",)
    ) as worker:
        loop = PrompterLoop(worker, open_stream(config.data, seed=config.run.seed))
        loop._recover()
        worker.control.follow(
            loop._put, start_offsets={"control.prompt-group-outcomes": loop._ends_position}
        )
        while not loop._inbox.empty():
            loop._take(*loop._inbox.get())
        return {
            "in_flight": len(loop._in_flight),
            "next_step": loop._next_step,
            "next_row": loop._sampler.floor,
        }


def start_controller(config: RunConfig) -> Any:
    """Fold the control log as the controller does, and `relax run` next to it."""
    from workers.controller import ControllerLoop, open_controller

    with open_controller(config, index=0) as worker:
        loop = ControllerLoop(worker)
        worker.control.follow(loop._inbox.put)
        loop._take()
        state: RunState = loop._state
        return {
            "num_steps": state.num_steps,
            "trained": state.outcomes["trained"],
            "steps_held": len(state.steps),
            "workers": len(state.workers),
        }


def start_metrics(config: RunConfig) -> Any:
    """Continue with the file of metrics where it was saved."""
    from relax_events.roles.worker_factory import open_worker
    from relax_events.telemetry.endpoint import MetricsFile
    from workers.metrics import FOLLOWED, MetricsLoop

    with open_worker("metrics", config, index=0, follow=FOLLOWED) as worker:
        reader = ControlFollower(worker.connection, worker.plan, worker.records.codec)
        ends = {
            entity: reader._reader.watermarks(worker.plan.topic(entity), 0)[1]
            for entity in filter(worker.plan.has, FOLLOWED)
        }
        reader.close()
        path = config.run_directory / "metrics.jsonl"
        with MetricsFile(path) as file:
            file.save({entity: max(end - 500, 0) for entity, end in ends.items()})
        worker.drain.start()
        MetricsLoop(worker).run()
        lines = map(json.loads, path.read_bytes().splitlines())
        return {"lines": sum(line.get("worker_id") != worker.worker_id for line in lines)}


def start_follower(config: RunConfig) -> Any:
    """Follow control as every worker does; a rollout worker does nothing more."""
    connection, inbox = (
        Connection.from_config(config.broker, client_id=f"{config.run.id}.follower"),
        queue.SimpleQueue[Event](),
    )
    follower = ControlFollower(connection, TopicPlan.from_config(config), EventCodec())
    follower.start(inbox.put)
    version = follower.policy_version
    follower.close()
    return {"policy_version": version, "events": inbox.qsize()}


STARTS: dict[str, Callable[[RunConfig], Any]] = {
    "trainer": start_trainer,
    "prompter": start_prompter,
    "controller": start_controller,
    "metrics": start_metrics,
    "follower": start_follower,
}


def main() -> None:
    """Start roles one after the other, and print a line for each."""
    *names, path = sys.argv[1:]
    config = RunConfig.model_validate_json(Path(path).read_text())
    import workers.controller
    import workers.metrics
    import workers.prompter  # noqa: F401  what importing takes is not the log's doing

    decoded, decode = 0, EventCodec.decode

    def counting(codec: EventCodec, data: bytes | None) -> Event:
        nonlocal decoded
        decoded += 1
        return decode(codec, data)

    EventCodec.decode = counting  # type: ignore[method-assign]
    for name in names:
        decoded = 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        before, started = peak_mib(), time.monotonic()
        found = STARTS[name](config)
        taken = {
            "role": name,
            "seconds": round(time.monotonic() - started, 2),
            "decoded": decoded,
            "before_mib": before,
            "peak_mib": peak_mib(),
        }
        print(json.dumps(taken | found), flush=True)


def peak_mib() -> int:
    """Return the most memory that this process has held since its peak was cleared, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


if __name__ == "__main__":
    main()
