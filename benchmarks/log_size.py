"""How much disk does a run's log take? The records of a sample at every stage, written to a real
broker, by length and compression."""

from __future__ import annotations

import dataclasses
import random
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.planes.samples import arrays, copy_sample
from benchmarks.planes.samples import sample as ready_sample
from relax_events.config import BrokerConfig
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ChatMessage, VersionSegment
from relax_events.events.types import (
    Event,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
)
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.topics import TopicPlan

LENGTHS = (256, 2_048, 8_192, 32_768)
COMPRESSIONS = ("none", "lz4", "zstd")
NUM_SAMPLES = 200
VOCABULARY = 4_000


def make_events(num_tokens: int) -> Iterator[tuple[str, Event]]:
    """Give every event of the samples, and its entity."""
    words = [
        "".join(characters)
        for characters in np.random.default_rng(1).choice(
            list("abcdefghijklmnopqrstuvwxyz"), (VOCABULARY, 4)
        )
    ]
    chooser, pattern = (
        random.Random(0),
        dataclasses.replace(ready_sample(num_tokens), num_prompt_tokens=num_tokens // 10),
    )
    for row in range(NUM_SAMPLES):
        content = arrays(num_tokens, seed=row)
        logprobs = content["rollout_logprobs"]
        ready = dataclasses.replace(
            copy_sample(pattern, row, 0), **content, ref_logprobs=logprobs, actor_logprobs=logprobs
        )
        text = " ".join(chooser.choices(words, k=num_tokens))
        yield "rollout.samples", _rolled_out(ready, text)
        yield (
            "reward.scores",
            SampleScored(key=ready.key, reward=1.0, reward_name="math", reward_digest=32 * "d"),
        )
        for entity, evaluator in (("reference.logprobs", "reference"), ("actor.logprobs", "actor")):
            yield (
                entity,
                SampleEvaluated(
                    key=ready.key,
                    model_role=evaluator,
                    model_version=0,
                    values=ready.rollout_logprobs,
                ),
            )
        yield "advantage.samples", ready


def _rolled_out(ready: SampleReady, text: str) -> SampleRolledOut:
    fields = {field.name for field in dataclasses.fields(SampleRolledOut)} & {
        field.name for field in dataclasses.fields(SampleReady)
    } - {"version_segments"}
    at = len(text) // 10
    return SampleRolledOut(
        **{name: getattr(ready, name) for name in fields},
        version_segments=[
            VersionSegment(policy_version=0, num_tokens=len(ready.tokens) - ready.num_prompt_tokens)
        ],
        completion=text[at:],
        messages=[ChatMessage.of_text("user", text[:at])],
        worker_id="rollout-0",
    )


def bytes_on_disk(
    broker: EmbeddedBroker, data: Path, num_tokens: int, compression: str
) -> dict[str, int]:
    """Write the samples as a run of their own, and return the bytes of each topic's segments."""
    settings = BrokerConfig()
    plan = TopicPlan(
        f"size-{uuid.uuid4().hex[:8]}",
        1,
        settings.partitions_per_version,
        settings.queue_partitions,
        1,
        compression,
    )
    connection = Connection(broker.bootstrap_servers, client_id="bench.size")
    Admin(connection).create(plan.specs())
    producer, codec = RecordProducer(connection, linger_ms=settings.linger_ms), EventCodec()
    producer.write(
        ProducerRecord(
            plan.topic(entity),
            codec.encode(event),
            key=event.prompt_group_id,
            partition=plan.partition(event.prompt_group_id, 0),
        )
        for entity, event in make_events(num_tokens)
    )
    producer.close()
    sizes: dict[str, int] = {}
    for file in data.rglob("*.log"):
        topic = file.parent.name.rpartition("-")[0]
        if topic.startswith(plan.topic("")) and file.stat().st_size:
            sizes[TopicPlan.parse_entity(topic)] = (
                sizes.get(TopicPlan.parse_entity(topic), 0) + file.stat().st_size
            )
    return sizes


def main() -> None:
    """Measure, and write the page."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedBroker(Path(folder), has_password=False) as broker,
    ):
        sizes_by_case = {
            (length, kind): bytes_on_disk(broker, Path(folder), length, kind)
            for length in LENGTHS
            for kind in COMPRESSIONS
        }
    rows = [
        {
            "tokens of a sample": f"{length:,}",
            **{
                f"{kind}, MB per 1,000 samples": f"{sum(sizes_by_case[length, kind].values()) / NUM_SAMPLES / 1e3:,.1f}"
                for kind in COMPRESSIONS
            },
            "bytes a token, none": f"{sum(sizes_by_case[length, 'none'].values()) / NUM_SAMPLES / length:.0f}",
        }
        for length in LENGTHS
    ]
    longest = sizes_by_case[LENGTHS[-1], "none"]
    shares = ", ".join(
        f"{entity} {size / sum(longest.values()):.0%}"
        for entity, size in sorted(longest.items(), key=lambda item: -item[1])
    )
    report.write(
        "log-size",
        title="What a run's log takes of the disk",
        command="python -m benchmarks.log_size",
        conclusion=(
            f"Of the longest samples' bytes: {shares}. Replicas multiply it; "
            "`run.retain_versions` bounds it."
        ),
        rows=rows,
        data={f"{length}, {kind}": sizes for (length, kind), sizes in sizes_by_case.items()},
    )


if __name__ == "__main__":
    sys.exit(main())
