"""An alarm, and the sentences of all alarms in the order of their importance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from relax_events.config import WorkersConfig

Severity = Literal["critical", "warning", "info"]
State = Literal["ill", "slow", "stuck", "learned", "learning", "starting"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something wrong: `name` has a text in each language, which `values` fill; `since` in
    microseconds since the epoch, 0 where that is unknown.
    """

    name: str
    severity: Severity
    since: int
    runbook: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmSettings:
    """What the rules of the alarms, and their remedies, need of a run's settings.

    Attributes:
        roles: Number of workers of each role.
        has_episodes: Whether programs or sessions answer the policy.
    """

    roles: Mapping[str, int]
    workers: WorkersConfig
    has_episodes: bool
    max_staleness: int
    prompts_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    entropy_coefficient: float
    micro_batch_tokens: int | str


class Text(NamedTuple):
    """What is said of a run, and what to do about it, with the key or command and its effect.

    Attributes:
        page: The tab of the run's page that shows it.
    """

    state: State
    page: str
    text: str
    remedy: str = ""


TEXTS: Mapping[str, Text] = {
    "run_failed": Text("ill", "overview", "The run did not reach its goal: {why}"),
    "groups_failing": Text(
        "ill",
        "deadletters",
        "{count} prompt groups failed in a row: {why}",
        "relax deadletter shows the records; the run ends if more fail",
    ),
    "role_without_worker": Text(
        "ill",
        "fleet",
        "No worker of the role {role} is alive",
        "relax worker {role} RUN_FILE starts one, which resumes where the last one stopped",
    ),
    "worker_stuck": Text("ill", "fleet", "{worker} is past the deadline of: {activity}"),
    "worker_silent": Text("ill", "fleet", "{worker} sends no heartbeat"),
    "sessions_dead": Text(
        "ill",
        "fleet",
        "{worker} holds {count} prompt groups, and none of their programs has called for {seconds}",
        "Restart the programs that hold its sessions; their episodes begin again",
    ),
    "run_stalled": Text("ill", "lag", "No train step for {seconds}; they took {interval} each"),
    "updates_skipped": Text(
        "ill",
        "overview",
        "{count} updates were skipped: loss or gradient was not finite",
        "Lower trainer.learning_rate; skipped steps train nothing",
    ),
    "memory_short": Text(
        "ill",
        "fleet",
        "The trainer's memory is too small: {count} prompt groups did not fit, and its passes have "
        "{cells} of {budget} tokens",
        "Lower engine.max_context_tokens, or share the model by trainer.ranks: every prompt group "
        "fits again",
    ),
    "learning_rate_high": Text(
        "ill",
        "overview",
        "The mean reward fell from {best} to {newest} after {metric} grew from {before} to {after}",
        "Fork from before the fall with a third of trainer.learning_rate = {rate}: relax runs "
        "fork; the updates are then a third as large",
    ),
    "reward_collapsed": Text(
        "ill",
        "overview",
        "The mean reward fell from {best} to {newest}",
        "Read the newest samples, then fork from before the fall: relax runs fork",
    ),
    "engine_mismatch": Text(
        "ill",
        "overview",
        "Engine and trainer differ by {mismatch} nats a token on the same weights",
        "Compare engine.dtype and the kernels of both; trainer.max_start_mismatch ends such a run "
        "at its first step",
    ),
    "entropy_collapsed": Text(
        "ill",
        "overview",
        "The policy's entropy is {newest} nats a token, it was {first}, and the reward does not "
        "rise",
        "Raise algorithm.entropy_coefficient = {coefficient} or algorithm.clip_high, and fork from "
        "before: samples differ again",
    ),
    "length_growing": Text(
        "ill",
        "overview",
        "Answers grew from {first} to {newest} tokens, {ratio} reach their limit, and the reward "
        "does not rise",
        "Set algorithm.overlong_ratio, so that long answers earn less, and fork from before",
    ),
    "truncated": Text(
        "ill",
        "samples",
        "{ratio} of the newest samples reached their length limit",
        "Raise engine.sampling.max_new_tokens = {limit}: their answers are then complete and can "
        "earn a reward",
    ),
    "samples_lost": Text(
        "ill", "samples", "{ratio} of the newest samples were lost by environment or engine"
    ),
    "samples_refused": Text(
        "ill", "samples", "{ratio} of the newest samples got no reward: the function failed"
    ),
    "samples_late": Text(
        "ill", "samples", "{ratio} of the newest samples made their program or environment late"
    ),
    "no_signal": Text(
        "ill",
        "samples",
        "{ratio} of the newest prompt groups have equal rewards, so they train nothing; the mean "
        "reward is {reward}",
        "Use data of another level, or more than run.samples_per_prompt = {samples}: each prompt "
        "group with different rewards trains",
    ),
    "samples_expired": Text(
        "slow",
        "lag",
        "{ratio} of the newest prompt groups expired untrained",
        "Use fewer rollout workers or a larger run.max_staleness = {bound}: what they generate is "
        "then trained",
    ),
    "samples_stale": Text(
        "ill",
        "overview",
        "Samples are {staleness} versions old and only {ratio} of them count as the policy's own",
        "Lower run.max_staleness = {bound} or trainer.learning_rate: updates then fit the policy",
    ),
    "slow_reward": Text(
        "slow",
        "timeline",
        "The role {role} works {busy} of its time, and the trainer waits {ratio} of its time",
        "Add workers of it: relax scale RUN_FILE --model {role} --up-to 2, or workers.{role} and "
        "reward.processes in the run file; twice as many make up to {gain} times the steps",
    ),
    "trainer_starved": Text(
        "slow",
        "timeline",
        "The trainer waits for samples {ratio} of its time",
        "Add rollout workers: relax scale RUN_FILE --up-to 2, or workers.rollout in the run file; "
        "twice as many make up to {gain} times the steps",
    ),
    "rollout_starved": Text(
        "slow",
        "timeline",
        "The engines generate {busy} of their time, and the trainer waits {ratio}",
        "Add trainer.ranks, or use fewer rollout workers: the same steps cost less",
    ),
    "dead_letters": Text("ill", "deadletters", "{count} dead letters are open"),
    "worker_restarted": Text("ill", "fleet", "{worker} was restarted: {why}"),
    "reward_flat": Text(
        "stuck",
        "overview",
        "The mean reward is {reward} and has not risen in {count} steps",
        "Read the newest samples: relax samples; then try data of another level or another "
        "trainer.learning_rate",
    ),
    "reward_rises": Text(
        "learning", "overview", "The mean reward rose from {first} to {newest} in {count} steps"
    ),
    "reward_level": Text(
        "learned", "overview", "The mean reward is {newest}, and nearly every sample earns it"
    ),
    "loss_falls": Text("learning", "overview", "The loss fell from {first} to {newest}"),
    "loss_level": Text("learned", "overview", "The loss is {newest} and falls no more"),
    "few_steps": Text("starting", "overview", "{count} train steps are too few for a verdict"),
    "no_rise_yet": Text(
        "starting", "overview", "The mean reward is {newest} and has not risen in {count} steps yet"
    ),
}
"""By name, the most important first."""
ORDER = {name: number for number, name in enumerate(TEXTS)}
MINUTE, HOUR = 60, 3600


def format_text(text: str, values: Mapping[str, Any]) -> str:
    """Fill a sentence with values as they are shown."""
    return text.format_map({name: format_value(name, value) for name, value in values.items()})


def format_value(name: str, value: Any) -> str:
    """Format a value of an alarm by its name."""
    if name in ("ratio", "busy"):
        return f"{value:.0%}"
    if name in ("seconds", "interval"):
        return format_seconds(value)
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def format_seconds(seconds: float) -> str:
    """Format a duration in its largest two units."""
    if seconds < MINUTE:
        return f"{seconds:.3g} s"
    if seconds < HOUR:
        return f"{seconds // MINUTE:.0f} min {seconds % MINUTE:.0f} s"
    return f"{seconds // HOUR:.0f} h {seconds % HOUR // MINUTE:.0f} min"
