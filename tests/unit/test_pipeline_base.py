"""The small parts of every worker: records, drain, beats, validation, the run's state, the topic plan, librdkafka's errors."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog.testing
from confluent_kafka import KafkaError
from event_samples import committed, ended, published, ready, rolled_out, scored

from relax_events.broker.connection import Connection, ConnectionLog, translate
from relax_events.broker.records import Record
from relax_events.config import RunConfig
from relax_events.control.run_state import RunState
from relax_events.control.topics import plan_changes
from relax_events.errors import BrokerError, BrokerRefused, BrokerUnavailable, CorruptRecord, Fenced, PoisonSample
from relax_events.broker.admin import TopicState
from relax_events.events.types import Command, Event, MetricsReported, Outcome, RunCommanded, WorkerBeat, WorkerState
from relax_events.pipeline.beats import REPORT_EVERY_BEATS, Beats
from relax_events.pipeline.drain import Drain
from relax_events.pipeline.map_role import next_offsets
from relax_events.pipeline.validation import check_ready, check_sample
from relax_events.policy import IssuedGroup
from relax_events.topics import TopicPlan, TopicSpec


def record(offset: int = 0, *, topic: str = "t", partition: int = 0, headers: dict[str, str] | None = None) -> Record:
    return Record(topic, partition, offset, "k", b"v", headers or {}, 0)


class Message:
    """A client's message whose parts may be absent or foreign bytes."""

    def __init__(self, **parts: Any) -> None:
        self._parts = {"topic": "t", "partition": 1, "offset": 2, "key": None, "value": None, "headers": None, "timestamp": (2, 5)} | parts

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self._parts[name]


def test_record_of_a_message_without_key_value_and_headers_is_empty() -> None:
    assert Record.of(Message()) == Record("t", 1, 2, "", b"", {}, 5)
    foreign = Record.of(Message(key=b"\xff", headers=[("a", None), ("b", b"\xfe")]))
    assert (foreign.key, foreign.headers) == ("\ufffd", {"a": "", "b": "\ufffd"})


@pytest.mark.parametrize(("text", "version"), [("0", 0), ("-1", -1), ("123", 123), ("", None), ("x", None), ("1.5", None), ("--5", None), ("\u00b2", None), ("9" * 5000, None)])
def test_policy_version_is_read_off_the_header_or_is_none(text: str, version: int | None) -> None:
    assert record(headers={"policy-version": text}).policy_version == version


@pytest.mark.parametrize("text", ["", "x", "1-2-3", "000001-0002", "000001-0002-0-0", "000001-0002-00", "00000\u00b2-0002-0", "9" * 5000 + "-0000-0"])
def test_text_that_is_no_prompt_group_id_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptRecord, match="is no prompt group id; they look like 000012-0003-0"):
        IssuedGroup.parse(text)


def test_next_offsets_lie_behind_the_last_record_of_each_partition() -> None:
    offsets = next_offsets([record(4), record(9, partition=1), record(5), record(2, topic="u")])
    assert {(offset.topic, offset.partition, offset.offset) for offset in offsets} == {("t", 0, 6), ("t", 1, 10), ("u", 0, 3)}


def test_drain_starts_once_and_tells_its_listeners() -> None:
    drain, told = Drain(seconds=0.0), []
    drain.on_start(lambda: told.append("early"))
    assert not drain.requested
    assert not drain.overdue
    assert not drain.wait(0.01)
    drain.start()
    drain.start()
    drain.on_start(lambda: told.append("late"))
    assert told == ["early", "late"]
    assert drain.requested
    assert drain.wait(10)


def test_drain_is_overdue_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("relax_events.pipeline.drain.time.monotonic", lambda: now[0])
    drain = Drain(seconds=20)
    drain.start()
    now[0] = 120.0
    assert not drain.overdue
    now[0] = 120.1
    assert drain.overdue


def test_drain_wakes_another_thread() -> None:
    drain = Drain(seconds=1)
    waiter = threading.Thread(target=drain.wait, args=(30,))
    waiter.start()
    drain.start()
    waiter.join(10)
    assert not waiter.is_alive()


DRAINING = """
import signal, sys
from relax_events.pipeline.drain import Drain
drain = Drain(seconds=30)
drain.listen_to_signals()
print("ready", flush=True)
while not drain.wait(1.0):
    pass
print("draining", flush=True)
if sys.argv[1] == "hang":
    while True:
        signal.pause()
"""


@pytest.mark.parametrize(("manner", "number"), [("end", signal.SIGTERM), ("end", signal.SIGINT), ("hang", signal.SIGTERM)])
def test_first_signal_drains_and_second_one_ends_at_once(manner: str, number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", DRAINING, manner], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "draining\n"
        if manner == "hang":
            process.send_signal(number)
        assert process.wait(20) == (128 + number if manner == "hang" else 0)
    finally:
        process.kill()
        process.wait(10)
        if process.stdout:
            process.stdout.close()


class Clocked:
    """Beats under a clock that the test moves, with what they sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("relax_events.pipeline.beats.time.monotonic", lambda: self.now)
        self.sent: list[WorkerBeat | MetricsReported] = []
        self.beats = Beats(self.sent.append, worker_id="reward-0", role="reward", interval_seconds=1.0)

    def tick(self, state: WorkerState, *, after: float = 0.0) -> None:
        self.now += after
        self.beats.tick(state)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return Clocked(monkeypatch)


def states(clocked: Clocked) -> list[WorkerState]:
    return [event.state for event in clocked.sent if isinstance(event, WorkerBeat)]


def test_beats_come_once_an_interval_while_a_worker_changes_between_idle_and_working(clocked: Clocked) -> None:
    clocked.tick(WorkerState.STARTING)
    clocked.tick(WorkerState.WORKING, after=0.5)
    for state in (WorkerState.IDLE, WorkerState.WORKING, WorkerState.IDLE):
        clocked.tick(state, after=0.1)
    assert states(clocked) == [WorkerState.STARTING, WorkerState.WORKING]
    clocked.tick(WorkerState.IDLE, after=0.8)
    assert states(clocked)[2:] == [WorkerState.IDLE]


def test_change_to_draining_is_told_at_once(clocked: Clocked) -> None:
    clocked.tick(WorkerState.WORKING)
    for state in (WorkerState.DRAINING, WorkerState.STOPPED):
        clocked.tick(state, after=0.01)
    assert states(clocked) == [WorkerState.WORKING, WorkerState.DRAINING, WorkerState.STOPPED]


def test_beat_carries_what_the_worker_did(clocked: Clocked) -> None:
    before = clocked.beats.started_at
    clocked.beats.progress(3, seconds=0.5)
    clocked.beats.progress(4, seconds=0.5)
    clocked.beats.policy_version, clocked.beats.metrics_port, clocked.beats.num_in_flight = 5, 9090, 2
    clocked.tick(WorkerState.WORKING)
    (beat,) = clocked.sent
    assert isinstance(beat, WorkerBeat)
    assert (beat.num_processed, beat.num_in_flight, beat.policy_version, beat.metrics_port, beat.pid) == (7, 2, 5, 9090, os.getpid())
    assert beat.last_progress_at >= before
    assert clocked.beats.seconds_since_beat == 0.0
    clocked.now += 3.0
    assert clocked.beats.seconds_since_beat == 3.0


def test_every_few_beats_throughput_is_reported(clocked: Clocked) -> None:
    for _ in range(2 * REPORT_EVERY_BEATS):
        clocked.beats.progress(10, seconds=0.5)
        clocked.tick(WorkerState.WORKING, after=2.0)
    reports = [event for event in clocked.sent if isinstance(event, MetricsReported)]
    assert [report.values for report in reports] == [{"records_per_second": 5.0, "busy_ratio": 0.25}] * 2


def vector(*values: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": vector(dtype=np.int32)}, "tokens must be a non-empty vector, got shape (0,)"),
        ({"tokens": np.zeros((2, 2), np.int32)}, "tokens must be a non-empty vector, got shape (2, 2)"),
        ({"tokens": vector(1, -2, 3, 4, dtype=np.int32)}, "tokens must be >= 0, got -2"),
        ({"tokens": vector(1, 2, 3, 4)}, "tokens must be integers, got float32"),
        ({"loss_mask": np.ones(3, np.uint8)}, "loss_mask must have the shape of tokens (4,), got (3,)"),
        ({"rollout_logprobs": vector(0, 0, math.nan, 0)}, "rollout_logprobs must be finite, got nan at 2"),
        ({"rollout_logprobs": vector(0, -math.inf, 0, 0)}, "rollout_logprobs must be finite, got -inf at 1"),
        ({"sample_index": 2, "sample_id": "000000-0000-0/2"}, "sample_index must be below samples_per_prompt, got 2 of 2"),
        ({"sample_id": "000000-0000-0/1"}, "sample_id must be 000000-0000-0/0, got 000000-0000-0/1"),
        ({"prompt_group_id": "g"}, "'g' is no prompt group id; they look like 000012-0003-0"),
        ({"min_policy_version": 1, "policy_version": 2}, "policy_version <= min_policy_version <= max_policy_version must hold, got 2, 1, 0"),
        ({"policy_version": -1}, "policy_version <= min_policy_version <= max_policy_version must hold, got -1, 0, 0"),
        ({"temperature": 0.0}, "temperature must be above 0 and finite, got 0.0"),
        ({"temperature": math.nan}, "temperature must be above 0 and finite, got nan"),
        ({"num_prompt_tokens": 5}, "num_prompt_tokens must be 0 to 4, got 5"),
    ],
)
@pytest.mark.parametrize("stage", ["rolled_out", "ready"])
def test_sample_that_nobody_can_use_is_poison(stage: str, changes: dict[str, Any], text: str) -> None:
    make, check = {"rolled_out": (rolled_out, check_sample), "ready": (ready, check_ready)}[stage]
    with pytest.raises(PoisonSample, match=f"^sample .*: {re.escape(text)}$"):
        check(make(**changes))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"advantages": vector(0, 0, 1)}, "advantages must have the shape of tokens (4,), got (3,)"),
        ({"ref_logprobs": vector(0, 0, 0, math.inf)}, "ref_logprobs must be finite, got inf at 3"),
        ({"actor_logprobs": vector(0)}, "actor_logprobs must have the shape of tokens (4,), got (1,)"),
        ({"reward": math.nan}, "reward must be finite, got nan"),
    ],
)
def test_ready_sample_is_checked_further(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PoisonSample, match=re.escape(text)):
        check_ready(ready(**changes))


def test_good_samples_pass_unchanged_and_other_events_do_not() -> None:
    first, second = rolled_out(), ready()
    assert check_sample(first) is first
    assert check_ready(second) is second
    with pytest.raises(PoisonSample, match="expected SampleRolledOut, got SampleScored"):
        check_sample(scored())
    with pytest.raises(PoisonSample, match="expected SampleReady, got SampleRolledOut"):
        check_ready(first)


def test_run_state_is_what_the_log_says() -> None:
    state = RunState()
    assert (state.num_steps, state.reward, state.policy_version) == (0, None, -1)
    beat = WorkerBeat(worker_id="w", role="reward", host="h", pid=1, state=WorkerState.IDLE, num_processed=0, num_in_flight=0, last_progress_at=0)
    report = MetricsReported(worker_id="w", role="reward", values={"busy_ratio": 0.5})
    events: list[Event] = [published(0), committed(0), published(1), committed(1, figures={"reward_mean": 0.75}), beat, report]
    for event in events:
        state.note(event)
    assert (state.num_steps, state.reward, state.policy_version) == (2, 0.75, 1)
    assert (state.workers["w"], state.metrics["w"]) == (beat, report)
    state.note(published(0))
    assert state.policy_version == 1


def test_run_state_counts_each_end_once_and_failures_in_a_row() -> None:
    state = RunState()
    for index, outcome in enumerate([Outcome.FAILED, Outcome.FAILED, Outcome.TRAINED, Outcome.FAILED, Outcome.EXPIRED, Outcome.FAILED]):
        for _ in range(2):
            state.note(ended(f"000000-{index:04d}-0", outcome, reason=f"reason {index}"))
    assert state.outcomes == {"failed": 4, "trained": 1, "expired": 1}
    assert (state.failed_in_a_row, state.last_failure) == (2, "reason 5")


def test_run_state_ends_with_a_stop_for_all_only() -> None:
    state = RunState()
    state.note(RunCommanded(command=Command.STOP, role="reward", reason="scale down"))
    state.note(RunCommanded(command=Command.PAUSE, reason="wait"))
    assert state.ended is None
    state.note(RunCommanded(command=Command.STOP, reason="goal", succeeded=True))
    assert state.ended is not None
    assert state.ended.succeeded


def test_plan_gives_all_sample_topics_the_same_partitions(make_run_config: Callable[..., RunConfig]) -> None:
    plan = TopicPlan.of(make_run_config(run={"id": "mine", "max_staleness": 2}, broker={"shards": 3}))
    specs = {spec.name: spec for spec in plan.specs()}
    assert len(specs) == len(plan.specs())
    assert {specs[topic].num_partitions for topic in plan.sample_topics()} == {12}
    assert all(spec.num_partitions == 1 for name, spec in specs.items() if ".control." in name or name.endswith(".dead-letters"))
    assert plan.topic("rollout.samples") == "relax.mine.rollout.samples"
    assert (plan.consumer_group("reward"), plan.transactional_id("trainer")) == ("relax.mine.reward", "relax.mine.trainer.0")
    assert list(plan.partitions_of_version(5)) == [3, 4, 5]
    assert plan.partition("000000-0000-0", 5) in plan.partitions_of_version(5)
    assert all(spec.doc for spec in specs.values())


def test_changes_are_the_difference_between_plan_and_broker() -> None:
    spec = TopicSpec("t", 4, 1, "of a test", {"retention.ms": "-1", "cleanup.policy": "delete"})
    same = TopicState("t", 4, 1, {"retention.ms": "-1", "cleanup.policy": "delete", "segment.bytes": "7"})
    assert plan_changes([spec], {"t": same}) == []
    assert [change.kind for change in plan_changes([spec], {})] == ["create"]
    other = TopicState("t", 2, 1, {"retention.ms": "5", "cleanup.policy": "delete"})
    assert [(change.kind, change.detail) for change in plan_changes([spec], {"t": other})] == [
        ("conflict", "has 2 partitions, the plan says 4"),
        ("alter", "retention.ms: 5 -> -1"),
    ]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._FENCED, Fenced),
        (KafkaError.INVALID_PRODUCER_EPOCH, Fenced),
        (KafkaError._AUTHENTICATION, BrokerRefused),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, BrokerRefused),
        (KafkaError.MSG_SIZE_TOO_LARGE, BrokerRefused),
        (KafkaError._ALL_BROKERS_DOWN, BrokerUnavailable),
        (KafkaError._MSG_TIMED_OUT, BrokerUnavailable),
        (KafkaError.INVALID_TIMESTAMP, BrokerError),
    ],
)
def test_errors_of_the_client_become_ours(code: int, kind: type[BrokerError]) -> None:
    error = translate(KafkaError(code), "writing to t")
    assert type(error) is kind
    assert str(error).startswith(f"writing to t: {KafkaError(code).name()} ")


def test_settings_keep_promises_above_the_users_and_the_users_above_ours() -> None:
    connection = Connection("a:1", client={"socket.keepalive.enable": False, "sasl.username": "me"}, client_id="c")
    settings = connection.settings(enable_idempotence=True, on_commit=print)
    assert settings["socket.keepalive.enable"] is False
    assert (settings["sasl.username"], settings["enable.idempotence"], settings["on_commit"]) == ("me", True, print)
    assert (settings["bootstrap.servers"], settings["client.id"], settings["socket.timeout.ms"]) == ("a:1", "c", 30_000)


def test_background_errors_are_logged_once_each() -> None:
    told = ConnectionLog("a:1")
    with structlog.testing.capture_logs() as logs:
        for code in (KafkaError._TRANSPORT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT):
            told(KafkaError(code))
    assert [entry["error"] for entry in logs] == ["_TRANSPORT", "_ALL_BROKERS_DOWN", "_TRANSPORT"]
