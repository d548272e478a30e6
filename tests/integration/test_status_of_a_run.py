"""Every list, command and page gives the same answer to whether a run is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from broker_steps import turn_until
from event_samples import published

from relax_events.cli.app import app
from relax_events.config import RunConfig
from relax_events.errors import BrokerRefused, CheckFailed
from relax_events.events.codec import EventCodec
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import WorkerHeartbeat
from relax_events.history.cluster import Cluster
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.packages.dashboard.registry import RunRegistry
from relax_events.packages.dashboard.run_reader import RunReader
from relax_events.packages.dashboard.views import build_fleet, build_summary
from relax_events.runtime.run_description import build_run_description
from relax_events.topics import TopicPlan

CODEC = EventCodec()
WITH_WORKERS = {True: "running", False: "interrupted"}


def write_run(config: RunConfig, producer: RecordProducer) -> None:
    """Write a run whose trainer sent its last heartbeat a minute ago."""
    sent_at = now_micros() - 60_000_000
    heartbeat = WorkerHeartbeat(
        worker_id="trainer-0",
        role="trainer",
        host="elsewhere",
        pid=1,
        state=WorkerState.WORKING,
        num_processed=0,
        num_in_flight=0,
        last_progress_at=sent_at,
        sent_at=sent_at,
    )
    plan = TopicPlan.from_config(config)
    for entity, event in (
        ("control.commands", build_run_description(config)),
        ("control.policy-versions", published(0)),
        ("control.heartbeats.trainer", heartbeat),
    ):
        producer.write([ProducerRecord(plan.topic(entity), CODEC.encode(event), key="k")])


def read_page(config: RunConfig) -> dict[str, Any]:
    """Return what the page shows of a run: in its list, at its head, of its workers."""
    cluster = Cluster.from_options(
        config=None,
        bootstrap_servers=config.broker.bootstrap_servers,
        directory=config.run.directory,
    )
    registry = RunRegistry(cluster)
    rows = {row["run_id"]: row for row in registry.list_runs()}
    registry.close()
    reader = RunReader(config).start()
    try:
        turn_until(lambda: bool(reader.fold.workers))
        return {
            "page, list": rows[config.run.id]["status"],
            "page, head": build_summary(reader)["status"],
            "page, workers": WITH_WORKERS[build_fleet(reader)["is_running"]],
        }
    finally:
        reader.close()


@pytest.mark.parametrize(("heartbeat_seconds", "status"), [(1.0, "interrupted"), (30.0, "running")])
def test_all_doors_agree_on_the_status_of_a_run(
    apply_run: Callable[..., RunConfig],
    producer: RecordProducer,
    capsys: pytest.CaptureFixture[str],
    heartbeat_seconds: float,
    status: str,
) -> None:
    """With a heartbeat of a minute ago the page said "interrupted", the list of runs "running".

    A worker is alive for 30 s, or for ten intervals of its heartbeats.
    """
    config = apply_run(workers={"heartbeat_seconds": heartbeat_seconds})
    run_id, broker = config.run.id, ["--bootstrap-servers", config.broker.bootstrap_servers]
    write_run(config, producer)

    def ask(*words: str) -> Any:
        app([*words, *broker, "--output", "json"])
        return orjson.loads(capsys.readouterr().out)

    answers = {
        "list": next(row for row in ask("runs", "show") if row["run_id"] == run_id)["status"],
        "show": ask("runs", "show", run_id)["run"]["status"],
        "show, workers": WITH_WORKERS[bool(ask("runs", "show", run_id)["run"]["alive"])],
        "status": ask("status", run_id)["status"],
        **read_page(config),
    }
    with pytest.raises(CheckFailed):
        ask("health", run_id)
    lines = orjson.loads(capsys.readouterr().out)
    trainer = next(line for line in lines if line["worker"] == "trainer-0")
    assert trainer["healthy"] is (status == "running")
    with pytest.raises(BrokerRefused, match="trainer-0 sent a heartbeat within 600 s"):
        app(["runs", "delete", run_id, *broker, "--dry-run"])
    capsys.readouterr()
    answers["stop"] = ask("runs", "stop", run_id, "--timeout", "0.1")["status"]
    assert answers == dict.fromkeys(answers, status)
