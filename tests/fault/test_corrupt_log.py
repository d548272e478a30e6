"""Bytes of the log are altered on the broker's disk: no worker trains on them or loops over them,
and the ledger still balances.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk import BatchOnDisk, batches
from harness import BROKER_SECONDS, PATIENCE_SECONDS, FaultRun, assert_ledger_balances
from node import Node, choose_ports

from relax_events.errors import BrokerError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Outcome
from relax_events.events.types import PromptGroupEnded
from relax_events.kafka.admin import Admin
from relax_events.kafka.batch_verification import VARIABLE as EXAMINE
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.topics.plan import TopicSpec

READERS = ("reward", "reference", "actor", "advantage")
PILE_UP_SECONDS = 2.0


@pytest.fixture
def broker(directory: Path, run_id: str) -> Iterator[Node]:
    """Yield a broker that only the test starts and stops."""
    port, controller_port = choose_ports(2)
    with Node(
        directory / f"{run_id}-node", port=port, controller_port=controller_port, properties={}
    ) as node:
        yield node


def newest_batches(node: Node, topic: str, num_partitions: int) -> dict[int, BatchOnDisk]:
    """Return the last record batch of every partition that has any."""
    found = {
        partition: list(batches(node.data / f"{topic}-{partition}"))
        for partition in range(num_partitions)
    }
    return {partition: listed[-1] for partition, listed in found.items() if listed}


@pytest.mark.long
def test_altered_samples_are_never_trained_and_their_prompt_groups_fail(
    start_run: Callable[..., FaultRun], broker: Node
) -> None:
    run = start_run(run={"num_steps": 24}, broker={"bootstrap_servers": broker.bootstrap_servers})
    run.start()
    run.wait_until_steps(4)
    topic, num_partitions = run.plan.topic("rollout.samples"), run.plan.num_sample_partitions
    readers = [worker_id for worker_id in run.worker_ids if worker_id.startswith(READERS)]
    rollouts = [worker_id for worker_id in run.worker_ids if worker_id.startswith("rollout")]
    run.signal(signal.SIGSTOP, *rollouts)
    run.follow_for(PILE_UP_SECONDS)  # for each step that is trained, prompts are issued that wait
    run.process.send_signal(signal.SIGSTOP)  # so that it starts none before the batches are altered
    run.kill(*readers)
    before = {
        partition: batch.last
        for partition, batch in newest_batches(broker, topic, num_partitions).items()
    }

    run.signal(signal.SIGCONT, *rollouts)

    def unread() -> dict[int, BatchOnDisk]:
        after = newest_batches(broker, topic, num_partitions)
        return {
            partition: batch
            for partition, batch in after.items()
            if batch.first > before.get(partition, -1)
        }

    run.wait_until(lambda: bool(unread()), "rollout workers write on")
    run.follow_for(PILE_UP_SECONDS)
    # in good order: after a kill it would cut an altered batch off the segment that it still writes
    broker.stop()
    altered = unread()
    for batch in altered.values():
        batch.flip_a_bit()
    broker.start()
    run.process.send_signal(signal.SIGCONT)
    run.recovers_within(BROKER_SECONDS)

    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert ledger["records_unreadable"] == sum(
        batch.last - batch.first + 1 for batch in altered.values()
    ), "the ledger counts the gap"
    assert ledger["outcomes"]["failed"] >= len(altered)
    met = [line for worker_id in readers for line in run.logged(worker_id, "record_batch.damaged")]
    assert {(line["partition"], line["offset"]) for line in met} == {
        (partition, batch.first) for partition, batch in altered.items()
    }
    died = [
        (line["worker_id"], line["code"])
        for line in run.logged("run", "worker.died")
        if line["code"] != -signal.SIGKILL
    ]
    assert {code for _, code in died} <= {-signal.SIGABRT}, (
        "only the client library may stumble, over what it takes for records behind a damaged batch"
    )
    assert len(died) == len(set(died)), "who has died of it once checks record batches itself"

    codec = EventCodec()
    ends = [codec.decode(record.value) for record in run.records("control.prompt-group-outcomes")]
    failed = {
        event.prompt_group_id
        for event in ends
        if isinstance(event, PromptGroupEnded) and event.outcome is Outcome.FAILED
    }
    named = {
        record.key
        for role in ("reward", "advantage")
        for record in run.records(f"{role}.dead-letters")
    }
    assert named == failed, "the prompt groups that ended are those whose samples were altered"


@pytest.mark.long
def test_run_with_a_corrupt_train_step_record_is_not_resumed(
    start_run: Callable[..., FaultRun], broker: Node
) -> None:
    run = start_run(run={"num_steps": 60}, broker={"bootstrap_servers": broker.bootstrap_servers})
    first = run.start()
    run.wait_until_steps(4)
    first.send_signal(signal.SIGTERM)
    first.wait(PATIENCE_SECONDS)
    topic = run.plan.topic("control.train-steps")
    broker.stop()
    altered = next(batches(broker.data / f"{topic}-0"))
    altered.flip_a_bit()
    size = [path.stat().st_size for path in altered.file.parent.glob("*.log")]
    broker.start()

    second = run.start()
    assert second.wait(PATIENCE_SECONDS) == 3
    complaint = run.output.read_text()
    assert f"record {topic}[0]@{altered.first} fails its checksum" in complaint
    assert "restore the partition from a replica" in complaint
    assert [path.stat().st_size for path in altered.file.parent.glob("*.log")] == size, (
        "no step was trained again"
    )


@pytest.mark.long
@pytest.mark.parametrize("examines", ["", "1"])
@pytest.mark.parametrize("position", ["middle", "end"])
def test_readers_skip_an_altered_batch_once(
    broker: Node, position: str, examines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXAMINE, examines)
    connection = Connection(broker.bootstrap_servers)
    Admin(connection).create([TopicSpec("altered", 1, 1, "")])
    producer = RecordProducer(connection)
    for batch in range(3):
        producer.write(
            [
                ProducerRecord("altered", f"{batch}-{number}".encode() * 20, key=f"key-{number}")
                for number in range(5)
            ]
        )
    producer.close()
    broker.stop()
    altered = list(batches(broker.data / "altered-0"))[1 if position == "middle" else -1]
    altered.flip_a_bit()
    broker.start()

    expected = [
        (offset, altered.first <= offset <= altered.last, f"key-{offset % 5}")
        for offset in range(15)
    ]
    group = SubscribedConsumer(connection, consumer_group="readers", topics=["altered"])
    for reader in (LogReader(connection, start={("altered", 0): 0}), group):
        records: list[Record] = []
        while not records or records[-1].offset < 14:
            records += reader.fetch(timeout_seconds=1.0)
        assert [(record.offset, record.is_damaged, record.key) for record in records] == expected
        assert all((record.value == b"") == record.is_damaged for record in records)
        assert reader.fetch(timeout_seconds=2.0) == [], "nothing is read twice"
        reader.close()
    reader = LogReader(connection)
    assert [
        record.offset for record in reader.stream({("altered", 0): (0, 15)}, with_damaged=True)
    ] == list(range(15))
    with pytest.raises(BrokerError, match=rf"altered\[0\]@{altered.first} fails its checksum"):
        reader.read_to_end([("altered", 0)])
    reader.close()
