"""What is wrong with a run now, since when, and the page that says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from relax_events.api.events import SampleOutcome, WorkerHeartbeat, WorkerState, now_micros
from relax_events.api.runs import compute_rates, compute_silence_limit, find_live_workers
from relax_events.packages.dashboard.run_fold import RunFold
from relax_events.packages.dashboard.run_reader import RunReader
from relax_events.packages.dashboard.views import group_curves, recent_share

MICROS = 1e6
RECENT_STEPS = 20
STALLED_STEPS = 10.0
STALLED_SECONDS = 60.0
STARVED_RATIO = 0.5
TRUNCATED_RATIO = 0.25
SIGNALLESS_RATIO = 0.5
COLLAPSED_RATIO = 0.5
LOST_OR_LATE = "RelaxSamplesLostOrLate"
ENDED_RATIOS = {
    SampleOutcome.LOST: (0.05, LOST_OR_LATE),
    SampleOutcome.REFUSED: (0.05, ""),
    SampleOutcome.LATE: (0.1, LOST_OR_LATE),
}
"""Largest usual share of a train step's samples that ended so, and the runbook."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something wrong: `name` has a text in each language, which `values` fill; `since` in
    microseconds since the epoch, 0 where that is unknown.
    """

    name: str
    severity: str
    since: int
    runbook: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def list_alarms(reader: RunReader, dead_letters: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the alarms of a run that is read, the severe ones first; `since` in milliseconds.

    Args:
        reader: Of the run.
        dead_letters: Of the run.
    """
    groups = reader.remember("groups", lambda: group_curves(reader.table))
    unresolved = [letter for letter in dead_letters if not letter["resolution"]]
    with reader.lock:
        alarms = find_alarms(
            reader.fold,
            now=reader.status.known_now(now_micros()),
            truncated=recent_share(groups["truncated"]),
            signalless=recent_share(groups["signalless"]),
            num_dead_letters=len(unresolved),
            oldest_dead_letter_at=min((letter["written_at"] for letter in unresolved), default=0)
            * 1000,
        )
    for alarm in alarms:
        alarm["since"] //= 1000
    return alarms


def find_alarms(
    fold: RunFold,
    *,
    now: int,
    truncated: float | None = None,
    signalless: float | None = None,
    num_dead_letters: int = 0,
    oldest_dead_letter_at: int = 0,
) -> list[dict[str, Any]]:
    """Return the alarms of a run, the severe ones first.

    Args:
        fold: The run's state.
        now: Microseconds since the epoch.
        truncated: Share of the newest samples that reached their length limit.
        signalless: Share of the newest prompt groups whose rewards are all equal.
        num_dead_letters: Open dead letters.
        oldest_dead_letter_at: When the oldest of them was written.
    """
    alarms = [*_of_the_run(fold), *_of_learning(fold, truncated, signalless)]
    if num_dead_letters:
        values = {"count": num_dead_letters}
        alarms.append(
            Alarm(
                "dead_letters",
                "warning",
                oldest_dead_letter_at,
                "RelaxDeadLettersArriving",
                values,
            )
        )
    if fold.ended is None:
        alarms += [*_of_workers(fold, now), *_of_progress(fold, now)]
    alarms.sort(key=lambda alarm: (alarm.severity != "critical", alarm.since))
    return [asdict(alarm) for alarm in alarms]


def _of_the_run(fold: RunFold) -> Iterator[Alarm]:
    ended = fold.ended
    if ended is not None and not ended.succeeded:
        yield Alarm(
            "run_failed", "critical", ended.commanded_at, "RelaxRunAborted", {"why": ended.reason}
        )
    if fold.num_consecutive_failures:
        yield Alarm(
            "groups_failing",
            "critical",
            fold.failing_since,
            "RelaxPromptGroupsFailing",
            {"count": fold.num_consecutive_failures, "why": fold.last_failure},
        )
    if fold.num_updates_skipped:
        yield Alarm(
            "updates_skipped",
            "critical" if fold.num_consecutive_skips else "warning",
            fold.skipped_at,
            "RelaxStepNotFinite",
            {"count": fold.num_updates_skipped},
        )
    for act in fold.health.interventions[-5:]:
        yield Alarm(
            "worker_restarted",
            "warning",
            act.at,
            "RelaxWorkerRestartedOften",
            {"worker": act.worker_id, "why": act.symptom.value},
        )


def _of_learning(
    fold: RunFold, truncated: float | None, signalless: float | None
) -> Iterator[Alarm]:
    committed = fold.curves.committed_at
    since = committed[-min(RECENT_STEPS, len(committed))] if committed else 0
    is_over = fold.ended is not None
    if not is_over and truncated is not None and truncated > TRUNCATED_RATIO:
        yield Alarm("truncated", "warning", since, "", {"ratio": truncated})
    if not is_over and signalless is not None and signalless > SIGNALLESS_RATIO:
        yield Alarm("no_signal", "warning", since, "", {"ratio": signalless})
    counts = {
        outcome: sum(fold.curves.recent(f"samples_ended/{outcome}", RECENT_STEPS))
        for outcome in SampleOutcome
    }
    for outcome, (usual, runbook) in ENDED_RATIOS.items():
        ratio = counts[outcome] / max(sum(counts.values()), 1.0)
        if not is_over and ratio > usual:
            yield Alarm(f"samples_{outcome}", "warning", since, runbook, {"ratio": ratio})
    rewards = fold.curves.recent("reward_mean", len(committed))
    if len(rewards) >= 2 * RECENT_STEPS:
        means = [
            sum(rewards[at : at + RECENT_STEPS]) / RECENT_STEPS
            for at in range(0, len(rewards) - RECENT_STEPS + 1, RECENT_STEPS // 2)
        ]
        best, newest = max(means), sum(rewards[-RECENT_STEPS:]) / RECENT_STEPS
        if best > 0 and newest < COLLAPSED_RATIO * best:
            yield Alarm(
                "reward_collapsed",
                "critical",
                since,
                "RelaxRewardCollapsed",
                {"best": best, "newest": newest},
            )


def _of_workers(fold: RunFold, now: int) -> Iterator[Alarm]:
    workers = fold.config.workers
    live = find_live_workers(fold, workers, now=now)
    forgotten_before = now - 20 * compute_silence_limit(workers)
    alive = set()
    for heartbeat in fold.workers.values():
        if heartbeat.state is WorkerState.STOPPED or heartbeat.sent_at < fold.resumed_at:
            continue
        if heartbeat.worker_id in live:
            alive.add(heartbeat.role)
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
    for role in fold.config.roles() if alive else ():
        if role not in alive:
            yield Alarm(
                "role_without_worker", "critical", 0, "RelaxRoleWithoutWorker", {"role": role}
            )


def _stuck(heartbeat: WorkerHeartbeat) -> Alarm:
    return Alarm(
        "worker_stuck",
        "critical",
        heartbeat.activity_since or 0,
        "RelaxEngineStuck" if heartbeat.role == "rollout" else "RelaxWorkerSilent",
        {"worker": heartbeat.worker_id, "activity": heartbeat.activity},
    )


def _of_progress(fold: RunFold, now: int) -> Iterator[Alarm]:
    steps, rates = fold.steps[-RECENT_STEPS:], compute_rates(fold.steps)
    if rates.step_seconds is None or fold.is_paused:
        return
    silent = (now - steps[-1].committed_at) / MICROS
    if silent > max(STALLED_STEPS * rates.step_seconds, STALLED_SECONDS):
        yield Alarm(
            "run_stalled",
            "critical",
            steps[-1].committed_at,
            "RelaxRunStalled",
            {"seconds": silent, "interval": rates.step_seconds},
        )
    waiting = rates.phase_ratios.get("wait", 0.0)
    if waiting > STARVED_RATIO and len(steps) == RECENT_STEPS:
        yield Alarm(
            "trainer_starved",
            "warning",
            steps[0].committed_at,
            "RelaxTrainerStarved",
            {"ratio": waiting},
        )
