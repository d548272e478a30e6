"""The timeline command exports a run's trace from its log on the real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import orjson
from event_samples import committed, published

from relax_events.cli.app import app
from relax_events.config import RunConfig
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Command
from relax_events.events.types import Event, RunCommanded
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.topics import TopicPlan


def test_timeline_command_writes_the_events_of_the_log(
    apply_run: Callable[..., RunConfig], producer: RecordProducer, tmp_path: Path
) -> None:
    config, codec = apply_run(), EventCodec()
    plan = TopicPlan.from_config(config)
    stop = RunCommanded(
        command=Command.STOP, reason="all 2 train steps are committed", succeeded=True
    )
    written: list[tuple[str, Event]] = [
        ("control.policy-versions", published(0)),
        ("control.train-steps", committed(0)),
        ("control.train-steps", committed(1)),
        ("control.commands", stop),
    ]
    producer.write(
        ProducerRecord(plan.topic("control.schemas"), schema, key=name.hex())
        for name, schema in codec.published_form().items()
    )
    producer.write(
        ProducerRecord(plan.topic(entity), codec.encode(event)) for entity, event in written
    )
    run_file, out = tmp_path / "run.json", tmp_path / "trace.json"
    run_file.write_bytes(orjson.dumps(config.model_dump(mode="json")))
    app(
        ["runs", "show", str(run_file), "--trace", str(out)],
        exit_on_error=False,
        result_action="return_value",
    )
    names = [
        entry["name"] for entry in json.loads(out.read_text())["traceEvents"] if entry["ph"] in "Xi"
    ]
    assert [name for name in names if name.startswith("step ")] == ["step 0", "step 1"]
    assert {"version 0", "stop"} <= set(names)
