"""Steps of tests with a broker: fill a topic, fetch until a condition holds, wait for another
process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record

TIMEOUT_SECONDS = 200.0
MEMBER = """
import sys
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
bootstrap_servers, client_id, group, topic = sys.argv[1:]
consumer = SubscribedConsumer(Connection(bootstrap_servers, client_id=client_id), consumer_group=group, topics=[topic])
while len(consumer.positions) < 4:
    consumer.fetch(timeout_seconds=0.2)
print("assigned")
sys.stdin.read()
"""
"""Program that joins a group, prints a line once it has four partitions, and waits: for
`other_process`, with bootstrap servers, client id, group and topic."""

LOG_APART = "import sys, structlog\nstructlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))\n"
"""Before the code of another process: what it logs is none of the lines that it prints."""


def fill(producer: RecordProducer, topic: str, values: list[bytes], *, partition: int = 0) -> None:
    """Write values, in order, to one partition."""
    producer.write(ProducerRecord(topic, value, partition=partition) for value in values)


def fetch_until(consumer: Any, done: Callable[[list[Record]], bool]) -> list[Record]:
    """Fetch until the condition holds for all fetched records; fail at the timeout."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    records: list[Record] = []
    while not done(records):
        assert time.monotonic() < deadline, (
            f"the condition did not hold after {len(records)} records"
        )
        records += consumer.fetch(timeout_seconds=0.2)
    return records


def turn_until(condition: Callable[[], bool], *turns: Callable[[], object]) -> None:
    """Take turns until the condition holds; fail at the timeout."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold"
        for turn in turns:
            turn()


@contextmanager
def other_process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python code in another process, whose output can be read line by line; it is killed (as a
    crash would) at the end."""
    command = [sys.executable, "-u", "-c", LOG_APART + textwrap.dedent(code), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def next_line(process: subprocess.Popen[str]) -> str:
    """Wait for the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
