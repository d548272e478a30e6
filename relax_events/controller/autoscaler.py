"""The scaling policy: chooses the number of rollout workers from observations of the last minutes,
and the loop that applies it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

import structlog

from relax_events.config import RunConfig
from relax_events.config.scaling import AutoscalerConfig
from relax_events.controller.scaling_admission import TOLERANCE, RejectedError
from relax_events.controller.scaling_bounds import WorkerPool
from relax_events.controller.scaling_service import ScalingService
from relax_events.projections.run_state import RunState
from relax_events.projections.scale_requests import DEFAULT_MODEL, MICROS, Kind, ScaleCommand
from relax_events.projections.scaling import is_running

log = structlog.get_logger()
KEY = "autoscaler/"
OBSERVATIONS = 3
"""Of the metrics in the time for which a condition must hold."""
OUT_COOLDOWN, IN_COOLDOWN = 2.0, 2.5
"""Minimum times between two scale-outs, and between any change and a scale-in, as multiples of the
times for which a condition must hold."""
OUT_WORKERS = 4
"""Added at a time at most."""
OUT_USAGE_RATIO = 0.85
"""Workers that hold more than this share of their capacity are too few."""
OUT_WAIT_RATIO = 0.5
"""A trainer that waits for samples for more than this share of a step has too few workers."""
TRAINER_STALENESS_RATIO = 0.9
"""The trainer is the bottleneck when the mean staleness of a step is at least this share of its
bound, and it waits for less than `TRAINER_WAIT_RATIO` of the step."""
TRAINER_WAIT_RATIO = 0.05
IN_USAGE_RATIO = 0.3
"""Workers that hold less than this share of their capacity are too many, unless the workers that
stay would hold `IN_PROJECTED_USAGE_RATIO`."""
IN_PROJECTED_USAGE_RATIO = 0.5
IN_THROUGHPUT_VARIANCE = 0.1
"""Throughput (prompt groups per second) is steady when its variance, divided by its squared mean,
is at most this."""
MIN_COVERAGE = 0.8
"""Share of the expected observations of an interval that must be known to use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The load at one time; None where it is unknown.

    Attributes:
        at: Microseconds since the epoch.
        num_workers: Rollout workers that take work.
        usage: Prompt groups that they hold, as a share of their lanes. A worker that holds more,
            because samples have ended, counts as full.
        queued: Queued prompt groups without a lease, per worker.
        groups_per_second: Prompt groups that all workers finish per second.
        wait: Share of the newest train step that the trainer waited for samples.
        staleness: Mean staleness of the newest train step, as a share of the bound; 0 where the
            bound is 0.
    """

    at: int
    num_workers: int
    usage: float | None = None
    queued: float | None = None
    groups_per_second: float | None = None
    wait: float | None = None
    staleness: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A wanted number of workers, with the reason."""

    kind: Kind
    target: int
    reason: str


def decide(
    looks: Sequence[Observation],
    rules: AutoscalerConfig,
    pool: WorkerPool,
    *,
    num_wanted: int,
    last_out_at: int,
    last_in_at: int,
) -> Decision | None:
    """Return the decision to scale now, or None.

    Args:
        looks: Observations, oldest first; the time of the newest is the current time.
        rules: Of the run file.
        pool: Bounds of the rollout workers.
        num_wanted: Current desired number of workers.
        last_out_at: When the autoscaler last added workers; 0 for never.
        last_in_at: When it last removed workers; 0 for never.
    """
    if not looks or not looks[-1].num_workers:
        return None
    now = looks[-1].at
    reason = _scale_out_reason(looks, rules)
    if reason and not _is_trainer_bottleneck(looks[-1]):
        target = min(num_wanted + OUT_WORKERS, pool.max_workers)
        is_rested = now - last_out_at >= OUT_COOLDOWN * rules.out_seconds * MICROS
        return Decision(Kind.OUT, target, reason) if target > num_wanted and is_rested else None
    target = max(num_wanted - int(TOLERANCE * num_wanted) - 1, pool.num_at_start)
    is_rested = now - max(last_out_at, last_in_at) >= IN_COOLDOWN * rules.in_seconds * MICROS
    if (
        target < num_wanted
        and is_rested
        and _should_scale_in(looks, rules, kept=target / num_wanted)
    ):
        return Decision(
            Kind.IN,
            target,
            (f"usage below {IN_USAGE_RATIO:g} and nothing queued for {rules.in_seconds:g} s"),
        )
    return None


def _scale_out_reason(looks: Sequence[Observation], rules: AutoscalerConfig) -> str:
    """Return the condition for more workers that holds; empty when none does."""
    conditions = (
        ("usage", "usage", OUT_USAGE_RATIO),
        ("queued", "prompt groups queued for each worker", rules.out_queue_prompt_groups),
        ("wait", "share of a step that the trainer waits", OUT_WAIT_RATIO),
    )
    for metric, text, bound in conditions:
        values = _values_over(looks, metric, rules, seconds=rules.out_seconds)
        if values and min(values) > bound:
            return f"{text} above {bound:g} for {rules.out_seconds:g} s"
    return ""


def _should_scale_in(looks: Sequence[Observation], rules: AutoscalerConfig, *, kept: float) -> bool:
    """Return whether all conditions for fewer workers hold; the share `kept` of the current workers
    would remain.
    """
    usages, queues, speeds = (
        _values_over(looks, metric, rules, seconds=rules.in_seconds)
        for metric in ("usage", "queued", "groups_per_second")
    )
    if not usages or not queues or not speeds:
        return False
    is_steady = pvariance(speeds) <= IN_THROUGHPUT_VARIANCE * fmean(speeds) ** 2
    return (
        max(usages) < IN_USAGE_RATIO
        and max(queues) <= 0
        and is_steady
        and usages[-1] / kept < IN_PROJECTED_USAGE_RATIO
    )


def _is_trainer_bottleneck(look: Observation) -> bool:
    """Return whether samples wait for the trainer: more of them would only be older when they are
    trained.
    """
    if look.wait is None or look.staleness is None:
        return False
    return look.staleness >= TRAINER_STALENESS_RATIO and look.wait < TRAINER_WAIT_RATIO


def _values_over(
    looks: Sequence[Observation], metric: str, rules: AutoscalerConfig, *, seconds: float
) -> list[float]:
    """Return a metric over the last seconds; empty where too few observations know it."""
    every = rules.out_seconds / OBSERVATIONS
    begin = looks[-1].at - int(seconds * MICROS)
    if looks[0].at > begin + int(every * MICROS):
        return []
    values = [getattr(look, metric) for look in looks if look.at >= begin]
    reported = [value for value in values if value is not None]
    return reported if len(reported) >= MIN_COVERAGE * seconds / every else []


class Autoscaler:
    """Observes the load at intervals and requests a change as any caller would. The controller's
    loop calls it.
    """

    def __init__(self, config: RunConfig, run: RunState, service: ScalingService) -> None:
        self._rules, self._config, self._run, self._service = (
            config.scaling.autoscaler,
            config,
            run,
            service,
        )
        self._interval_seconds = self._rules.out_seconds / OBSERVATIONS
        longest = max(self._rules.out_seconds, self._rules.in_seconds)
        self._observations: deque[Observation] = deque(
            maxlen=int(longest / self._interval_seconds) + 2
        )

    def poll(self, *, now: int, num_unfinished: int | None) -> None:
        """Observe the load if an observation is due, and request what the policy decides.

        Args:
            now: Microseconds since the epoch.
            num_unfinished: Unfinished prompt groups on the queue; None where the broker does not
                report it.
        """
        pool = self._service.bounds.pools.get(DEFAULT_MODEL)
        is_due = (
            not self._observations
            or now - self._observations[-1].at >= self._interval_seconds * MICROS
        )
        if pool is None or not self._rules.enabled or self._run.ended is not None or not is_due:
            return
        self._observations.append(self.observe(now=now, num_unfinished=num_unfinished))
        if self._service.state.open_request(pool.role, now=now) is not None:
            return
        num_wanted = pool.num_desired(self._service.state)
        last_out, last_in = self._last_request_at(Kind.OUT), self._last_request_at(Kind.IN)
        verdict = decide(
            self._observations,
            self._rules,
            pool,
            num_wanted=num_wanted,
            last_out_at=last_out,
            last_in_at=last_in,
        )
        if verdict is None:
            return
        command = ScaleCommand(kind=verdict.kind, target=verdict.target, key=f"{KEY}{now}")
        decision = {"direction": verdict.kind, "target": verdict.target}
        try:
            answer = self._service.scale(command, dry_run=False)
        except RejectedError as refusal:
            log.info("scaling.rejected", **decision, reason=str(refusal))
        else:
            log.info(
                "scaling.requested",
                **decision,
                reason=verdict.reason,
                request_id=answer.request_id,
            )

    def _last_request_at(self, kind: Kind) -> int:
        """Return when the autoscaler's newest request was made, by this or an earlier
        controller.
        """
        ours = (
            request
            for request in self._service.state.requests.values()
            if request.kind is kind and request.command.key.startswith(KEY)
        )
        return max((request.created_at for request in ours), default=0)

    def observe(self, *, now: int, num_unfinished: int | None) -> Observation:
        """Build an observation from the current state."""
        state = self._service.state
        heartbeats = [
            heartbeat
            for heartbeat in state.last_heartbeats.values()
            if heartbeat.role == "rollout" and is_running(heartbeat)
        ]
        held, num_lanes = [one.num_in_flight for one in heartbeats], self._config.num_lanes
        num_held = sum(held)
        reported = [
            self._run.metrics[heartbeat.worker_id].values.get("records_per_second", 0.0)
            for heartbeat in heartbeats
            if heartbeat.worker_id in self._run.metrics
        ]
        step = self._run.steps[-1] if self._run.steps else None
        total_seconds = sum(step.phase_seconds.values()) if step else 0.0
        bound = self._config.run.max_staleness
        return Observation(
            at=now,
            num_workers=len(heartbeats),
            usage=fmean(min(number / num_lanes, 1.0) for number in held) if held else None,
            queued=max(num_unfinished - num_held, 0) / len(heartbeats)
            if heartbeats and num_unfinished is not None
            else None,
            groups_per_second=sum(reported) if reported else None,
            wait=step.phase_seconds.get("wait", 0.0) / total_seconds
            if step and total_seconds > 0
            else None,
            staleness=None
            if step is None
            else step.metrics.get("staleness_mean", 0.0) / bound
            if bound
            else 0.0,
        )
