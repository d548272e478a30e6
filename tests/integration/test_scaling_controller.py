"""The controller's process on the real log: it is killed in the middle of scaling requests, and its
successor completes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import orjson
import pytest

from relax_events.cli.runs import show
from relax_events.config import RunConfig
from relax_events.controller.api_client import ScaleClient
from relax_events.controller.api_server import ApiEndpointFile
from relax_events.errors import CheckFailed
from relax_events.events.codec import EventCodec
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import Event
from relax_events.history.live_run import stop_run
from relax_events.history.run_log import RunLog
from relax_events.history.runs.details import read_changes
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.projections.scale_requests import Status
from relax_events.projections.scaling import ExitReason, ScaleState
from relax_events.session.change_audit import describe_account
from relax_events.topics import TopicPlan
from tests.unit.run_events import make_heartbeat

CODEC = EventCodec()
PATIENCE_SECONDS = 120.0
"""A hang fails, a busy machine does not."""


class Run:
    """A run of a controller alone; the test is its `relax run` and its workers."""

    def __init__(self, config: RunConfig, connection: Connection, producer: RecordProducer) -> None:
        self.config, self.plan = config, TopicPlan.from_config(config)
        self._connection, self._producer = connection, producer
        self.environment = {"RELAX_SUPERVISOR_PID": str(os.getpid())}
        if config.scaling.external_autoscaler:
            self.environment = {}
        config.run_directory.mkdir(parents=True, exist_ok=True)
        self.run_file = config.run_directory / "run.json"
        self.run_file.write_bytes(orjson.dumps(config.model_dump(mode="json")))
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the controller."""
        words = [
            sys.executable,
            "-m",
            "relax_events.cli",
            "worker",
            "controller",
            str(self.run_file),
        ]
        with (self.config.run_directory / "log").open("ab") as log:
            return subprocess.Popen(
                words,
                env=os.environ | self.environment,
                stdout=log,
                stderr=log,
            )

    def kill_controller(self) -> None:
        """Kill it, and start another."""
        self.process.kill()
        self.process.wait(10)
        self.process = self.start()

    def call(
        self, method: str, path: str, body: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Call the API, as soon as it is there."""
        endpoint_file, deadline = (
            ApiEndpointFile.from_config(self.config),
            time.monotonic() + PATIENCE_SECONDS,
        )
        while time.monotonic() < deadline:
            with suppress(CheckFailed):
                return ScaleClient(endpoint_file.read_url(), endpoint_file.read_token()).call(
                    method, path, body
                )
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)
        pytest.fail(
            "no server answers; the controller's "
            f"log:\n{(self.config.run_directory / 'log').read_text()}"
        )

    def say(self, entity: str, *events: Event) -> None:
        """Write events as others would."""
        self._producer.write(
            [
                ProducerRecord(
                    self.plan.topic(entity),
                    CODEC.encode(event),
                    key=getattr(event, "worker_id", "") or "",
                )
                for event in events
            ]
        )

    def heartbeats(self, *worker_ids: str, state: WorkerState) -> None:
        """Send heartbeats of workers."""
        self.say(
            "control.heartbeats.rollout",
            *(
                make_heartbeat(worker_id, at_seconds=time.time(), state=state)
                for worker_id in worker_ids
            ),
        )

    def label(self, request_id: str, status: Status) -> None:
        """Wait until the API labels a request with a status."""
        route, deadline = "_".join(request_id.split("-")[:2]), time.monotonic() + PATIENCE_SECONDS
        while (view := self.call("GET", f"{route}/{request_id}"))["status"] != status:
            assert time.monotonic() < deadline, view
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)

    def until(self, request_id: str, status: Status | None = None) -> ScaleState:
        """Wait until the log has a request, with its last status if one is given; return the
        state."""
        reader, state, deadline = (
            LogReader(self._connection),
            ScaleState(),
            time.monotonic() + PATIENCE_SECONDS,
        )
        reader.assign({(self.plan.topic("control.commands"), 0): 0})
        try:
            while (found := state.requests.get(request_id)) is None or (
                status is not None and state.status(found, now=now_micros()) is not status
            ):
                assert time.monotonic() < deadline, (
                    f"{found}\n{(self.config.run_directory / 'log').read_text()}"
                )
                for record in reader.fetch(timeout_seconds=0.2):
                    state.apply(CODEC.decode(record.value))
            return state
        finally:
            reader.close()


@pytest.fixture
def run(
    apply_run: Callable[..., RunConfig], connection: Connection, producer: RecordProducer
) -> Iterator[Run]:
    opened = Run(apply_run(scaling={"api": "on"}), connection, producer)
    yield opened
    opened.process.kill()
    opened.process.wait(10)


@pytest.mark.timeout(300)
def test_requests_end_by_heartbeats_where_an_autoscaler_starts_and_ends_the_pods(
    apply_run: Callable[..., RunConfig], connection: Connection, producer: RecordProducer
) -> None:
    config = apply_run(scaling={"api": "on", "external_autoscaler": True})
    run = Run(config, connection, producer)
    try:
        grown = str(run.call("POST", "scale_out", {"num_replicas": 3})["request_id"])
        run.label(grown, Status.PENDING)
        run.heartbeats("rollout-1", "rollout-2", state=WorkerState.IDLE)
        run.until(grown, Status.ACTIVE)
        shrunk = str(run.call("POST", "scale_in", {"num_replicas": 1})["request_id"])
        run.label(shrunk, Status.PENDING)
        run.heartbeats("rollout-2", state=WorkerState.DRAINING)
        run.label(shrunk, Status.DRAINING)
        run.kill_controller()
        run.heartbeats("rollout-1", "rollout-2", state=WorkerState.STOPPED)
        assert run.until(shrunk, Status.COMPLETED).workers == {}
    finally:
        run.process.kill()
        run.process.wait(10)


@pytest.mark.timeout(300)
def test_next_controller_continues_open_scaling_requests(run: Run) -> None:
    asked = run.call("POST", "scale_out", {"num_replicas": 3})
    request_id, workers = str(asked["request_id"]), ("rollout-1", "rollout-2")
    run.label(request_id, Status.PENDING)
    run.kill_controller()
    run.heartbeats(*workers, state=WorkerState.STARTING)
    run.label(request_id, Status.HEALTH_CHECKING)
    run.kill_controller()
    run.heartbeats(*workers, state=WorkerState.IDLE)
    run.until(request_id, Status.ACTIVE)

    gone = run.call("POST", "scale_in", {"num_replicas": 1})
    assert gone["selected_engines"] == ["rollout-2", "rollout-1"]
    state = run.until(str(gone["request_id"]))
    run.kill_controller()
    run.say(
        "control.commands",
        *(
            state.workers[worker_id].exit_command(ExitReason.DRAINED, "it drained")
            for worker_id in workers
        ),
    )
    assert run.until(str(gone["request_id"]), Status.COMPLETED).workers == {}
    reported = run.call("GET", f"scale_in/{gone['request_id']}")
    assert (reported["status"], reported["removed_engines"]) == (
        "COMPLETED",
        ["rollout-2", "rollout-1"],
    )
    with RunLog(run.config, name="test") as log:
        changes = read_changes(log)
    assert [(one.command, one.outcome, one.caller) for one in changes] == [
        ("POST /rollout/scale_out", "accepted", describe_account()),
        ("POST /rollout/scale_in", "accepted", describe_account()),
    ]


@pytest.mark.timeout(300)
def test_run_that_is_stopped_by_a_command_says_who_stopped_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.call("GET", "engines")
    run.heartbeats("rollout-0", state=WorkerState.IDLE)
    stop_run(run.config, timeout_seconds=0.0)
    run.process.wait(60)
    show(str(run.run_file), part="changes", output="json")
    (change,) = orjson.loads(capsys.readouterr().out)
    assert (change["command"], change["identity"]) == ("relax runs stop", "account")
    assert change["caller"] == describe_account()
    show(str(run.run_file), part="changes")
    assert "relax runs stop" in capsys.readouterr().out
