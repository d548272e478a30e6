"""What a change of a key does to a run that resumes. Each key or section says so with its type; a
key without a rule has that of its section (ADR 54).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rule(StrEnum):
    """Rule for a changed key when a run resumes."""

    FREE = "free"
    """The change is taken, and shown."""
    ACCEPTED = "if accepted"
    """Changes the training from here on: the user must accept it."""
    NEVER = "never"
    """The run can't resume with it; a fork can."""


@dataclass(frozen=True, slots=True)
class OnResume:
    """Whether a key may change when a run resumes, and what the change does."""

    rule: Rule
    effect: str


def free(effect: str) -> OnResume:
    """Mark a key whose change is taken, and shown."""
    return OnResume(Rule.FREE, effect)


def accepted(effect: str) -> OnResume:
    """Mark a key whose change the user must accept: it changes the training from here on."""
    return OnResume(Rule.ACCEPTED, effect)


def never(effect: str) -> OnResume:
    """Mark a key with whose change a run can't resume."""
    return OnResume(Rule.NEVER, effect)


IN_FLIGHT = "prompt groups that are in flight were made with the old value"
PROMPTS = "prompts that are issued from here on are others"
ROUNDING = "results agree within rounding"
SPEED = "speed and resources alone"
