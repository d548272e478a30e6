"""Any consumer can read a run's records: with kcat where it is installed, decoded by Apache's avro
with nothing but the published schemas.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import avro.io
import avro.schema
import numpy as np
import pytest
from command_line import Relax
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from relax_events.events.codec import EventCodec
from relax_events.events.conversion import record_writer
from relax_events.events.schemas import TYPES_NAMESPACE

TAPPED = (
    "prompt.groups",
    "rollout.samples",
    "reward.scores",
    "advantage.samples",
    "control.policy-versions",
    "control.train-steps",
    "control.prompt-group-outcomes",
    "control.commands",
    "control.heartbeats.trainer",
    "control.metrics.trainer",
)
# Avro 1.12, single-object encoding: the marker, eight bytes of fingerprint, the body
MARKER = b"\xc3\x01"
TIMEOUT_SECONDS = 100.0
Pair = tuple[bytes, bytes]


def tap_with_kcat(bootstrap_servers: str, topic: str) -> list[Pair]:
    """Read a topic's keys and values with kcat: lengths as text, then the bytes."""
    command = [
        "kcat",
        "-C",
        "-q",
        "-e",
        "-b",
        bootstrap_servers,
        "-t",
        topic,
        "-o",
        "beginning",
        "-X",
        "isolation.level=read_committed",
    ]
    tapped = subprocess.run(
        [*command, "-f", "%K %S\n%k%s"], capture_output=True, timeout=TIMEOUT_SECONDS, check=True
    )
    return list(split_lengths(io.BytesIO(tapped.stdout)))


def split_lengths(stream: io.BytesIO) -> Iterator[Pair]:
    """Split the output of kcat; a length of -1 means null."""
    while head := stream.readline():
        key_bytes, value_bytes = (max(int(text), 0) for text in head.split())
        yield stream.read(key_bytes), stream.read(value_bytes)


def tap_with_client(bootstrap_servers: str, topic: str) -> list[Pair]:
    """Read the same with a bare client."""
    client = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "tap",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    try:
        partitions = client.list_topics(topic, timeout=TIMEOUT_SECONDS).topics[topic].partitions
        client.assign(
            [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions]
        )
        pairs, num_open = [], len(partitions)
        while num_open:
            message = client.poll(TIMEOUT_SECONDS)
            assert message is not None, f"{topic} could not be read to its end"
            if message.error() is None:
                pairs.append((message.key() or b"", message.value() or b""))
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF
                num_open -= 1
        return pairs
    finally:
        client.close()


def decode_by_hand(value: bytes, schemas: dict[bytes, avro.schema.Schema]) -> Any:
    """Decode a record as the Avro specification says, by the schema that its header names."""
    assert value[:2] == MARKER
    body = io.BytesIO(value[10:])
    record = avro.io.DatumReader(schemas[value[2:10]]).read(avro.io.BinaryDecoder(body))
    assert body.read() == b""
    return record


def plain(schema_json: bytes) -> avro.schema.Schema:
    """Parse a published schema; times stay the integers that are on the wire."""
    return avro.schema.parse(
        json.dumps(
            json.loads(
                schema_json,
                object_hook=lambda node: {k: v for k, v in node.items() if k != "logicalType"},
            )
        )
    )


def listed(value: Any) -> Any:
    """Convert tuples to lists, and drop the names of union branches, as a foreign reader returns
    them.
    """
    if isinstance(value, tuple) and str(value[0]).startswith(TYPES_NAMESPACE):
        return listed(value[1])
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.timeout(600)
def test_records_decoded_by_hand_match_the_project_codec(
    relax: Relax, run_file: Path, run_id: str, bootstrap_servers: str
) -> None:
    ran = relax(
        "run",
        run_file,
        f"broker.bootstrap_servers={bootstrap_servers}",
        "run.num_steps=1",
        timeout_seconds=220,
    )
    assert ran.code == 0, ran.err
    tap = tap_with_kcat if shutil.which("kcat") else tap_with_client
    published = dict(tap(bootstrap_servers, f"relax.{run_id}.control.schemas"))
    schemas = {bytes.fromhex(key.decode()): plain(text) for key, text in published.items()}
    codec, tapped = EventCodec(), defaultdict(list)
    for entity in TAPPED:
        for _, value in tap(bootstrap_servers, f"relax.{run_id}.{entity}"):
            ours, theirs = codec.decode(value), decode_by_hand(value, schemas)
            assert theirs == listed(record_writer(type(ours))(ours)), entity
            tapped[type(ours).__name__].append(theirs)
    assert tapped.keys() >= {
        "PromptGroupIssued",
        "SamplesScored",
        "SamplesReady",
        "PolicyVersionPublished",
        "TrainStepCommitted",
    }
    assert tapped.keys() >= {"PromptGroupEnded", "RunCommanded", "WorkerHeartbeat"}
    groups = tapped["SamplesRolledOut"]
    assert sum(len(group["sample_index"]) for group in groups) >= 16
    for group in groups:
        check_numbers(group)


def check_numbers(group: dict[str, Any]) -> None:
    """Check that a foreign reader can decode the samples' arrays from the record's own metadata."""
    tokens, mask, logprobs, lengths = (
        np.frombuffer(group[name]["data"], group[name]["dtype"])
        for name in ("tokens", "loss_mask", "rollout_logprobs", "lengths")
    )
    assert group["tokens"]["shape"] == [len(tokens)] == [sum(lengths)]
    assert int(mask.sum()) == len(tokens) - group["num_prompt_tokens"] * len(lengths)
    assert (logprobs[mask == 0] == 0).all()
    assert (logprobs[mask == 1] < 0).all()
