"""What is wrong with a run now, since when, and the page that says what to do: one list for the
verdict, the page, the terminal and the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat
from relax_events.projections.alarm_texts import ORDER, Alarm, AlarmSettings
from relax_events.projections.base import STOPPED_BY
from relax_events.projections.health import Intervention
from relax_events.projections.learning_alarms import find_learning_alarms
from relax_events.projections.run_state import RunState
from relax_events.projections.run_status import compute_silence_limit, find_live_workers
from relax_events.projections.step_rates import compute_rates
from relax_events.projections.step_window import RECENT_STEPS, StepWindow

MICROS = 1e6
STALLED_STEPS = 10.0
STALLED_SECONDS = 60.0
STARVED_RATIO, STARVED_SYNC_RATIO = 0.6, 0.9
SATURATED_RATIO = 0.8
WAITLESS_RATIO, IDLE_RATIO = 0.05, 0.5
SILENT_SESSION_SECONDS, SILENT_SESSION_STEPS = 60.0, 3.0
SEVERITIES = ("critical", "warning", "info")
SCORING_ROLES = ("reward", "judge", "reference", "actor-forward", "teacher")


def find_alarms(
    settings: AlarmSettings,
    state: RunState,
    *,
    now: int,
    interventions: Sequence[Intervention] = (),
    num_dead_letters: int = 0,
    oldest_dead_letter_at: int = 0,
) -> list[Alarm]:
    """Return the alarms of a run: the severe ones first, then the important ones.

    Args:
        settings: Of the run.
        state: The folded control log.
        now: Microseconds since the epoch.
        interventions: Of the health manager.
        num_dead_letters: Open dead letters.
        oldest_dead_letter_at: When the oldest of them was written.
    """
    window = StepWindow(state.steps)
    alarms = [*_of_the_run(state, interventions), *find_learning_alarms(settings, state, window)]
    if num_dead_letters:
        values = {"count": num_dead_letters}
        runbook = "RelaxDeadLettersArriving"
        alarms.append(Alarm("dead_letters", "warning", oldest_dead_letter_at, runbook, values))
    if len(window.steps) >= RECENT_STEPS:
        alarms += _of_pace(settings, state)
    if state.ended is None:
        alarms += [*_of_workers(settings, state, now), *_of_progress(settings, state, now)]
    alarms.sort(
        key=lambda alarm: (SEVERITIES.index(alarm.severity), ORDER[alarm.name], alarm.since)
    )
    return alarms


def _of_the_run(state: RunState, interventions: Sequence[Intervention]) -> Iterator[Alarm]:
    ended = state.ended
    if ended is not None and not (ended.succeeded or STOPPED_BY in ended.arguments):
        yield Alarm(
            "run_failed", "critical", ended.commanded_at, "RelaxRunAborted", {"why": ended.reason}
        )
    if state.num_consecutive_failures:
        yield Alarm(
            "groups_failing",
            "critical",
            state.failing_since,
            "RelaxPromptGroupsFailing",
            {"count": state.num_consecutive_failures, "why": state.last_failure},
        )
    if state.num_updates_skipped:
        yield Alarm(
            "updates_skipped",
            "critical" if state.num_consecutive_skips else "warning",
            state.skipped_at,
            "RelaxStepNotFinite",
            {"count": state.num_updates_skipped},
        )
    for act in interventions[-5:]:
        yield Alarm(
            "worker_restarted",
            "warning",
            act.at,
            "RelaxWorkerRestartedOften",
            {"worker": act.worker_id, "why": act.symptom.value},
        )


def _of_workers(settings: AlarmSettings, state: RunState, now: int) -> Iterator[Alarm]:
    workers = settings.workers
    live = find_live_workers(state, workers, now=now)
    forgotten_before = now - 20 * compute_silence_limit(workers)
    for heartbeat in state.workers.values():
        if heartbeat.state is WorkerState.STOPPED or heartbeat.sent_at < state.resumed_at:
            continue
        if heartbeat.worker_id in live:
            if alarm := _of_sessions(settings, state, heartbeat):
                yield alarm
            if heartbeat.activity_deadline_at is not None and now > heartbeat.activity_deadline_at:
                yield _stuck(heartbeat)
        elif heartbeat.sent_at >= forgotten_before:
            yield Alarm(
                "worker_silent",
                "critical",
                heartbeat.sent_at,
                "RelaxControllerSilent" if heartbeat.role == "controller" else "RelaxWorkerSilent",
                {"worker": heartbeat.worker_id},
            )
    for role in _list_missing_roles(settings, state, live):
        values = {"role": role}
        yield Alarm("role_without_worker", "critical", 0, "RelaxRoleWithoutWorker", values)


def _list_missing_roles(
    settings: AlarmSettings, state: RunState, live: Mapping[str, WorkerHeartbeat]
) -> list[str]:
    """Return the roles without a live worker; none while a run starts, drains, or is interrupted:
    then its workers come and go one after another.
    """
    session = [one for one in state.workers.values() if one.sent_at >= state.resumed_at]
    alive = {one.role for one in live.values() if one.sent_at >= state.resumed_at}
    stopped = {one.role for one in session if one.state is WorkerState.STOPPED} - alive
    is_draining = len(stopped) > 1 or any(
        one.state is WorkerState.DRAINING for one in live.values()
    )
    if not alive or is_draining:
        return []
    has_begun = bool(state.steps) and state.steps[-1].committed_at >= state.resumed_at
    expected = settings.roles if has_begun else {one.role for one in session}
    return [role for role in settings.roles if role in expected and role not in alive]


def _of_sessions(
    settings: AlarmSettings, state: RunState, heartbeat: WorkerHeartbeat
) -> Alarm | None:
    """Return the alarm of a rollout worker whose episodes stand still; None for another."""
    if heartbeat.role != "rollout" or heartbeat.busy_since is None or not settings.has_episodes:
        return None
    seconds = (heartbeat.sent_at - heartbeat.busy_since) / MICROS
    interval = compute_rates(state.steps).step_seconds or 0.0
    if seconds <= max(SILENT_SESSION_SECONDS, SILENT_SESSION_STEPS * interval):
        return None
    count = len(heartbeat.prompt_groups_in_flight) or heartbeat.num_in_flight
    values = {"worker": heartbeat.worker_id, "count": count, "seconds": seconds}
    return Alarm("sessions_dead", "critical", heartbeat.busy_since, "RelaxSessionsDead", values)


def _stuck(heartbeat: WorkerHeartbeat) -> Alarm:
    return Alarm(
        "worker_stuck",
        "critical",
        heartbeat.activity_since or 0,
        "RelaxEngineStuck" if heartbeat.role == "rollout" else "RelaxWorkerSilent",
        {"worker": heartbeat.worker_id, "activity": heartbeat.activity},
    )


def _of_progress(settings: AlarmSettings, state: RunState, now: int) -> Iterator[Alarm]:
    interval = compute_rates(state.steps).step_seconds
    if interval is None or state.is_paused:
        return
    newest = state.steps[-1].committed_at
    silent = (now - newest) / MICROS
    if silent > max(STALLED_STEPS * interval, STALLED_SECONDS):
        values = {"seconds": silent, "interval": interval}
        yield Alarm("run_stalled", "critical", newest, "RelaxRunStalled", values)


def _of_pace(settings: AlarmSettings, state: RunState) -> Iterator[Alarm]:
    """Yield which role the others wait for."""
    roles, since = settings.roles, state.steps[-RECENT_STEPS:][0].committed_at
    waiting = compute_rates(state.steps).phase_ratios.get("wait", 0.0)
    busy: dict[str, float] = {
        role: ratio
        for role in ("rollout", *SCORING_ROLES)
        if role in roles and (ratio := compute_busy_ratio(state, role, since)) is not None
    }
    usual = STARVED_RATIO if settings.max_staleness else STARVED_SYNC_RATIO
    values: dict[str, Any] = {"ratio": waiting, "gain": 1 / (1 - waiting / 2)}
    if "rollout" in roles and waiting > usual:
        role = max(busy, key=lambda name: busy[name], default="rollout")
        if role != "rollout" and busy[role] > SATURATED_RATIO:
            values |= {"role": role, "busy": busy[role]}
            yield Alarm("slow_reward", "info", since, "RelaxRoleBehind", values)
        else:
            yield Alarm("trainer_starved", "info", since, "RelaxTrainerStarved", values)
    if waiting < WAITLESS_RATIO and busy.get("rollout", 1.0) < IDLE_RATIO:
        values = {"ratio": waiting, "busy": busy["rollout"]}
        yield Alarm("rollout_starved", "info", since, "RelaxRolloutStarved", values)


def compute_busy_ratio(state: RunState, role: str, since: int) -> float | None:
    """Return the mean share of their time that the workers of a role work, or that their engines
    generate, by their newest reports; None without a report since then.
    """
    ratios = [
        report.values.get("generating_ratio", report.values.get("busy_ratio", 0.0))
        for report in state.metrics.values()
        if report.role == role and report.reported_at >= since
    ]
    return sum(ratios) / len(ratios) if ratios else None
