"""Followers of the control log read the history, then new records, in one order for all workers;
and how each worker reacts.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog.testing
from broker_steps import TIMEOUT_SECONDS, turn_until
from event_samples import committed, ended, published, rolled_out

from relax_events.config import RunConfig
from relax_events.errors import (
    BrokerUnavailable,
    ClientFailed,
    ConfigError,
    CorruptRecord,
    PoisonSample,
    SchemaError,
)
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Command, Outcome, StoredArray, WorkerState
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import (
    Event,
    MetricsReported,
    PolicyVersionPublished,
    PromptGroupEnded,
    RunCommanded,
    SampleRolledOut,
    WorkerHeartbeat,
)
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded.ports import choose_port
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.objects import ObjectStore
from relax_events.objects.marker import claim_store
from relax_events.roles.worker_factory import StoreClaimCheck, open_store, open_worker
from relax_events.runtime.control_follower import GATHER, ControlFollower
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan
from tests.schema_changes import end_by_newer_release

CODEC = EventCodec()
NUM_GATHERED = 30


@pytest.fixture
def config(apply_run: Callable[..., RunConfig]) -> RunConfig:
    return apply_run(run={"max_staleness": 1}, objects={"claim_check_threshold_bytes": 1000})


@pytest.fixture
def plan(config: RunConfig) -> TopicPlan:
    return TopicPlan.from_config(config)


@pytest.fixture
def publish(producer: RecordProducer, plan: TopicPlan) -> Callable[[str, Event], None]:
    def write(entity: str, event: Event) -> None:
        producer.write([ProducerRecord(plan.topic(entity), CODEC.encode(event))])

    return write


@pytest.fixture
def worker(config: RunConfig, tmp_path: Path) -> Iterator[Worker]:
    store = ObjectStore.open((tmp_path / "objects").as_uri())
    with Worker(
        "reward",
        config,
        claim_check=StoreClaimCheck(store, claim_check_threshold_bytes=1000),
        index=3,
    ) as opened:
        yield opened


def read(connection: Connection, topic: str, partition: int = 0) -> list[Record]:
    reader = LogReader(connection)
    try:
        return reader.read_to_end([(topic, partition)])
    finally:
        reader.close()


def next_of(inbox: queue.SimpleQueue[Event], count: int) -> list[Event]:
    return [inbox.get(timeout=TIMEOUT_SECONDS) for _ in range(count)]


def test_gathering_follower_takes_records_that_are_written_one_by_one_together(
    connection: Connection,
    plan: TopicPlan,
    publish: Callable[[str, Event], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[int] = []
    fetch = LogReader.fetch

    def count(self: LogReader, *arguments: Any, **named: Any) -> list[Record]:
        records = fetch(self, *arguments, **named)
        answers.append(len(records))
        return records

    monkeypatch.setattr(LogReader, "fetch", count)
    follower = ControlFollower(connection, plan, EventCodec(), wait=GATHER)
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    follower.start(inbox.put)
    try:
        publish("control.policy-versions", published(0))
        next_of(inbox, 1)  # its client has found the topic
        answers.clear()
        began = time.monotonic()
        for version in range(1, NUM_GATHERED + 1):
            publish("control.policy-versions", published(version))
        next_of(inbox, NUM_GATHERED)
        waits = (time.monotonic() - began) / (GATHER.ms / 1000)
        assert len(list(filter(None, answers))) <= 2 + waits
    finally:
        follower.close()


def test_stopped_follower_reads_the_events_committed_before_its_end(
    connection: Connection, plan: TopicPlan, publish: Callable[[str, Event], None]
) -> None:
    follower = ControlFollower(
        connection, plan, EventCodec(), also=["control.prompt-group-outcomes"]
    )
    heard: list[Event] = []
    follower.start(heard.append)
    try:
        follower.stop()
        publish("control.policy-versions", published(0))
        publish("control.prompt-group-outcomes", ended("000000-0000-0", Outcome.FAILED))
        assert heard == []
        follower.read_remaining()
        assert {type(event) for event in heard} == {PolicyVersionPublished, PromptGroupEnded}
        follower.read_remaining()
        assert len(heard) == 2
    finally:
        follower.close()


def test_follower_reports_past_then_new_events_in_log_order(
    connection: Connection, plan: TopicPlan, publish: Callable[[str, Event], None]
) -> None:
    for version in (0, 1):
        publish("control.policy-versions", published(version))
    follower = ControlFollower(
        connection, plan, EventCodec(), also=["control.prompt-group-outcomes"]
    )
    assert follower.policy_version == 1
    publish("control.policy-versions", published(2))
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    follower.start(inbox.put)
    assert [event.policy_version for event in next_of(inbox, 3)] == [0, 1, 2]
    publish("control.prompt-group-outcomes", ended("000001-0002-0"))
    assert next_of(inbox, 1) == [ended("000001-0002-0")]
    follower.close()


def test_follower_ignores_a_version_that_is_not_newer(
    connection: Connection, plan: TopicPlan, publish: Callable[[str, Event], None]
) -> None:
    follower = ControlFollower(connection, plan, EventCodec())
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    follower.start(inbox.put)
    for version in (0, 1, 1, 0, 2):
        publish("control.policy-versions", published(version))
    assert [event.policy_version for event in next_of(inbox, 3)] == [0, 1, 2]
    assert follower.latest == published(2)
    assert inbox.empty()
    follower.close()


def test_follower_wakes_a_caller_waiting_for_a_version(
    connection: Connection, plan: TopicPlan, publish: Callable[[str, Event], None]
) -> None:
    follower = ControlFollower(connection, plan, EventCodec())
    follower.start()
    assert not follower.wait_for_version(0, timeout_seconds=0.05)
    publish("control.policy-versions", published(4))
    assert follower.wait_for_version(3, timeout_seconds=TIMEOUT_SECONDS)
    follower.close()


def test_sample_of_a_version_that_was_never_published_is_refused_without_waiting(
    worker: Worker, publish: Callable[[str, Event], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("control.policy-versions", published(0))
    worker.control.follow()
    turn_until(lambda: worker.control.policy_version == 0)
    waited: list[int] = []
    wait = worker.control.follower.wait_for_version
    monkeypatch.setattr(
        worker.control.follower,
        "wait_for_version",
        lambda version, **how: waited.append(version) or wait(version, **how),
    )
    for version in (7, 8, 9):
        with pytest.raises(
            PoisonSample,
            match=rf"is of policy version {version}, which was never published; the newest is 0",
        ):
            worker.control.wait_until_published(version)
    assert waited == []
    publish("control.policy-versions", published(1))
    worker.control.wait_until_published(1)  # whether or not the follower has read it
    assert worker.control.policy_version == 1


def test_sample_of_the_first_version_waits_for_its_publication(
    worker: Worker, publish: Callable[[str, Event], None]
) -> None:
    worker.control.follow()
    worker.control.wait_until_published(0)  # of a log without versions nothing is known
    assert worker.control.policy_version == -1
    publish("control.policy-versions", published(0))
    worker.control.wait_until_published(0)  # whether or not the follower has read it
    assert worker.control.policy_version == 0


def test_follower_whose_client_lost_all_brokers_continues_with_a_new_client(
    connection: Connection,
    plan: TopicPlan,
    publish: Callable[[str, Event], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relax_events.runtime.control_follower.SILENT_SECONDS", 0.2)
    publish("control.policy-versions", published(0))
    follower = ControlFollower(connection, plan, EventCodec())
    follower._reader.close()
    follower._reader = LogReader(
        Connection(f"127.0.0.1:{choose_port()}", request_timeout_seconds=1.0)
    )
    follower._starts = {(plan.topic("control.policy-versions"), 0): 0}
    follower._thread.start()
    for version in (1, 2):
        publish("control.policy-versions", published(version))
        assert follower.wait_for_version(version, timeout_seconds=TIMEOUT_SECONDS)
    follower.close()


def test_worker_cut_off_from_the_brokers_fails_without_rejecting_the_sample(
    worker: Worker, publish: Callable[[str, Event], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may lose all brokers and never find them again: the worker must end, and the next
    one takes the sample."""
    publish("control.policy-versions", published(0))
    worker.control.follow()
    turn_until(lambda: worker.control.policy_version == 0)
    worker.control.follower.stop()
    publish("control.policy-versions", published(1))
    monkeypatch.setattr("relax_events.runtime.control_view.ANNOUNCEMENT_SECONDS", 0.1)
    cut_off = Connection(f"127.0.0.1:{choose_port()}", request_timeout_seconds=1.0)
    worker.control.follower._published_versions._reader = LogReader(cut_off)
    with pytest.raises(
        ClientFailed,
        match=(
            "policy version 1 is published, and the client of the control topics has not "
            "received it"
        ),
    ):
        worker.control.wait_until_published(1)
    monkeypatch.setattr(worker.control.follower._published_versions, "_connection", cut_off)
    worker.control.follower._published_versions.close()
    with pytest.raises(BrokerUnavailable):
        worker.control.wait_until_published(1)


def test_published_version_unknown_to_the_follower_is_found_on_the_log(
    connection: Connection, plan: TopicPlan, publish: Callable[[str, Event], None]
) -> None:
    publish("control.policy-versions", published(0))
    follower = ControlFollower(connection, plan, EventCodec())
    assert not follower.is_published(1)
    for version in (1, 2):
        publish("control.policy-versions", published(version))
        assert [follower.is_published(version), follower.is_published(version + 1)] == [True, False]
    assert follower.policy_version == 0, "its thread has not begun"
    follower.close()


def test_follower_continues_after_a_corrupt_control_record(
    connection: Connection,
    producer: RecordProducer,
    plan: TopicPlan,
    publish: Callable[[str, Event], None],
) -> None:
    topics = ("control.policy-versions", "control.commands", "control.schemas")
    for topic in topics:
        garbage = ProducerRecord(plan.topic(topic), b"no event", key="x")
        producer.write([garbage] * (1 if topic == "control.schemas" else 80))
    publish("control.policy-versions", published(0))
    with structlog.testing.capture_logs() as logs:
        follower = ControlFollower(connection, plan, EventCodec())
    assert follower.policy_version == 0
    follower.close()
    rejected = [line["location"] for line in logs if line["event"] == "control_record.rejected"]
    assert sorted(rejected) == sorted(f"{plan.topic(topic)}[0]@0" for topic in topics), (
        "one line for each topic"
    )


@pytest.mark.parametrize(
    "value",
    [b"\xc3\x01" + bytes(8) + b"of another release", b"\0\0\0\0\x63body", CODEC.encode(ended())],
    ids=["unknown fingerprint", "unknown id", "read as another event"],
)
def test_history_that_can_not_be_read_is_not_taken_for_no_history(
    connection: Connection,
    producer: RecordProducer,
    plan: TopicPlan,
    publish: Callable[[str, Event], None],
    value: bytes,
) -> None:
    """A trainer that saw no version would begin again at version 0, on the log of a run."""
    topic = plan.topic("control.policy-versions")
    producer.write([ProducerRecord(topic, value, key="x")])
    with pytest.raises(
        SchemaError, match=r"policy-versions\[0\]@0 can't be read \(.*: the run has a history"
    ):
        ControlFollower(connection, plan, EventCodec())
    publish("control.policy-versions", published(3))
    follower = ControlFollower(connection, plan, EventCodec())
    assert follower.policy_version == 3
    follower.close()


class NumberingRegistry:
    """A registry that gives the next number to each schema."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def register(self, name: str, schema_json: str) -> int:
        """Return the next number."""
        self.names.append(name)
        return len(self.names)

    def schema(self, schema_id: int) -> str | None:
        """Return nothing: it is asked for no id here."""

    def close(self) -> None:
        """Close nothing."""


def test_worker_whose_ids_another_one_claims_on_the_log_ends_with_the_reason(
    connection: Connection, producer: RecordProducer, plan: TopicPlan
) -> None:
    """Workers of two registries began on an empty log together; this one's ids came second."""
    codec = EventCodec(NumberingRegistry())
    follower = ControlFollower(connection, plan, codec)
    codec.frame()
    follower.start()
    theirs = next(schema for schema in codec.schemas.values() if schema["name"] == "RunCommanded")
    schema_ids = json.loads(
        next(text for text in codec.published_form().values() if b'"PromptGroupEnded"' in text)
    )["registry_schema_ids"]
    text = json.dumps(theirs | {"registry_schema_ids": schema_ids})
    fingerprint = EventCodec().learn(text)
    producer.write(
        [ProducerRecord(plan.topic("control.schemas"), text.encode(), key=fingerprint.hex())]
    )

    turn_until(lambda: connection.auth_failures._fatal is not None)
    problem = (
        "schema id .* stands for PromptGroupEnded .* and for RunCommanded .*; a run keeps to one"
    )
    with pytest.raises(SchemaError, match=problem):
        follower.check()
    follower.close()


def test_follower_ignores_events_that_their_writer_is_not_allowed_to_send(
    connection: Connection,
    plan: TopicPlan,
    producer: RecordProducer,
    publish: Callable[[str, Event], None],
) -> None:
    """Reward may write its own heartbeats and metrics, so only those about its own workers count
    there."""
    idle: dict[str, Any] = {
        "host": "h",
        "pid": 1,
        "state": WorkerState.IDLE,
        "num_processed": 0,
        "num_in_flight": 0,
        "last_progress_at": 0,
    }
    named = (("trainer-0", "trainer"), ("trainer-0", "reward"), ("reward-0", "reward"))
    heartbeats = [WorkerHeartbeat(worker_id=name, role=role, **idle) for name, role in named]
    for event in (
        *heartbeats,
        committed(7),
        ended("000001-0002-0"),
        RunCommanded(command=Command.STOP, reason="forged"),
        published(9),
    ):
        producer.write(
            [
                ProducerRecord(
                    plan.topic("control.heartbeats.reward"), CODEC.encode(event), key="reward-0"
                )
            ]
        )
    forged = MetricsReported(
        worker_id="trainer-0", role="trainer", values={"steps_not_finite": 1.0}
    )
    for event in (forged, heartbeats[2]):
        publish("control.metrics.reward", event)
    follower = ControlFollower(
        connection, plan, EventCodec(), also=["control.heartbeats.reward", "control.metrics.reward"]
    )
    heard: list[Event] = []
    follower.start(heard.append)
    assert (heard, follower.policy_version) == ([heartbeats[2]], -1)
    follower.close()


def test_published_schema_can_not_be_deleted_or_overwritten(
    connection: Connection, plan: TopicPlan, producer: RecordProducer, worker: Worker
) -> None:
    topic, published_form = plan.topic("control.schemas"), worker.records.codec.published_form()
    forged = next(schema for name, schema in published_form.items() if b"WorkerHeartbeat" in schema)
    keys = [name.hex() for name in published_form]
    producer.write(
        ProducerRecord(topic, value, key=key) for key in keys for value in (b"", forged, b"{}")
    )
    first = {}
    for record in read(connection, topic):
        first.setdefault(record.key, record.value)
    assert first == {name.hex(): schema for name, schema in published_form.items()}
    follower = ControlFollower(connection, plan, codec := EventCodec())
    assert codec.decode(worker.records.codec.encode(ended())) == ended()
    assert all(follower.has_schema(name, schema) for name, schema in published_form.items())
    follower.close()


def test_worker_that_starts_again_publishes_no_schema_twice(
    worker: Worker, config: RunConfig, connection: Connection, plan: TopicPlan
) -> None:
    before = len(read(connection, plan.topic("control.schemas")))
    with Worker("reward", config, claim_check=worker.records._claim_check, index=4):
        assert (
            len(read(connection, plan.topic("control.schemas")))
            == before
            == len(worker.records.codec.published_form())
        )


def test_worker_obeys_only_pause_and_resume_commands_addressed_to_it(
    worker: Worker, publish: Callable[[str, Event], None]
) -> None:
    worker.control.follow()
    for command, expected in ((Command.PAUSE, True), (Command.RESUME, False)):
        publish("control.commands", RunCommanded(command=command, reason="of a test"))
        turn_until(lambda expected=expected: worker.control.is_paused is expected)
    publish(
        "control.commands",
        RunCommanded(command=Command.PAUSE, role="trainer", reason="another role"),
    )
    publish("control.commands", RunCommanded(command=Command.DRAIN, reason="read after the pause"))
    assert worker.drain.wait(TIMEOUT_SECONDS)
    assert not worker.control.is_paused


def test_worker_publishes_its_schemas_and_heartbeats(
    worker: Worker, connection: Connection, plan: TopicPlan
) -> None:
    published_schemas = {
        record.key: record.value for record in read(connection, plan.topic("control.schemas"))
    }
    assert published_schemas == {
        name.hex(): schema for name, schema in worker.records.codec.published_form().items()
    }
    worker.heartbeat.record_processed(5, seconds=0.1)
    worker.heartbeat.set_in_flight(2)

    def busy() -> list[WorkerHeartbeat]:
        records = read(connection, plan.topic("control.heartbeats.reward"))
        events = [CODEC.decode(record.value) for record in records]
        return [one for one in events if isinstance(one, WorkerHeartbeat) and one.num_in_flight]

    turn_until(lambda: bool(busy()), lambda: worker.lifecycle.tick(working=True))
    heartbeat = busy()[-1]
    assert (
        heartbeat.worker_id,
        heartbeat.role,
        heartbeat.num_processed,
        heartbeat.num_in_flight,
    ) == (
        "reward-3",
        "reward",
        5,
        2,
    )


def test_worker_obeys_only_drain_and_restart_commands_addressed_to_it(
    worker: Worker, publish: Callable[[str, Event], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr("relax_events.runtime.control_view.os._exit", exits.append)
    worker.control.follow()
    for other in (
        RunCommanded(command=Command.DRAIN, role="trainer", reason="another role"),
        RunCommanded(
            command=Command.RESTART, role="reward", worker_id="reward-4", reason="another worker"
        ),
        RunCommanded(
            command=Command.RESTART,
            role="reward",
            worker_id="reward-3",
            reason="meant for our predecessor",
            commanded_at=1,
        ),
        RunCommanded(command=Command.PAUSE, reason="no drain"),
    ):
        publish("control.commands", other)
    turn_until(lambda: worker.control.is_paused)
    assert not worker.drain.requested
    publish(
        "control.commands",
        RunCommanded(command=Command.RESTART, role="reward", worker_id="reward-3", reason="hung"),
    )
    turn_until(lambda: bool(exits))
    assert (exits, worker.drain.requested) == ([8], False)
    publish(
        "control.commands",
        RunCommanded(
            command=Command.DRAIN, role="reward", worker_id="reward-3", reason="scaled down"
        ),
    )
    assert worker.drain.wait(TIMEOUT_SECONDS)


def test_worker_whose_follower_fails_ends_with_the_reason(
    worker: Worker, publish: Callable[[str, Event], None]
) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError(f"of {type(event).__name__}")

    worker.control.follow(fail)
    publish("control.policy-versions", published(0))
    with pytest.raises(
        ClientFailed,
        match=r"follows the control log ended with ZeroDivisionError: of PolicyVersionPublished; this process must",
    ):
        turn_until(lambda: False, lambda: worker.lifecycle.tick(working=True))


def test_worker_with_a_broken_follower_client_ends_with_the_reason(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: object, **__: object) -> list[Record]:
        raise ClientFailed("reading control.commands: _FATAL the client is of no use any more")

    worker.control.follow()
    monkeypatch.setattr(worker.control.follower._reader, "fetch", fetch)
    with pytest.raises(ClientFailed, match="the client is of no use any more"):
        turn_until(lambda: False, lambda: worker.lifecycle.tick(working=True))


def test_dead_letter_keeps_the_record_untouched(
    worker: Worker, producer: RecordProducer, connection: Connection, plan: TopicPlan
) -> None:
    source = plan.topic("rollout.samples")
    poison = bytes(reversed(range(256)))
    producer.write(
        [
            ProducerRecord(source, b"first", partition=2),
            ProducerRecord(
                source, poison, key="000001-0002-0", partition=2, headers={"policy-version": "1"}
            ),
        ]
    )
    record = read(connection, source, 2)[1]
    assert worker.records.decode(record) is None
    worker.records.producer.flush()
    (dead_letter,) = read(connection, plan.topic("reward.dead-letters"))
    assert (dead_letter.value, dead_letter.key) == (poison, "000001-0002-0")
    assert dead_letter.headers["error-text"].startswith("record of 256 bytes doesn't begin with")
    assert {name: text for name, text in dead_letter.headers.items() if name != "error-text"} == {
        "policy-version": "1",
        "origin-topic": source,
        "origin-partition": "2",
        "origin-offset": "1",
        "error-class": CorruptRecord.__name__,
        "worker-id": "reward-3",
    }
    assert (
        b'relax_dead_letters_total{reason="CorruptRecord",role="reward"} 1.0'
        in worker.metrics.render()
    )


def test_worker_learns_a_schema_that_was_published_after_its_start(
    worker: Worker, producer: RecordProducer, plan: TopicPlan
) -> None:
    """A newer writer, whose samples have a field more, publishes its schema before its first
    record."""
    schema, fingerprint, value = end_by_newer_release(
        prompt_group_id="000001-0002-0", train_step=1, group_index=2
    )
    producer.write([ProducerRecord(plan.topic("control.schemas"), schema, key=fingerprint.hex())])
    record = Record("t", 0, 0, "000001-0002-0", value, {}, 0)
    assert worker.records.decode(record) == ended("000001-0002-0")


def test_sample_record_has_the_partition_and_header_of_its_policy_version(
    worker: Worker, plan: TopicPlan
) -> None:
    record = worker.records.build_for_sample(
        "rollout.samples",
        rolled_out("000001-0002-0", version=4),
        prompt_group_id="000001-0002-0",
        policy_version=4,
    )
    assert record.topic == plan.topic("rollout.samples")
    assert record.partition in plan.partitions_of_version(4)
    assert (record.key, record.headers) == ("000001-0002-0", {"policy-version": "4"})


def test_large_arrays_travel_by_reference(worker: Worker) -> None:
    tokens = np.arange(1000, dtype=np.int32)
    sample = rolled_out(
        tokens=tokens,
        loss_mask=np.ones(1000, np.uint8),
        rollout_logprobs=np.zeros(1000, np.float32),
    )
    out = worker.records.build("rollout.samples", sample)
    (plain,) = split_samples(CODEC.decode(out.value))
    assert isinstance(plain, SampleRolledOut)
    assert isinstance(plain.tokens, StoredArray)
    assert not isinstance(plain.loss_mask, StoredArray)
    assert out.value is not None
    assert len(out.value) < 3000
    fetched = worker.records.decode(Record("t", 0, 0, "", out.value, {}, 0))
    assert isinstance(fetched, SampleRolledOut)
    np.testing.assert_array_equal(fetched.tokens, tokens)


def test_end_request_is_written_to_the_newest_versions_slot(
    worker: Worker, plan: TopicPlan, publish: Callable[[str, Event], None]
) -> None:
    worker.control.follow()
    publish("control.policy-versions", published(5))
    assert worker.control.wait_for_version(5, timeout_seconds=TIMEOUT_SECONDS)
    record = worker.records.build_end_request(
        "000004-0002-1", Outcome.FAILED, "engine: no", policy_version=3
    )
    assert (plan.parse_entity(record.topic), record.partition in plan.partitions_of_version(5)) == (
        "prompt.end-requests",
        True,
    )
    event = CODEC.decode(record.value)
    assert isinstance(event, PromptGroupEnded)
    assert (
        event.train_step,
        event.group_index,
        event.attempt,
        event.policy_version,
        event.trainer_version,
    ) == (4, 2, 1, 3, 5)
    assert not worker.control.is_expired(4)
    assert worker.control.is_expired(3)
    assert not worker.control.is_expired(None)


def test_worker_rejects_an_object_store_of_the_same_run_id_on_another_cluster(
    config: RunConfig, connection: Connection, plan: TopicPlan
) -> None:
    follower = ControlFollower(connection, plan, EventCodec())
    assert len(follower.cluster_id) == 22, "Kafka's ids are UUIDs in base64"
    follower.close()
    claim_store(open_store(config), run_id=config.run.id, cluster_id="another-cluster")
    text = rf"belongs to run {config.run.id} of Kafka cluster another-cluster, and this is a run of that name on cluster {follower.cluster_id}"
    with pytest.raises(ConfigError, match=text), open_worker("reward", config, index=0):
        pytest.fail("it went to work")
