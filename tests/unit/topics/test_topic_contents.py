"""An event counts only on a topic for its type; on any other topic a role without the right wrote
it.
"""

from __future__ import annotations

import typing
from typing import Any

import pytest
from event_samples import ended, ready, rolled_out, scored
from event_samples import evaluated as logprobs
from valid_run import ValidRun

from relax_events.events.parts import Outcome, WorkerState
from relax_events.events.types import Event, MetricsReported, SampleColumns, WorkerHeartbeat
from relax_events.kafka.security.acls import ROLE_PERMISSIONS
from relax_events.topics.names import (
    COMPACTED_TOPICS,
    CONTROL_TOPICS,
    HEARTBEATS,
    METRICS,
    METRICS_TOPICS,
    QUEUE_TOPICS,
    ROLES,
    SAMPLE_TOPICS,
    SUMMARY_TOPICS,
)
from relax_events.topics.plan import EVENTS_ON, belongs_on


def test_every_event_topic_declares_its_events_and_every_event_has_a_topic() -> None:
    of_events = (
        QUEUE_TOPICS
        | SAMPLE_TOPICS
        | CONTROL_TOPICS
        | METRICS_TOPICS
        | COMPACTED_TOPICS
        | SUMMARY_TOPICS
    )
    assert EVENTS_ON.keys() == of_events.keys() - {"control.schemas"}
    assert {kind for kinds in EVENTS_ON.values() for kind in kinds} == set(
        typing.get_args(Event)
    ) - {SampleColumns}


def test_ready_samples_belong_only_on_the_advantage_topic() -> None:
    assert [entity for entity in EVENTS_ON if belongs_on(entity, ready())] == ["advantage.samples"]
    assert [entity for entity in EVENTS_ON if belongs_on(entity, scored())] == ["reward.scores"]
    assert [entity for entity in EVENTS_ON if belongs_on(entity, ended())] == [
        "advantage.samples",
        "prompt.end-requests",
        "control.prompt-group-outcomes",
    ]


def test_logprobs_belong_on_the_topic_of_their_model_role() -> None:
    assert belongs_on("reference.logprobs", logprobs(model_role="reference"))
    assert not belongs_on("critic.values", logprobs(model_role="reference"))
    assert not belongs_on("reference.logprobs", logprobs(model_role="absent"))


def test_heartbeats_and_metrics_belong_on_the_topic_of_the_workers_role() -> None:
    state: dict[str, Any] = {
        "host": "h",
        "pid": 1,
        "state": WorkerState.STOPPED,
        "num_processed": 0,
        "num_in_flight": 0,
        "last_progress_at": 0,
    }
    for role in ROLES:
        own, other = f"{role}-0", "trainer-0" if role != "trainer" else "reward-0"
        assert [
            entity
            for entity in EVENTS_ON
            if belongs_on(entity, WorkerHeartbeat(worker_id=own, role=role, **state))
        ] == [HEARTBEATS[role]]
        assert [
            entity
            for entity in EVENTS_ON
            if belongs_on(entity, MetricsReported(worker_id=own, role=role, values={}))
        ] == [METRICS[role]]
        assert not any(
            belongs_on(entity, WorkerHeartbeat(worker_id=other, role=role, **state))
            for entity in EVENTS_ON
        ), "another role's worker"
    assert tuple(ROLE_PERMISSIONS) == ROLES


@pytest.mark.parametrize("entity", ["rollout.samples", "reward.scores", "prompt.end-requests"])
def test_ledger_ignores_events_on_topics_they_do_not_belong_on(entity: str) -> None:
    run, group = ValidRun(6), "000003-0000-0"
    expected = run.ledger().totals()
    events = [
        ready(group, 0, version=2),
        scored(group, 0, reward=9.0),
        rolled_out(group, 1, version=9),
        ended(group, Outcome.EXPIRED),
    ]
    own = {"rollout.samples": 2, "reward.scores": 1, "prompt.end-requests": 3}[entity]
    for partition in range(run.plan.num_sample_partitions):
        run.at(entity, partition).extend(
            event for index, event in enumerate(events) if index != own
        )
    changed_ledger = run.ledger()
    assert (changed_ledger.problems(), changed_ledger.totals()) == ([], expected)
