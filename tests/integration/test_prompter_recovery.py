"""A prompter that starts again over a log with guests in it issues what it would have issued without them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from broker_steps import TIMEOUT_SECONDS, fetch_until
from event_samples import published

from relax_events.broker.connection import Connection
from relax_events.broker.consumer import LogReader
from relax_events.broker.producer import RecordProducer
from relax_events.broker.records import OutRecord
from relax_events.config import RunConfig
from relax_events.data.sources import open_source
from relax_events.data.stream import PromptStream
from relax_events.events.codec import EventCodec
from relax_events.events.types import ChatMessage, PromptGroupIssued
from relax_events.topics import TopicPlan
from workers.opening import open_worker
from workers.prompter import PrompterLoop

CODEC = EventCodec()


def of_guest(prompt_group_id: str, *, group_index: int) -> PromptGroupIssued:
    return PromptGroupIssued(
        prompt_group_id=prompt_group_id,
        train_step=0,
        group_index=group_index,
        attempt=0,
        row=10**6,
        required_policy_version=0,
        samples_per_prompt=2,
        messages=[ChatMessage.of_text("user", "say hi")],
        seed=1,
    )


def test_guests_take_no_seats_and_no_rows(
    apply_run: Callable[..., RunConfig], producer: RecordProducer, connection: Connection, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "answer": ""}\n{"prompt": "two", "answer": ""}\n')
    config = apply_run(run={"groups_per_step": 2, "num_steps": 1}, data={"source": f"jsonl:{tmp_path / 'rows.jsonl'}"})
    plan = TopicPlan.of(config)
    strangers = [of_guest("000000-1000000-0", group_index=1_000_000), of_guest("000000-1000001-0", group_index=1)]
    queue = plan.topic("prompt.groups")
    producer.write(OutRecord(queue, CODEC.encode(event), key=event.prompt_group_id, partition=0) for event in strangers)
    producer.write([OutRecord(plan.topic("control.policy-versions"), CODEC.encode(published(0)))])
    stream = PromptStream(open_source(config.data, seed=0), seed=0, shuffle=False)
    with open_worker("prompter", config, index=0, follow=("control.group-outcomes",)) as worker, closing(LogReader(connection)) as reader:
        thread = threading.Thread(target=PrompterLoop(worker, stream).run)
        thread.start()
        reader.assign({(queue, partition): 0 for partition in range(plan.queue_partitions)})
        try:
            records = fetch_until(reader, lambda found: len(found) == 4)
        finally:
            worker.drain.start()
            thread.join(TIMEOUT_SECONDS)
    events = [event for record in records if isinstance(event := CODEC.decode(record.value), PromptGroupIssued)]
    assert sorted((event.prompt_group_id, event.row) for event in events if event.row < 10**6) == [("000000-0000-0", 0), ("000000-0001-0", 1)]
