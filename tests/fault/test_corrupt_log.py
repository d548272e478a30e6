"""Bytes of the log are altered on the broker's disk: no worker trains on them, the error names the
record, and the run resumes once the bytes are restored.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError
from confluent_kafka import TopicPartition as ClientPartition
from disk import BatchOnDisk, batches
from harness import PATIENCE_SECONDS, FaultRun, assert_ledger_balances
from node import Node, choose_ports

from relax_events.errors import BrokerError, RunFailed
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.workarounds.altered_batches import VARIABLE as SINGLE_BATCHES
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
def test_altered_samples_end_the_run_by_name_and_are_trained_once_restored(
    start_run: Callable[..., FaultRun], broker: Node
) -> None:
    run = start_run(
        run={"num_steps": 24},
        broker={"bootstrap_servers": broker.bootstrap_servers},
        workers={"max_restarts": 1},
    )
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
    assert run.process.wait(PATIENCE_SECONDS) == RunFailed.exit_code
    complaint = run.output.read_text()
    named = re.search(rf"record {re.escape(topic)}\[(\d+)\]@(\d+) fails its checksum", complaint)
    assert named, complaint[-2000:]
    assert altered[int(named[1])].first == int(named[2])
    assert {line["code"] for line in run.logged("run", "worker.died")} <= {
        -signal.SIGKILL,
        -signal.SIGABRT,
        3,
    }, "only the client library may stumble, over what it takes for records behind the batch"

    broker.stop()
    for batch in altered.values():
        batch.flip_a_bit()
    broker.start()
    assert run.wait_until_ended(run.start()) == 0
    ledger = assert_ledger_balances(run)
    assert (ledger["records_unreadable"], ledger["outcomes"]["failed"]) == (0, 0)


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


@pytest.fixture
def altered(broker: Node, position: str) -> BatchOnDisk:
    """Write three record batches of five records, and alter one of them."""
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
    batch = list(batches(broker.data / "altered-0"))[1 if position == "middle" else -1]
    batch.flip_a_bit()
    broker.start()
    return batch


@pytest.mark.long
@pytest.mark.parametrize("fetches_singly", ["", "1"])
@pytest.mark.parametrize("position", ["middle", "end"])
def test_readers_of_an_altered_batch_end_with_its_name(
    broker: Node, altered: BatchOnDisk, fetches_singly: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SINGLE_BATCHES, fetches_singly)
    connection = Connection(broker.bootstrap_servers)
    group = SubscribedConsumer(connection, consumer_group="readers", topics=["altered"])

    def read(reader: LogReader | SubscribedConsumer) -> None:
        while True:
            offsets.extend(record.offset for record in reader.fetch(1, timeout_seconds=1.0))

    for reader in (LogReader(connection, start={("altered", 0): 0}), group):
        offsets: list[int] = []
        with pytest.raises(BrokerError, match=rf"altered\[0\]@{altered.first} fails its checksum"):
            read(reader)
        assert offsets == list(range(altered.first)), (
            "nothing of it, and nothing behind it, is read"
        )
        reader.close()
    reader = LogReader(connection)
    with pytest.raises(BrokerError, match=rf"altered\[0\]@{altered.first} fails its checksum"):
        reader.read_to_end([("altered", 0)])
    reader.close()


@pytest.mark.long
@pytest.mark.parametrize("position", ["middle"])
def test_client_never_reads_on_behind_an_altered_batch(broker: Node, altered: BatchOnDisk) -> None:
    """Fails when librdkafka's bug is gone: delete `relax_events/kafka/workarounds/altered_batches.py`."""
    client = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "raw",
            "check.crcs": True,
            "auto.offset.reset": "error",
        }
    )
    client.assign([ClientPartition("altered", 0, altered.first)])
    num_reports = 0
    while num_reports < 3:
        message = client.poll(PATIENCE_SECONDS)
        assert message is not None
        assert message.error() is not None, "it has read on: the bug is gone"
        num_reports += message.error().code() == KafkaError._BAD_MSG
    client.close()
