"""The health manager's decisions: pure functions over `HealthState`.

    healthy ──symptom──▶ restart the worker ──again, after max_restarts without success, and no
    healthy worker of its role──▶ restart the pipeline ──again, after max_pipeline_restarts without
    success──▶ end the run
                          ▲
                          └── each waits the heartbeat timeout and a back-off after the previous
                          one; a stalled pipeline starts here

An intervention was without success unless at least `max_staleness + 2` train steps commit after it.
Observer roles, which the run does not need, are restarted without limit. They are never a reason to
restart the pipeline or to end the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_events.config import RunConfig
from relax_events.events.parts import Command, WorkerState
from relax_events.events.types import RunCommanded
from relax_events.projections.health import (
    MICROS,
    PIPELINE_REASON,
    HealthState,
    Intervention,
    LastHeartbeat,
    RecoveryLevel,
    Symptom,
)

OBSERVER_ROLES = frozenset({"controller", "metrics", "evaluator"})
MAX_BACKOFF_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Thresholds of symptoms and numbers of attempts, in microseconds; see `[health]` of the run
    file.
    """

    heartbeat_timeout: int
    progress_timeout: int
    start_timeout: int
    backoff: int
    max_restarts: int
    max_pipeline_restarts: int
    pipeline: frozenset[str]
    may_stall: bool = False
    """Whether all workers may be idle for long: a second learner waits for the run that it
    follows."""

    @classmethod
    def from_config(cls, config: RunConfig) -> HealthLimits:
        """Read the limits from a run file."""
        health = config.health
        return cls(
            heartbeat_timeout=int(config.workers.heartbeat_timeout_seconds * MICROS),
            progress_timeout=int(health.progress_timeout_seconds * MICROS),
            start_timeout=int(health.start_seconds * MICROS),
            backoff=int(health.backoff_seconds * MICROS),
            max_restarts=health.max_restarts,
            max_pipeline_restarts=health.max_pipeline_restarts,
            pipeline=frozenset(config.roles()) - OBSERVER_ROLES,
            may_stall=config.is_replay and config.parent.follow,
        )

    def wait_micros(self, num_acts: int) -> int:
        """Return how long to wait after the newest of so many interventions without success."""
        return (
            self.heartbeat_timeout
            + min(self.backoff << min(num_acts - 1, 32), int(MAX_BACKOFF_SECONDS * MICROS))
            if num_acts
            else 0
        )


def find_symptoms(state: HealthState, limits: HealthLimits, *, now: int) -> dict[str, Symptom]:
    """Return the unhealthy workers and their symptoms."""
    symptoms = {
        worker_id: _symptom(state, last, limits, now=now)
        for worker_id, last in dict(state.last_heartbeats).items()
    }
    return {worker_id: symptom for worker_id, symptom in symptoms.items() if symptom is not None}


def _symptom(
    state: HealthState, last: LastHeartbeat, limits: HealthLimits, *, now: int
) -> Symptom | None:
    heartbeat, silent = last.heartbeat, state.silence_micros(last, now=now)
    if heartbeat.state is WorkerState.STOPPED:
        return None
    is_overdue = (
        heartbeat.activity_deadline_at is not None
        and heartbeat.sent_at > heartbeat.activity_deadline_at
    )
    if heartbeat.state is WorkerState.STARTING:
        return Symptom.SLOW_START if is_overdue or silent > limits.start_timeout else None
    if silent > limits.heartbeat_timeout:
        return Symptom.SILENT
    if is_overdue:
        return Symptom.OVERDUE
    is_stuck = (
        heartbeat.busy_since is not None
        and heartbeat.sent_at - heartbeat.busy_since > limits.progress_timeout
    )
    return Symptom.STUCK if is_stuck else None


def decide(state: HealthState, limits: HealthLimits, *, now: int) -> list[RunCommanded]:
    """Return the commands to send now: usually none, else restarts of single workers, a restart of
    the pipeline, or the end of the run.

    Args:
        state: The folded log. Commands must be applied to it as soon as they are sent.
        limits: Of the run.
        now: Microseconds since the epoch, by the clock of `state`.
    """
    if state.is_over or state.is_partitioned(now):
        return []
    unhealthy = find_symptoms(state, limits, now=now)
    restarts = []
    for worker_id, symptom in sorted(unhealthy.items()):
        heartbeat = state.last_heartbeats[worker_id].heartbeat
        is_replaceable = _is_replaceable(state, heartbeat.role, unhealthy, limits)
        num_tries = len(state.unrecovered(RecoveryLevel.WORKER_RESTART, worker_id))
        if not _is_due(
            state, state.last_heartbeats[worker_id], limits, now=now, is_replaceable=is_replaceable
        ):
            continue
        reason = _describe_symptom(symptom, state.last_heartbeats[worker_id], state, now=now)
        if num_tries >= limits.max_restarts and not is_replaceable:
            return _escalate(
                state,
                limits,
                f"{worker_id} {reason}; {num_tries} restarts did not help",
                symptom=symptom,
                now=now,
            )
        restarts.append(
            Intervention(
                now, RecoveryLevel.WORKER_RESTART, symptom, worker_id, heartbeat.role
            ).to_command(reason=reason)
        )
    if not restarts and is_stalled(state, limits, now=now):
        reason = (
            f"no worker has had any work for {limits.progress_timeout // MICROS} s, and the "
            "goal is "
            "not reached"
        )
        return _escalate(state, limits, reason, symptom=Symptom.STANDSTILL, now=now)
    return restarts


def is_stalled(state: HealthState, limits: HealthLimits, *, now: int) -> bool:
    """Return whether every worker of the pipeline sends heartbeats and has had no work for long: a
    record was lost between them.
    """
    alive = (
        last.heartbeat
        for last in state.last_heartbeats.values()
        if state.silence_micros(last, now=now) <= limits.heartbeat_timeout
    )
    pipeline = [
        heartbeat
        for heartbeat in alive
        if heartbeat.role in limits.pipeline and heartbeat.state is not WorkerState.STOPPED
    ]
    are_all_there = bool(pipeline) and {heartbeat.role for heartbeat in pipeline} == limits.pipeline
    waits = all(
        heartbeat.state is WorkerState.IDLE
        and heartbeat.sent_at - heartbeat.last_progress_at > limits.progress_timeout
        for heartbeat in pipeline
    )
    is_expected = (
        state.is_paused
        or limits.may_stall
        or now - max(state.connected_since, state.last_step_at) <= limits.progress_timeout
    )
    return are_all_there and waits and not is_expected


def _is_replaceable(
    state: HealthState, role: str, unhealthy: Mapping[str, Symptom], limits: HealthLimits
) -> bool:
    """Return whether the run continues without a worker: its role is an observer, or another worker
    of its role is healthy.
    """
    peers = (
        worker_id
        for worker_id, last in state.last_heartbeats.items()
        if last.heartbeat.role == role and last.heartbeat.state is not WorkerState.STOPPED
    )
    return role not in limits.pipeline or any(worker_id not in unhealthy for worker_id in peers)


def _is_due(
    state: HealthState,
    last: LastHeartbeat,
    limits: HealthLimits,
    *,
    now: int,
    is_replaceable: bool,
) -> bool:
    """Return whether a worker may be restarted now, given the previous interventions. A replaceable
    worker that has sent no heartbeat since is not restarted again.
    """
    acted_at = state.last_intervention_at(last.heartbeat.worker_id)
    if acted_at and last.received_at <= acted_at and is_replaceable:
        return False
    num_tries = len(
        state.unrecovered(RecoveryLevel.WORKER_RESTART, last.heartbeat.worker_id)
    ) or int(acted_at > 0)
    return now - acted_at >= limits.wait_micros(num_tries)


def _escalate(
    state: HealthState, limits: HealthLimits, reason: str, *, symptom: Symptom, now: int
) -> list[RunCommanded]:
    """Restart the pipeline, or end the run after too many restarts; do nothing until the last
    restart has had its time.
    """
    restores = state.unrecovered(RecoveryLevel.PIPELINE_RESTART)
    if restores and now - restores[-1] < limits.wait_micros(len(restores)):
        return []
    if len(restores) >= limits.max_pipeline_restarts:
        first = _describe_first(state.find_first_unrecovered(), reason, symptom=symptom)
        text = (
            f"{reason}; nor did {len(restores)} pipeline restarts "
            f"(health.max_pipeline_restarts){first}; see "
            "docs/how-to/alerts.md#relaxrunaborted"
        )
        return [
            RunCommanded(
                command=Command.STOP,
                reason=text,
                arguments={"symptom": symptom.value},
                commanded_at=now,
            )
        ]
    targets = [
        last.heartbeat
        for last in state.last_heartbeats.values()
        if last.heartbeat.role in limits.pipeline
        and last.heartbeat.state is not WorkerState.STOPPED
    ]
    return [
        Intervention(
            now, RecoveryLevel.PIPELINE_RESTART, symptom, heartbeat.worker_id, heartbeat.role
        ).to_command(reason=f"{PIPELINE_REASON}{reason}")
        for heartbeat in targets
    ]


def _describe_first(first: Intervention | None, reason: str, *, symptom: Symptom) -> str:
    """Return what the first intervention was for, where that is another symptom, or another
    worker's.
    """
    if first is None:
        return ""
    is_of_worker = first.level is RecoveryLevel.WORKER_RESTART
    is_same_worker = not is_of_worker or reason.startswith(f"{first.worker_id} ")
    if first.symptom is symptom and is_same_worker:
        return ""
    name = f"{first.worker_id} " if is_of_worker else ""
    return f"; it began when {name}{first.reason.removeprefix(PIPELINE_REASON)}"


def _describe_symptom(
    symptom: Symptom, last: LastHeartbeat, state: HealthState, *, now: int
) -> str:
    silent, heartbeat = state.silence_micros(last, now=now) / MICROS, last.heartbeat
    seconds_in_activity = (
        heartbeat.sent_at - (heartbeat.activity_since or heartbeat.sent_at)
    ) / MICROS
    match symptom:
        case Symptom.STUCK:
            return (
                "has had work for "
                f"{(heartbeat.sent_at - (heartbeat.busy_since or 0)) / MICROS:.0f} s and "
                "has made no progress"
            )
        case Symptom.OVERDUE:
            late = (
                heartbeat.sent_at - (heartbeat.activity_deadline_at or heartbeat.sent_at)
            ) / MICROS
            return (
                f"has been in one call for {seconds_in_activity:.0f} s: {heartbeat.activity}, "
                f"whose deadline passed {late:.0f} s ago"
            )
        case Symptom.SLOW_START:
            return f"has been starting for {max(silent, seconds_in_activity):.0f} s"
        case _:
            inside = (
                f"; in its last one it was in: {heartbeat.activity} for {seconds_in_activity:.0f} s"
                if heartbeat.activity
                else ""
            )
            return f"has sent no heartbeat for {silent:.0f} s{inside}"
