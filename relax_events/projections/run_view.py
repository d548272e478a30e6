"""The view of a run that `relax status`, the terminal and the page print: plain values, computed
from the run's state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax_events.config import RunConfig
from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat
from relax_events.projections.alarm_texts import AlarmSettings
from relax_events.projections.run_state import RunState, max_sample_staleness
from relax_events.projections.run_status import RunStatus, decide_status, is_overdue
from relax_events.projections.step_rates import compute_rates
from relax_events.projections.verdict import Verdict, decide_verdict

SPARK_STEPS = 40
ENGINE_METRIC = "decoding_samples"
"""A metric that only workers with an inference engine report."""
MICROS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A worker as the display shows it; None where a value is unknown.

    Attributes:
        heartbeat_age_seconds: The time since its last heartbeat.
        activity: Its current long call, as `publish weights 12 s`; empty where there is none.
        engine: Metrics of its inference engine, by name, from its newest report; empty where it has
            none.
    """

    worker_id: str
    state: str
    is_healthy: bool
    policy_version: int | None = None
    num_processed: int | None = None
    num_in_flight: int | None = None
    records_per_second: float | None = None
    heartbeat_age_seconds: float | None = None
    activity: str = ""
    num_restarts: int = 0
    engine: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one time; None where a value is unknown.

    `reward`, `loss`, `kl_estimate` and the staleness are the newest step's; `rewards` are those of
    the last steps, oldest first. The rates by time, the remaining time and `phase_ratios` come from
    `compute_rates`.

    Attributes:
        reason: Why it ended; empty where it has not.
        verdict: What it does, because of which number.
        lag: Records behind, by role and slot.
    """

    run_id: str
    status: RunStatus
    reason: str
    succeeded: bool
    is_paused: bool
    step: int
    num_steps: int
    policy_version: int
    reward: float | None
    rewards: tuple[float, ...]
    loss: float | None
    kl_estimate: float | None
    staleness_mean: float | None
    staleness_max: int | None
    tokens_per_second: float | None
    samples_per_second: float | None
    step_seconds: float | None
    remaining_seconds: float | None
    outcomes: Mapping[str, int]
    phase_ratios: Mapping[str, float]
    verdict: Verdict
    workers: Sequence[WorkerRow] = ()
    lag: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def num_lagging(self) -> int:
        """Records behind, of all roles."""
        return sum(count for slots in self.lag.values() for count in slots.values())

    @property
    def learning_metrics(self) -> Mapping[str, float | None]:
        """Reward, loss and KL by name, without those that the newest step does not have."""
        named = {"reward": self.reward, "loss": self.loss, "kl": self.kl_estimate}
        return {name: value for name, value in named.items() if value is not None or not self.step}

    @classmethod
    def from_state(
        cls,
        config: RunConfig,
        state: RunState,
        *,
        now: int,
        workers: Sequence[WorkerRow] = (),
        lag: Mapping[str, Mapping[int, int]] | None = None,
    ) -> RunView:
        """Compute the view.

        Args:
            config: The run.
            state: The folded control log.
            now: Microseconds since the epoch.
            workers: Of a `WorkerTable`.
            lag: Records behind, by role and slot.
        """
        newest, ended = state.steps[-1] if state.steps else None, state.ended
        rates = compute_rates(state.steps)
        metrics = newest.metrics if newest else {}
        rewards = (step.metrics.get("reward_mean", math.nan) for step in state.steps[-SPARK_STEPS:])
        return cls(
            run_id=config.run.id,
            status=decide_status(state, config.workers, now=now),
            reason=ended.reason if ended else "",
            succeeded=bool(ended and ended.succeeded),
            is_paused=state.is_paused,
            step=state.num_steps,
            num_steps=config.num_train_steps,
            policy_version=state.policy_version,
            reward=state.reward,
            rewards=tuple(reward for reward in rewards if math.isfinite(reward)),
            loss=metrics.get("loss"),
            kl_estimate=metrics.get("kl_estimate"),
            staleness_mean=metrics.get("staleness_mean"),
            staleness_max=max_sample_staleness(newest) if newest else None,
            tokens_per_second=rates.tokens_per_second,
            samples_per_second=rates.samples_per_second,
            step_seconds=rates.step_seconds,
            remaining_seconds=None
            if rates.step_seconds is None
            else max(config.num_train_steps - state.num_steps, 0) * rates.step_seconds,
            outcomes=dict(state.outcomes),
            phase_ratios=rates.phase_ratios,
            verdict=decide_verdict(read_alarm_settings(config), state, now=now),
            workers=workers,
            lag=lag or {},
        )


def read_alarm_settings(config: RunConfig) -> AlarmSettings:
    """Return what the rules of the alarms need of a run's settings."""
    return AlarmSettings(
        roles=config.roles(),
        workers=config.workers,
        has_episodes=config.environment.has_episodes,
        max_staleness=config.run.max_staleness,
        prompts_per_step=config.run.prompts_per_step,
        samples_per_prompt=config.run.samples_per_prompt,
        max_new_tokens=config.engine.sampling.max_new_tokens,
        entropy_coefficient=config.algorithm.entropy_coefficient,
        micro_batch_tokens=config.trainer.max_tokens_per_micro_batch,
    )


class WorkerTable:
    """Follows the workers over time. A heartbeat from another process counts as a restart."""

    def __init__(self, config: RunConfig, *, since_micros: int) -> None:
        self._since = since_micros
        self._order = list(config.roles())
        self._expected = {
            f"{role}-{index}" for role, count in config.roles().items() for index in range(count)
        }
        self._local = set[str]() if config.hosts.num_hosts > 1 else set(self._expected)
        self._workers_config = config.workers
        self._processes: dict[str, tuple[str, int]] = {}
        self._restarts: dict[str, int] = {}

    def rows(
        self, state: RunState, *, alive: Mapping[str, bool], now_micros: int
    ) -> list[WorkerRow]:
        """Return a row for each worker that is expected, runs here, or has sent a heartbeat since
        the display was opened.

        The heartbeat topic keeps the last heartbeat of every worker that ever ran, so heartbeats of
        an earlier session are ignored.
        """
        heartbeats = {
            name: heartbeat
            for name, heartbeat in state.workers.items()
            if heartbeat.sent_at >= self._since
        }
        self._local |= alive.keys()
        names = sorted(self._expected | self._local | heartbeats.keys(), key=self._sort_key)
        return [
            self._row(
                name, heartbeats.get(name), state, alive=bool(alive.get(name)), now=now_micros
            )
            for name in names
        ]

    def _sort_key(self, worker_id: str) -> tuple[int, int, str]:
        role, _, index = worker_id.rpartition("-")
        return (
            self._order.index(role) if role in self._order else len(self._order),
            int(index) if index.isdecimal() else 0,
            worker_id,
        )

    def _row(
        self,
        worker_id: str,
        heartbeat: WorkerHeartbeat | None,
        state: RunState,
        *,
        alive: bool,
        now: int,
    ) -> WorkerRow:
        if heartbeat is None:
            absent = "waiting" if state.ended is None else "ended"
            return WorkerRow(
                worker_id=worker_id, state="starting" if alive else absent, is_healthy=True
            )
        self._count_restart(heartbeat)
        age = max(now - heartbeat.sent_at, 0) / MICROS
        label = self._label(heartbeat, age, is_gone=worker_id in self._local and not alive)
        reported = state.metrics.get(worker_id)
        return WorkerRow(
            worker_id=worker_id,
            state=label,
            is_healthy=label not in ("down", "silent"),
            policy_version=heartbeat.policy_version if heartbeat.policy_version >= 0 else None,
            num_processed=heartbeat.num_processed,
            num_in_flight=heartbeat.num_in_flight,
            records_per_second=reported.values.get("records_per_second") if reported else None,
            heartbeat_age_seconds=age,
            activity=format_activity(heartbeat) if label == heartbeat.state.value else "",
            num_restarts=self._restarts.get(worker_id, 0),
            engine=reported.values if reported and ENGINE_METRIC in reported.values else {},
        )

    def _count_restart(self, heartbeat: WorkerHeartbeat) -> None:
        process = (heartbeat.host, heartbeat.pid)
        if self._processes.setdefault(heartbeat.worker_id, process) != process:
            self._processes[heartbeat.worker_id] = process
            self._restarts[heartbeat.worker_id] = self._restarts.get(heartbeat.worker_id, 0) + 1

    def _label(self, heartbeat: WorkerHeartbeat, age: float, *, is_gone: bool) -> str:
        if heartbeat.state is WorkerState.STOPPED:
            return "stopped"
        if is_gone:
            return "down"
        return "silent" if is_overdue(age, self._workers_config) else heartbeat.state.value


def format_activity(heartbeat: WorkerHeartbeat) -> str:
    """Return the long call that a heartbeat names, with its duration at that time."""
    return (
        ""
        if heartbeat.activity_since is None
        else f"{heartbeat.activity} {(heartbeat.sent_at - heartbeat.activity_since) / MICROS:.0f} s"
    )
