"""The verdict on a run in one sentence: its most important alarm, or whether it learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_events.projections.alarm_texts import TEXTS, AlarmSettings, State, format_text
from relax_events.projections.alarms import find_alarms
from relax_events.projections.learning_alarms import is_reward_level
from relax_events.projections.run_state import RunState
from relax_events.projections.step_window import MIN_STEPS, StepWindow


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run does, because of which number, and what to do about it.

    Attributes:
        name: Of the sentence, in `TEXTS`.
        values: The numbers in it.
        text: The sentence in English.
        remedy: The key or command to change, with its effect; empty where nothing is to be done.
        page: The tab of the run's page that shows it.
        runbook: The section of the alerts' page; empty where there is none.
    """

    state: State
    name: str
    values: Mapping[str, Any]
    text: str
    remedy: str
    page: str
    runbook: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing is to be done."""
        return self.state in ("learning", "learned", "starting")

    @property
    def line(self) -> str:
        """The verdict in one line."""
        remedy = f". {self.remedy}" if self.remedy else ""
        see = f". See {self.runbook} in docs/how-to/alerts.md" if self.runbook else ""
        return f"{self.state}: {self.text}{remedy}{see}"

    @classmethod
    def build(cls, name: str, values: Mapping[str, Any], *, runbook: str = "") -> Verdict:
        """Fill the sentence of this name."""
        text = TEXTS[name]
        return cls(
            text.state,
            name,
            values,
            format_text(text.text, values),
            format_text(text.remedy, values),
            text.page,
            runbook,
        )


def decide_verdict(settings: AlarmSettings, state: RunState, *, now: int) -> Verdict:
    """Return the verdict on a run as of its log.

    Args:
        settings: Of the run.
        state: The folded control log.
        now: Microseconds since the epoch.
    """
    for alarm in find_alarms(settings, state, now=now):
        return Verdict.build(alarm.name, alarm.values, runbook=alarm.runbook)
    return _describe_learning(StepWindow(state.steps))


def _describe_learning(window: StepWindow) -> Verdict:
    count = len(window.steps)
    rewards, losses = window.trend("reward_mean"), window.trend("loss")
    if count < MIN_STEPS or (rewards is None and losses is None):
        return Verdict.build("few_steps", {"count": count})
    if rewards is None:
        assert losses is not None
        values = {"first": losses.first, "newest": losses.newest}
        return Verdict.build("loss_falls" if losses.is_falling else "loss_level", values)
    values = {"first": rewards.first, "newest": rewards.newest, "count": count}
    if rewards.is_rising:
        return Verdict.build("reward_rises", values)
    return Verdict.build("reward_level" if is_reward_level(window) else "no_rise_yet", values)
