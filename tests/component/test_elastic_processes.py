"""Processes of elastic workers: started on request, drained when no longer desired, killed at their
deadline, given up one at a time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from relax_events.config import RunConfig
from relax_events.controller.scaling_admission import admit
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.events.codec import EventCodec
from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat
from relax_events.kafka.records import ProducerRecord
from relax_events.launcher.managed_process import ManagedProcess, Progress, read_log_tail
from relax_events.launcher.run import RunSession
from relax_events.launcher.session_events import SessionEvents
from relax_events.launcher.supervisor import Supervisor
from relax_events.projections.scale_requests import Kind, ScaleCommand, Status
from relax_events.projections.scaling import ElasticWorker, ExitReason, ScaleState
from relax_events.session.records import RunSessions
from relax_events.topics import TopicPlan
from tests.unit.run_events import make_heartbeat

MakeRunConfig = Callable[..., RunConfig]
WANTED = ElasticWorker("rollout-1", "rollout", "")
LEAVING = replace(WANTED, is_leaving=True)


@pytest.fixture
def supervisor(make_run_config: MakeRunConfig, tmp_path: Path) -> Iterator[Supervisor]:
    """Yield a supervisor without started workers."""
    made = Supervisor(
        make_run_config(workers={"max_restarts": 0}, telemetry={"metrics_port": 9100}),
        tmp_path / "run.json",
    )
    made._processes.clear()
    yield made
    made.stop(timeout_seconds=0)


def started(supervisor: Supervisor, *deed: str, monkeypatch: pytest.MonkeyPatch) -> ManagedProcess:
    """Replace the elastic worker by a program, and wait for its first output."""
    plain = Supervisor._build_elastic

    def stand_in(self: Supervisor, worker: ElasticWorker) -> ManagedProcess:
        managed = plain(self, worker)
        managed.requests = {
            name: replace(order, module="tests.unit.stand_in", imports=[], arguments=list(deed))
            for name, order in managed.requests.items()
        }
        return managed

    monkeypatch.setattr(Supervisor, "_build_elastic", stand_in)
    assert supervisor.reconcile([WANTED]) == []
    managed = supervisor._processes["rollout-1"]
    deadline = time.monotonic() + 60
    while not read_log_tail(managed.log_path) and managed.is_running:
        assert time.monotonic() < deadline
    return managed


def gone(supervisor: Supervisor, worker: ElasticWorker) -> tuple[ExitReason, str]:
    """Wait until a worker has exited, and return how and why."""
    deadline = time.monotonic() + 60
    while not (found := supervisor.reconcile([worker])):
        assert time.monotonic() < deadline
        supervisor.poll(Progress())
    ((left, departure, reason),) = found
    assert left == worker
    assert supervisor.pids == {}
    return departure, reason


def test_elastic_worker_starts_once_with_its_own_port_and_drains_on_removal(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    managed = started(supervisor, "drain", monkeypatch=monkeypatch)
    pid = supervisor.pids["rollout-1"]
    assert supervisor.reconcile([WANTED]) == []
    assert (supervisor.pids, managed.metrics_port) == ({"rollout-1": pid}, 9107), (
        "the trainer is the last of the start, on 9106"
    )
    assert gone(supervisor, LEAVING) == (ExitReason.DRAINED, "it drained")
    supervisor.poll(Progress())
    assert supervisor.pids == {}, "one that has left is not started again"


@pytest.mark.parametrize("drain_micros", [0, 300_000])
def test_worker_that_does_not_drain_is_killed_at_its_deadline(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, drain_micros: int
) -> None:
    started(supervisor, "ignore", monkeypatch=monkeypatch)
    began = time.monotonic()
    assert gone(supervisor, replace(LEAVING, drain_micros=drain_micros)) == (
        ExitReason.KILLED,
        "it ended with exit code -9",
    )
    assert time.monotonic() - began >= drain_micros / 1e6


def test_never_started_worker_is_reported_departed_at_once(supervisor: Supervisor) -> None:
    assert supervisor.reconcile([LEAVING]) == [(LEAVING, ExitReason.ABSENT, "there was no process")]


def test_elastic_worker_with_fatal_error_is_abandoned_and_the_run_continues(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(supervisor, "end", "2", monkeypatch=monkeypatch)
    departure, reason = gone(supervisor, WANTED)
    assert departure is ExitReason.FAILED
    assert reason.startswith("rollout-1 can't continue: ended with exit code 2; log: ")
    assert reason.endswith("error: the reason")


def test_elastic_worker_that_keeps_dying_is_abandoned_despite_run_progress(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(supervisor, "end", "OutOfMemoryError", monkeypatch=monkeypatch)
    departure, reason = gone(supervisor, WANTED)
    assert departure is ExitReason.FAILED
    assert reason.startswith(
        "rollout-1 died 1 times in a row without a finished record: OutOfMemoryError: no "
        "room for 7.42 GiB; log: "
    )


def test_worker_of_an_attached_server_receives_its_url(supervisor: Supervisor) -> None:
    managed = supervisor._build_elastic(replace(WANTED, url="http://10.0.0.7:30000"))
    assert managed.requests["rollout-1"].arguments[-4:] == [
        "engine.name=sglang",
        'engine.sglang.urls=["http://10.0.0.7:30000"]',
        "--index",
        "1",
    ]


def test_metrics_ports_of_departed_workers_are_reused(supervisor: Supervisor) -> None:
    supervisor._processes["rollout-1"] = supervisor._build_elastic(WANTED)
    second = supervisor._build_elastic(replace(WANTED, worker_id="rollout-2"))
    assert (supervisor._processes["rollout-1"].metrics_port, second.metrics_port) == (9107, 9108)
    del supervisor._processes["rollout-1"]
    assert supervisor._build_elastic(replace(WANTED, worker_id="rollout-3")).metrics_port == 9107


class Written:
    """Collects the records that a session writes."""

    def __init__(self) -> None:
        self.records: list[ProducerRecord] = []

    def send(self, record: ProducerRecord) -> None:
        self.records.append(record)


def open_session_events(config: RunConfig, written: Written) -> SessionEvents:
    """The events of a session, to a producer that keeps them."""
    return SessionEvents(
        written,  # type: ignore[arg-type]
        TopicPlan.from_config(config),
        EventCodec(),
    )


def test_run_records_departed_workers_and_their_missing_final_heartbeats(
    make_run_config: MakeRunConfig, supervisor: Supervisor
) -> None:
    session, written = RunSession(make_run_config()), Written()
    session._events = open_session_events(make_run_config(), written)
    opening = admit(
        ScaleState(),
        ScalingBounds.from_config(make_run_config(), is_supervised=True),
        ScaleCommand(kind=Kind.OUT, target=3),
        now=1_000_000,
    ).request
    assert opening is not None
    ended = opening.end(Status.CANCELLED, now=2_000_000, returned=opening.workers)
    taken_back = ended.to_record()
    for event in (
        opening.to_record(reason="asked"),
        make_heartbeat("rollout-1", at_seconds=2),
        taken_back,
    ):
        session._apply(event)
    for _ in range(2):
        session._reconcile(supervisor)
    codec = EventCodec()
    written_events = [codec.decode(record.value) for record in written.records]
    drained, first, second = written_events
    assert isinstance(drained, WorkerHeartbeat)
    assert (drained.worker_id, drained.state, drained.num_in_flight) == (
        "rollout-1",
        WorkerState.STOPPED,
        0,
    )
    assert [getattr(event, "worker_id", "") for event in (first, second)] == [
        "rollout-1",
        "rollout-2",
    ]
    assert [record.key for record in written.records] == ["rollout-1", "", ""]
    state = ScaleState()
    for event in (opening.to_record(reason="asked"), taken_back, first, second):
        state.apply(event)
    assert (state.workers, state.requests[opening.request_id].exits.keys()) == (
        {},
        {"rollout-1", "rollout-2"},
    )


@pytest.mark.parametrize("is_alone", [True, False])
def test_run_writes_final_heartbeat_of_dead_workers_only_if_it_is_alone(
    make_run_config: MakeRunConfig,
    supervisor: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_alone: bool,
) -> None:
    session, written = RunSession(make_run_config()), Written()
    session._events = open_session_events(make_run_config(), written)
    managed = started(supervisor, "ignore", monkeypatch=monkeypatch)
    newest = replace(
        make_heartbeat("rollout-1", at_seconds=2),
        pid=supervisor.pids["rollout-1"],
        host=socket.gethostname(),
        num_in_flight=3,
    )
    for event in (newest, replace(newest, worker_id="rollout-0", pid=1)):
        session._apply(event)
    with ExitStack() as stack:
        session._sessions = stack.enter_context(RunSessions(tmp_path))
        if not is_alone:
            stack.enter_context(RunSessions(tmp_path))
        session._send_goodbyes(supervisor)
        assert written.records == [], "it is alive"
        supervisor.stop(timeout_seconds=0)
        assert not managed.is_running
        session._send_goodbyes(supervisor)
    written_events = [EventCodec().decode(record.value) for record in written.records]
    assert [
        (event.worker_id, event.state, event.num_in_flight)
        for event in written_events
        if isinstance(event, WorkerHeartbeat)
    ] == [("rollout-1", WorkerState.STOPPED, 0)] * is_alone
    assert [record.key for record in written.records] == ["rollout-1"] * is_alone
