"""What is to be done about workers that are not well: pure functions over `HealthState`.

    well ──symptom──▶ restart it ──again, max_restarts in vain, nobody of its role is well──▶
    restore ──again, max_pipeline_restarts in vain──▶ give up
                          ▲                                                                      ▲
                          └── waits heartbeat_timeout_seconds and a back-off after each                       └── nobody has had any work for progress_timeout_seconds

What was in vain is what no `max_staleness + 2` committed steps came after. Onlookers, without whom
the run goes on, are restarted for as long as it takes, and never the reason to restore or to give
up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_events.config import RunConfig
from relax_events.events.parts import Command, WorkerState
from relax_events.events.types import RunCommanded
from relax_events.projections.health import MICROS, Intervention, HealthState, LastHeartbeat, Symptom, RecoveryLevel

OBSERVER_ROLES = frozenset({"controller", "metrics", "evaluator"})
MAX_BACKOFF_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When something is wrong, and how often what is done about it; times in microseconds. See
    `[health]` of the run file.
    """

    heartbeat_timeout: int
    progress_timeout: int
    start_timeout: int
    backoff: int
    max_restarts: int
    max_pipeline_restarts: int
    pipeline: frozenset[str]
    may_stall: bool = False
    """Whether all may be out of work for long: a second learner waits for the run that it
    follows."""

    @classmethod
    def from_config(cls, config: RunConfig) -> HealthLimits:
        """Read the limits off a run file."""
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
        """Return how long to wait after the newest of so many acts that were in vain."""
        return (
            self.heartbeat_timeout
            + min(self.backoff << min(num_acts - 1, 32), int(MAX_BACKOFF_SECONDS * MICROS))
            if num_acts
            else 0
        )


def find_symptoms(state: HealthState, limits: HealthLimits, *, now: int) -> dict[str, Symptom]:
    """Return the workers with which something is wrong."""
    found = {
        worker_id: _symptom(state, heard, limits, now=now)
        for worker_id, heard in dict(state.last_heartbeats).items()
    }
    return {worker_id: symptom for worker_id, symptom in found.items() if symptom is not None}


def _symptom(state: HealthState, heard: LastHeartbeat, limits: HealthLimits, *, now: int) -> Symptom | None:
    beat, silent = heard.heartbeat, state.silence_micros(heard, now=now)
    if beat.state is WorkerState.STOPPED:
        return None
    is_overdue = beat.activity_deadline_at is not None and beat.beat_at > beat.activity_deadline_at
    if beat.state is WorkerState.STARTING:
        return Symptom.SLOW_START if is_overdue or silent > limits.start_timeout else None
    if silent > limits.heartbeat_timeout:
        return Symptom.SILENT
    if is_overdue:
        return Symptom.OVERDUE
    is_stuck = beat.busy_since is not None and beat.beat_at - beat.busy_since > limits.progress_timeout
    return Symptom.STUCK if is_stuck else None


def decide(state: HealthState, limits: HealthLimits, *, now: int) -> list[RunCommanded]:
    """Return what to command now: mostly nothing, else restarts of single workers, a restore of
    all, or the end of the run.

    Args:
        state: What the log says. It must know a command from the moment on at which it is given.
        limits: Of the run.
        now: Microseconds since the epoch, by the clock that `state` was fed with.
    """
    if state.is_over or state.is_partitioned(now):
        return []
    troubled = find_symptoms(state, limits, now=now)
    restarts = []
    for worker_id, symptom in sorted(troubled.items()):
        beat = state.last_heartbeats[worker_id].heartbeat
        is_replaceable = _is_replaceable(state, beat.role, troubled, limits)
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
                f"{worker_id} {reason}; {num_tries} restarts were in vain",
                symptom=symptom,
                now=now,
            )
        restarts.append(
            Intervention(now, RecoveryLevel.WORKER_RESTART, symptom, worker_id, beat.role).to_command(reason=reason)
        )
    if not restarts and is_stalled(state, limits, now=now):
        reason = (
            f"nobody has had any work for {limits.progress_timeout // MICROS} s, and the goal is not reached"
        )
        return _escalate(state, limits, reason, symptom=Symptom.STANDSTILL, now=now)
    return restarts


def is_stalled(state: HealthState, limits: HealthLimits, *, now: int) -> bool:
    """Tell whether every worker of the pipeline breathes and waits for another one: something got
    lost between them.
    """
    breathing = (
        heard.heartbeat
        for heard in state.last_heartbeats.values()
        if state.silence_micros(heard, now=now) <= limits.heartbeat_timeout
    )
    pipeline = [
        beat
        for beat in breathing
        if beat.role in limits.pipeline and beat.state is not WorkerState.STOPPED
    ]
    are_all_there = bool(pipeline) and {beat.role for beat in pipeline} == limits.pipeline
    waits = all(
        beat.state is WorkerState.IDLE and beat.beat_at - beat.last_progress_at > limits.progress_timeout
        for beat in pipeline
    )
    is_meant = (
        state.is_paused
        or limits.may_stall
        or now - max(state.connected_since, state.last_step_at) <= limits.progress_timeout
    )
    return are_all_there and waits and not is_meant


def _is_replaceable(
    state: HealthState, role: str, troubled: Mapping[str, Symptom], limits: HealthLimits
) -> bool:
    """Tell whether the run goes on without a worker: it is an onlooker's, or another one of its
    role is well.
    """
    peers = (
        worker_id
        for worker_id, heard in state.last_heartbeats.items()
        if heard.heartbeat.role == role and heard.heartbeat.state is not WorkerState.STOPPED
    )
    return role not in limits.pipeline or any(worker_id not in troubled for worker_id in peers)


def _is_due(
    state: HealthState, heard: LastHeartbeat, limits: HealthLimits, *, now: int, is_replaceable: bool
) -> bool:
    """Tell whether something is to be done now, given what was done before; nobody asks a worker
    again that was never heard since.
    """
    last = state.last_intervention_at(heard.heartbeat.worker_id)
    if last and heard.received_at <= last and is_replaceable:
        return False
    num_tries = len(state.unrecovered(RecoveryLevel.WORKER_RESTART, heard.heartbeat.worker_id)) or int(last > 0)
    return now - last >= limits.wait_micros(num_tries)


def _escalate(
    state: HealthState, limits: HealthLimits, reason: str, *, symptom: Symptom, now: int
) -> list[RunCommanded]:
    """Restore the run, or end it when that was done too often; nothing while the last restore has
    not had its time.
    """
    restores = state.unrecovered(RecoveryLevel.PIPELINE_RESTART)
    if restores and now - restores[-1] < limits.wait_micros(len(restores)):
        return []
    if len(restores) >= limits.max_pipeline_restarts:
        told = (
            f"{reason}; and {len(restores)} restores were (health.max_pipeline_restarts); see "
            "docs/how-to/alerts/relax-run-given-up.md"
        )
        return [
            RunCommanded(
                command=Command.STOP,
                reason=told,
                arguments={"symptom": symptom.value},
                commanded_at=now,
            )
        ]
    targets = [
        heard.heartbeat
        for heard in state.last_heartbeats.values()
        if heard.heartbeat.role in limits.pipeline and heard.heartbeat.state is not WorkerState.STOPPED
    ]
    return [
        Intervention(now, RecoveryLevel.PIPELINE_RESTART, symptom, beat.worker_id, beat.role).to_command(
            reason=f"restore: {reason}"
        )
        for beat in targets
    ]


def _describe_symptom(symptom: Symptom, heard: LastHeartbeat, state: HealthState, *, now: int) -> str:
    silent, beat = state.silence_micros(heard, now=now) / MICROS, heard.heartbeat
    seconds_in_activity = (beat.beat_at - (beat.activity_since or beat.beat_at)) / MICROS
    match symptom:
        case Symptom.STUCK:
            return (
                f"has had work for {(beat.beat_at - (beat.busy_since or 0)) / MICROS:.0f} s and "
                "has not got on with it"
            )
        case Symptom.OVERDUE:
            late = (beat.beat_at - (beat.activity_deadline_at or beat.beat_at)) / MICROS
            return (
                f"has been busy with one call for {seconds_in_activity:.0f} s: {beat.activity}, "
                f"whose deadline passed {late:.0f} s ago"
            )
        case Symptom.SLOW_START:
            return f"has been starting for {max(silent, seconds_in_activity):.0f} s"
        case _:
            inside = (
                f"; its last one said: {beat.activity} for {seconds_in_activity:.0f} s"
                if beat.activity
                else ""
            )
            return f"has sent no beat for {silent:.0f} s{inside}"
