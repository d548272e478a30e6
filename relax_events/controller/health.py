"""What is to be done about workers that are not well: pure functions over `HealthState`.

    well ──symptom──▶ restart it ──again, max_restarts in vain, nobody of its role is well──▶
    restore ──again, max_restores in vain──▶ give up
                          ▲                                                                      ▲
                          └── waits hung_seconds and a back-off after each                       └── nobody has had any work for stuck_seconds

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
from relax_events.projections.health import MICROS, Act, HealthState, Heard, Symptom, Tier

ONLOOKERS = frozenset({"controller", "metrics", "evaluator"})
MAX_BACKOFF_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Limits:
    """When something is wrong, and how often what is done about it; times in microseconds. See
    `[health]` of the run file.
    """

    hung: int
    stuck: int
    start: int
    backoff: int
    max_restarts: int
    max_restores: int
    pipeline: frozenset[str]
    may_stand_still: bool = False
    """Whether all may be out of work for long: a second learner waits for the run that it
    follows."""

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        """Read the limits off a run file."""
        health = config.health
        return cls(
            hung=int(config.workers.hung_seconds * MICROS),
            stuck=int(health.stuck_seconds * MICROS),
            start=int(health.start_seconds * MICROS),
            backoff=int(health.backoff_seconds * MICROS),
            max_restarts=health.max_restarts,
            max_restores=health.max_restores,
            pipeline=frozenset(config.roles()) - ONLOOKERS,
            may_stand_still=config.is_replay and config.source.follow,
        )

    def patience(self, num_acts: int) -> int:
        """Return how long to wait after the newest of so many acts that were in vain."""
        return (
            self.hung
            + min(self.backoff << min(num_acts - 1, 32), int(MAX_BACKOFF_SECONDS * MICROS))
            if num_acts
            else 0
        )


def symptoms(state: HealthState, limits: Limits, *, now: int) -> dict[str, Symptom]:
    """Return the workers with which something is wrong."""
    found = {
        worker_id: _symptom(state, heard, limits, now=now)
        for worker_id, heard in dict(state.heard).items()
    }
    return {worker_id: symptom for worker_id, symptom in found.items() if symptom is not None}


def _symptom(state: HealthState, heard: Heard, limits: Limits, *, now: int) -> Symptom | None:
    beat, silent = heard.beat, state.silent_micros(heard, now=now)
    if beat.state is WorkerState.STOPPED:
        return None
    is_overdue = beat.activity_deadline_at is not None and beat.beat_at > beat.activity_deadline_at
    if beat.state is WorkerState.STARTING:
        return Symptom.SLOW_START if is_overdue or silent > limits.start else None
    if silent > limits.hung:
        return Symptom.SILENT
    if is_overdue:
        return Symptom.OVERDUE
    is_stuck = beat.busy_since is not None and beat.beat_at - beat.busy_since > limits.stuck
    return Symptom.STUCK if is_stuck else None


def decide(state: HealthState, limits: Limits, *, now: int) -> list[RunCommanded]:
    """Return what to command now: mostly nothing, else restarts of single workers, a restore of
    all, or the end of the run.

    Args:
        state: What the log says. It must know a command from the moment on at which it is given.
        limits: Of the run.
        now: Microseconds since the epoch, by the clock that `state` was fed with.
    """
    if state.is_over or state.is_deaf(now):
        return []
    troubled = symptoms(state, limits, now=now)
    restarts = []
    for worker_id, symptom in sorted(troubled.items()):
        beat = state.heard[worker_id].beat
        is_replaceable = _is_replaceable(state, beat.role, troubled, limits)
        num_tries = len(state.counted(Tier.RESTART, worker_id))
        if not _is_due(
            state, state.heard[worker_id], limits, now=now, is_replaceable=is_replaceable
        ):
            continue
        reason = _told(symptom, state.heard[worker_id], state, now=now)
        if num_tries >= limits.max_restarts and not is_replaceable:
            return _escalated(
                state,
                limits,
                f"{worker_id} {reason}; {num_tries} restarts were in vain",
                symptom=symptom,
                now=now,
            )
        restarts.append(
            Act(now, Tier.RESTART, symptom, worker_id, beat.role).command(reason=reason)
        )
    if not restarts and stands_still(state, limits, now=now):
        reason = (
            f"nobody has had any work for {limits.stuck // MICROS} s, and the goal is not reached"
        )
        return _escalated(state, limits, reason, symptom=Symptom.STANDSTILL, now=now)
    return restarts


def stands_still(state: HealthState, limits: Limits, *, now: int) -> bool:
    """Tell whether every worker of the pipeline breathes and waits for another one: something got
    lost between them.
    """
    breathing = (
        heard.beat
        for heard in state.heard.values()
        if state.silent_micros(heard, now=now) <= limits.hung
    )
    pipeline = [
        beat
        for beat in breathing
        if beat.role in limits.pipeline and beat.state is not WorkerState.STOPPED
    ]
    are_all_there = bool(pipeline) and {beat.role for beat in pipeline} == limits.pipeline
    waits = all(
        beat.state is WorkerState.IDLE and beat.beat_at - beat.last_progress_at > limits.stuck
        for beat in pipeline
    )
    is_meant = (
        state.is_paused
        or limits.may_stand_still
        or now - max(state.listening_since, state.last_step_at) <= limits.stuck
    )
    return are_all_there and waits and not is_meant


def _is_replaceable(
    state: HealthState, role: str, troubled: Mapping[str, Symptom], limits: Limits
) -> bool:
    """Tell whether the run goes on without a worker: it is an onlooker's, or another one of its
    role is well.
    """
    peers = (
        worker_id
        for worker_id, heard in state.heard.items()
        if heard.beat.role == role and heard.beat.state is not WorkerState.STOPPED
    )
    return role not in limits.pipeline or any(worker_id not in troubled for worker_id in peers)


def _is_due(
    state: HealthState, heard: Heard, limits: Limits, *, now: int, is_replaceable: bool
) -> bool:
    """Tell whether something is to be done now, given what was done before; nobody asks a worker
    again that was never heard since.
    """
    last = state.last_act(heard.beat.worker_id)
    if last and heard.at <= last and is_replaceable:
        return False
    num_tries = len(state.counted(Tier.RESTART, heard.beat.worker_id)) or int(last > 0)
    return now - last >= limits.patience(num_tries)


def _escalated(
    state: HealthState, limits: Limits, reason: str, *, symptom: Symptom, now: int
) -> list[RunCommanded]:
    """Restore the run, or end it when that was done too often; nothing while the last restore has
    not had its time.
    """
    restores = state.counted(Tier.RESTORE)
    if restores and now - restores[-1] < limits.patience(len(restores)):
        return []
    if len(restores) >= limits.max_restores:
        told = (
            f"{reason}; and {len(restores)} restores were (health.max_restores); see "
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
        heard.beat
        for heard in state.heard.values()
        if heard.beat.role in limits.pipeline and heard.beat.state is not WorkerState.STOPPED
    ]
    return [
        Act(now, Tier.RESTORE, symptom, beat.worker_id, beat.role).command(
            reason=f"restore: {reason}"
        )
        for beat in targets
    ]


def _told(symptom: Symptom, heard: Heard, state: HealthState, *, now: int) -> str:
    silent, beat = state.silent_micros(heard, now=now) / MICROS, heard.beat
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
