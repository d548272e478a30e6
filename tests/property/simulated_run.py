"""A run whose roles are the product's own loops, over Kafka in memory, one turn at a time.

Each process is a thread, but only one ever runs: it receives the turn, and returns it from the tick
that every work loop makes once a round. So the caller of `turn` decides the interleaving, and the
same calls give the same run.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import event_samples
import numpy as np
import pytest
import structlog
import torch
from memory_kafka import (
    Killed,
    MemoryAdmin,
    MemoryConsumer,
    MemoryKafka,
    MemoryMarkers,
    MemoryProducer,
    Process,
)
from small_settings import small_run

from relax_events.data.rows import PromptRow
from relax_events.errors import BrokerError, CorruptRecord, PoisonSample, SchemaError, StepNotFinite
from relax_events.events.codec import EventCodec
from relax_events.events.generations import mark_generation
from relax_events.events.parts import ChatMessage, FinishReason, TopicOffset
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PromptGroupIssued,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
)
from relax_events.kafka import consumer, log_reader, producer, transactions
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.workarounds import lost_assignments, stale_leaders
from relax_events.objects import ObjectStore
from relax_events.projections.ledger import Ledger
from relax_events.roles import prompt_records
from relax_events.roles.worker_factory import StoreClaimCheck
from relax_events.runtime import control_follower as control
from relax_events.runtime import processors, worker
from relax_events.runtime.lifecycle import Lifecycle
from relax_events.runtime.processors import SampleLoop
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan
from relax_events.training import commit, publishing
from relax_events.training.backend.protocol import StepMetrics
from relax_events.training.backend.state import StateSource, TrainerState
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.batch import live_batches
from relax_events.training.device_turns import DeviceTurns
from relax_events.training.ranks import SingleRank
from workers import advantage, prompter, trainer

SETTINGS = {
    "run": {
        "id": "simulated",
        "num_steps": 5,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_staleness": 1,
    },
    "model": {"path": "model"},
    "data": {"source": "jsonl:rows"},
    "broker": {"partitions_per_version": 2, "queue_partitions": 1},
    "workers": {"heartbeat_seconds": 3600},
    "trainer": {"checkpoint_every": 1_000_000, "max_tokens_per_micro_batch": 8},
}
SAMPLES = ("rollout.samples", "reward.scores", "advantage.samples")
LEDGER_TOPICS = (
    "prompt.groups",
    *SAMPLES,
    "prompt.end-requests",
    "control.policy-versions",
    "control.train-steps",
    "control.prompt-group-outcomes",
)
UNSCORABLE = "unscorable"
LOST: dict[str, Any] = {
    "finish_reason": FinishReason.LOST,
    "tokens": np.array([5, 6], np.int32),
    "loss_mask": np.zeros(2, np.uint8),
    "rollout_logprobs": np.zeros(2, np.float32),
    "version_segments": [],
    "error": "its environment is gone",
}
HUGE_ROW = 6
TURN_SECONDS = 100.0


class Endpoint:
    """Serves nothing."""

    port = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def close(self) -> None:
        pass


class SimulatedProcess:
    """A worker process that lives from turn to turn."""

    running: SimulatedProcess | None = None

    def __init__(
        self, kafka: MemoryKafka, name: str, main: Callable[[SimulatedProcess], None]
    ) -> None:
        self.process, self._kafka, self._main = Process(name), kafka, main
        self.worker: Worker | None = None
        self.failure: BaseException | None = None
        self._has_ended = False
        """Whether its code has ended; its thread may live on for a moment."""
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._has_ended and not self.process.is_dead

    def turn(self) -> None:
        """Let the process run to its next tick, or to its end."""
        SimulatedProcess.running, self._kafka.current = self, self.process
        self._mine.release()
        assert self._theirs.acquire(timeout=TURN_SECONDS), (
            f"{self.process.name} hangs:\n{self._stack()}"
        )
        if self.failure is not None:
            raise self.failure

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "its thread has ended"

    def hand_back(self) -> None:
        """Called by the process itself, between two rounds of its loop."""
        self._theirs.release()
        self._mine.acquire()
        if self.process.is_dead:
            raise Killed(self.process.name)

    def kill(self) -> None:
        """End the process between two rounds."""
        self.process.is_dead = True
        while self._thread.is_alive():
            self._mine.release()
            self._thread.join(0.01)

    def _run(self) -> None:
        self._mine.acquire()
        try:
            if not self.process.is_dead:
                self._main(self)
        except (
            Killed,
            BrokerError,
        ):  # SIGKILL, or the worker's own end after an error that a restart fixes
            self.process.is_dead = True
        except BaseException as error:  # handed to the caller of the turn
            self.failure = error
        finally:
            self._has_ended = True
            self._theirs.release()


def is_untrainable(sample: SampleReady) -> bool:
    """Return whether the backend rejects a sample that passed all earlier checks: in some prompt
    groups the last one."""
    return (
        sample.key.sample_index == sample.key.samples_per_prompt - 1
        and zlib.crc32(sample.prompt_group_id.encode()) % 5 == 0
    )


def is_not_finite(sample_ids: Sequence[str]) -> bool:
    """Tell whether the gradient of a step's samples is no finite number: that of every fourth batch
    or so."""
    return zlib.crc32(" ".join(sample_ids).encode()) % 4 == 0


class HashingBackend:
    """A trainer backend whose weights show which samples were trained in which order."""

    vocab_size = 100
    experts = None

    def __init__(self) -> None:
        self.policy_version, self._digest = 0, 0
        self._names: list[str] = []

    def check(self, micro_batch: Sequence[SampleReady]) -> None:
        if untrainable := [sample.sample_id for sample in micro_batch if is_untrainable(sample)]:
            raise PoisonSample(f"sample {untrainable[0]} can't be trained on")

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        self.check(micro_batch)
        self._names += [sample.sample_id for sample in micro_batch]

    def discard(self) -> None:
        self._names = []

    def step(self) -> StepMetrics:
        if is_not_finite(self._names):
            raise StepNotFinite(
                f"train step {self.policy_version}: loss and gradients must be finite"
            )
        self._digest = zlib.crc32(" ".join(self._names).encode(), self._digest)
        self.policy_version, self._names = self.policy_version + 1, []
        return StepMetrics(
            **dict.fromkeys(StepMetrics.__dataclass_fields__, 0) | {"algorithm_metrics": {}}
        )

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        pass

    def skip_step(self) -> None:
        self.discard()
        self.policy_version += 1

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        yield {"digest": torch.tensor([self._digest])}

    def state(self) -> TrainerState:
        return TrainerState(
            policy_version=self.policy_version,
            tensors={f"model.{name}": tensor for name, tensor in collect_weights(self).items()},
        )

    def load_state(self, state: StateSource) -> None:
        raise AssertionError("weights that replay made differ from those that were published")


class Prompts:
    """An endless stream of prompts."""

    def __getitem__(self, row: int) -> PromptRow:
        return PromptRow(
            messages=[ChatMessage.of_text("user", f"row {row}")],
            answer=UNSCORABLE if row % 4 == 3 else "",
            metadata="{}",
        )


class LateWriter:
    """Replaces the thread that writes weights while the next step runs: a write is done at the
    second query."""

    def __init__(self, **_: Any) -> None:
        pass

    def submit(self, write: Callable[..., Any], *arguments: Any, **keywords: Any) -> LateWriter:
        self._write, self._num_asked = functools.cache(lambda: write(*arguments, **keywords)), 0
        return self

    def done(self) -> bool:
        self._num_asked += 1
        return self._num_asked > 1

    def result(self) -> Any:
        return self._write()

    def shutdown(self, **_: Any) -> None:
        pass


class RememberingLedger(Ledger):
    """The ledger, and the names of everything that went through it."""

    def __init__(self, max_staleness: int, **terms: Any) -> None:
        super().__init__(max_staleness, **terms)
        self.issued: set[str] = set()
        self.rolled_out: set[str] = set()
        self.trained: set[str] = set()
        self.trained_groups: set[str] = set()
        self.versions: list[int] = []
        self.steps: list[int] = []
        self.skipped: list[int] = []
        self.held: list[int] = []
        self.not_finite: list[int] = []

    def apply(self, event: Event, at: TopicOffset, *, key: str = "") -> None:
        super().apply(event, at, key=key)
        if isinstance(event, PromptGroupIssued):
            self.issued.add(event.prompt_group_id)
        elif isinstance(event, SampleRolledOut):
            self.rolled_out.add(event.sample_id)
        elif isinstance(event, PolicyVersionPublished):
            self.versions.append(event.policy_version)
        elif isinstance(event, TrainStepCommitted):
            self.steps.append(event.train_step)
            self.skipped += [event.train_step] * event.update_skipped
            self.held += [event.train_step] * event.update_held
            self.not_finite += [event.train_step] * (
                is_not_finite(event.sample_ids) and not event.update_held
            )
            self.trained.update(event.sample_ids)
            self.trained_groups.update(event.prompt_group_ids)


class SimulatedRun:
    """The processes of a run, and its log."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, overlap: bool = False, **run: Any
    ) -> None:
        """Create the run's topics; no process is started.

        Args:
            monkeypatch: Replaces the Kafka client with Kafka in memory until it is undone.
            overlap: Whether the trainer writes weights while it trains its next step.
            run: Keys of the run file's section `run`, in place of `SETTINGS`.
        """
        self.config = small_run(
            {**SETTINGS, "run": SETTINGS["run"] | run, "weights": {"async_publish": overlap}}
        )
        self.kafka, self.plan, self.codec = (
            MemoryKafka(),
            TopicPlan.from_config(self.config),
            EventCodec(),
        )
        self.store = ObjectStore.open("memory://")
        for spec in self.plan.specs():
            self.kafka.create(spec.name, spec.num_partitions)
        run = self.config.run
        self.ledger = RememberingLedger(
            run.max_staleness, last_version=run.num_steps, in_order=run.sample_order == "fifo"
        )
        self._read: dict[tuple[str, int], int] = {}
        self._put_in(monkeypatch)
        self.processes: dict[str, SimulatedProcess] = {}
        self.open_leases: dict[int, PromptGroupIssued] = {}
        self.kafka.current = Process("rollout")
        self.engine = self._worker("rollout", 0)

    def _put_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the real client and every wait."""
        structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
        monkeypatch.setattr(
            lost_assignments, "CHECK_SECONDS", math.inf
        )  # it goes by the wall's clock, which has no say here
        monkeypatch.setattr(stale_leaders, "CHECK_SECONDS", math.inf)
        monkeypatch.setattr(stale_leaders, "read_metadata_of_each", lambda *_: {})
        monkeypatch.setattr(consumer, "Consumer", partial(MemoryConsumer, self.kafka))
        monkeypatch.setattr(log_reader, "Consumer", partial(MemoryConsumer, self.kafka))
        monkeypatch.setattr(producer, "Producer", partial(MemoryProducer, self.kafka))
        monkeypatch.setattr(transactions, "Producer", partial(MemoryProducer, self.kafka))
        monkeypatch.setattr(transactions, "TransactionMarkers", MemoryMarkers)
        for module in (commit, prompt_records):
            monkeypatch.setattr(module, "Admin", lambda _: MemoryAdmin(self.kafka))
        monkeypatch.setattr(publishing, "ThreadPoolExecutor", LateWriter)
        monkeypatch.setattr(worker, "WorkerEndpoint", Endpoint)
        monkeypatch.setattr(worker, "configure_logs", lambda *_, **__: None)
        monkeypatch.setattr(control.ControlFollower, "_follow", lambda _: None)
        monkeypatch.setattr(control.ControlFollower, "wait_for_version", _wait_for_version)
        monkeypatch.setattr(Lifecycle, "tick", _tick)
        for module in (processors, prompter, advantage, trainer, live_batches):
            monkeypatch.setattr(module, "IDLE_SECONDS", 0)

    def _worker(self, role: str, index: int) -> Worker:
        claim_check = StoreClaimCheck(
            self.store, claim_check_threshold_bytes=self.config.objects.claim_check_threshold_bytes
        )
        follow = ("control.prompt-group-outcomes",) if role == "prompter" else ()
        return Worker(role, self.config, claim_check=claim_check, index=index, follow=follow)

    def start(self, role: str, index: int = 0) -> str:
        """Start a process of a role; an existing one of the same name becomes a zombie."""
        mains = {
            "prompter": self._prompter,
            "reward": self._reward,
            "advantage": self._advantage,
            "trainer": self._trainer,
        }
        name = f"{role}-{index}"

        def main(process: SimulatedProcess) -> None:
            with self._worker(role, index) as opened:
                process.worker = opened
                mains[role](opened)

        self.processes[name] = SimulatedProcess(self.kafka, name, main)
        return name

    def _prompter(self, opened: Worker) -> None:
        prompter.PrompterLoop(opened, Prompts()).run()

    def _advantage(self, opened: Worker) -> None:
        advantage.AdvantageLoop(opened).run()

    def _trainer(self, opened: Worker) -> None:
        turns = DeviceTurns(opened, SingleRank())
        trainer.TrainLoop(opened, HashingBackend(), SingleRank(), self.store, turns).run()

    def _reward(self, opened: Worker) -> None:
        def score(samples: Sequence[SampleRolledOut]) -> list[ProducerRecord]:
            return opened.records.build_for_samples(
                "reward.scores", [self._scored(sample) for sample in samples]
            )

        SampleLoop(opened, score).run()

    def _scored(self, sample: SampleRolledOut) -> SampleScored:
        digest, is_scored = zlib.crc32(sample.sample_id.encode()), sample.finish_reason.is_scored
        failed = is_scored and (sample.answer == UNSCORABLE or digest % 9 == 0)
        reward = digest % 10 / 10
        if sample.key.row % 8 == HUGE_ROW:  # as releases wrote it that did not bound rewards
            reward = 1e308
        return SampleScored(
            key=sample.key,
            reward=None if failed or not is_scored else reward,
            error="no verdict" if failed else None,
            reward_name="hash",
        )

    @property
    def published_version(self) -> int:
        """The newest version on the log, -1 before the first."""
        return max(self.ledger.versions, default=-1)

    @property
    def num_steps(self) -> int:
        """Committed steps."""
        return len(self.ledger.steps)

    def update_ledger(self) -> None:
        """Take what is new on the log into the ledger, and the queue's new prompt groups into the
        open leases."""
        for entity in LEDGER_TOPICS:
            for topic_partition in self.topic_partitions(entity):
                for entry in self.kafka.visible(
                    topic_partition, self._read.get(topic_partition, 0)
                ):
                    self._read[topic_partition] = entry.offset + 1
                    for event in self.decoded(entry.stored):
                        self.ledger.apply(
                            event,
                            TopicOffset(*topic_partition, entry.offset),
                            key=(entry.key or b"").decode(),
                        )
                        if isinstance(event, PromptGroupIssued):
                            self.open_leases[entry.offset] = event

    def topic_partitions(self, entity: str) -> list[tuple[str, int]]:
        """Return the partitions of a topic."""
        return [
            topic_partition
            for topic_partition in self.kafka.partitions
            if topic_partition[0] == self.plan.topic(entity)
        ]

    def decoded(self, value: bytes | None) -> Sequence[Event]:
        """Return a record's events, one for each sample; none if it can't be decoded."""
        try:
            return split_samples(self.codec.decode(value or b""))
        except (CorruptRecord, SchemaError):
            return ()

    def events(self, entity: str) -> list[Event]:
        """Return the readable events of a topic."""
        entries = [
            entry
            for topic_partition in self.topic_partitions(entity)
            for entry in self.kafka.visible(topic_partition, 0)
        ]
        return [event for entry in entries for event in self.decoded(entry.stored)]

    def roll_out(
        self,
        issued: PromptGroupIssued,
        *,
        policy_version: int,
        num_samples: int | None = None,
        lost: Collection[int] = (),
    ) -> None:
        """Write a prompt group's samples, or the first of them, as an engine on that version
        does; those at the indexes in `lost` are their prompts alone."""
        samples = [
            event_samples.rolled_out(
                issued.prompt_group_id,
                index,
                version=policy_version,
                of=issued.samples_per_prompt,
                row=issued.row,
                answer=issued.answer,
                **(LOST if index in lost else {}),
            )
            for index in range(issued.samples_per_prompt)
        ]
        mark_generation(samples)
        for record in self.engine.records.build_for_samples(
            "rollout.samples", samples[:num_samples]
        ):
            self.engine.records.producer.send(record)
        self.engine.records.producer.flush()

    def close(self) -> None:
        """End every process."""
        for process in self.processes.values():
            process.kill()
        self.engine.control.follower.close()
        structlog.reset_defaults()


def _tick(self: Lifecycle, *, working: bool) -> None:
    """Stand in for `Lifecycle.tick`: end the round and pass the turn; then process control
    records, as the follower's thread would."""
    running = SimulatedProcess.running
    assert running is not None
    running.hand_back()
    self._control.follower.poll_once(timeout_seconds=0)


def _wait_for_version(
    self: control.ControlFollower, version: int, *, timeout_seconds: float
) -> bool:
    """Stand in for the wait of a thread on another."""
    self.poll_once(timeout_seconds=0)
    return self.policy_version >= version
