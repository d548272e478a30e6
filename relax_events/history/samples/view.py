"""A sample with its score and outcome."""

from __future__ import annotations

from dataclasses import dataclass

from relax_events.events.parts import Array, Outcome, StoredArray
from relax_events.events.types import PromptGroupEnded, SampleRolledOut, SampleScored

OPEN, SUPERSEDED = "open", "superseded"


@dataclass(frozen=True, slots=True)
class SampleView:
    """A generated sample, its record's position, its score and its prompt group's outcome as far as
    the log has them.
    """

    sample: SampleRolledOut
    position: str
    written_at: int
    score: SampleScored | None
    outcome_event: PromptGroupEnded | None

    @property
    def reward(self) -> float | None:
        """Its reward; None when it was not scored or scoring failed."""
        return self.score.reward if self.score else None

    @property
    def outcome(self) -> str:
        """Its prompt group's outcome, `open` before that, or `superseded` when another generation
        of the prompt group was trained.
        """
        if self.outcome_event is None:
            return OPEN
        if (
            self.outcome_event.outcome is Outcome.TRAINED
            and self.outcome_event.policy_version != self.sample.policy_version
        ):
            return SUPERSEDED
        return self.outcome_event.outcome.value

    @property
    def train_step(self) -> int | None:
        """The train step that trained it."""
        return (
            self.outcome_event.trainer_version
            if self.outcome_event is not None and self.outcome == Outcome.TRAINED
            else None
        )

    def staleness(self, newest_version: int) -> int:
        """Return how many versions it was behind when it was trained, or is behind the newest."""
        step = self.train_step
        return (newest_version if step is None else step) - self.sample.key.min_policy_version

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that were generated."""
        return len(self.sample.tokens) - self.sample.num_prompt_tokens

    def line(self, newest_version: int) -> SampleLine:
        """Return its row in a list."""
        sample = self.sample
        return SampleLine(
            sample_id=sample.sample_id,
            policy_version=sample.policy_version,
            staleness=self.staleness(newest_version),
            outcome=self.outcome,
            train_step=self.train_step,
            reward=self.reward,
            num_completion_tokens=self.num_completion_tokens,
            finish_reason=sample.finish_reason.value,
            worker_id=sample.worker_id,
            completion=sample.completion,
            rolled_out_at=sample.rolled_out_at,
            position=self.position,
        )


@dataclass(frozen=True, slots=True)
class SampleLine:
    """A sample without its arrays and messages, for lists of many; times in microseconds since the
    epoch.
    """

    sample_id: str
    policy_version: int
    staleness: int
    outcome: str
    train_step: int | None
    reward: float | None
    num_completion_tokens: int
    finish_reason: str
    worker_id: str
    completion: str
    rolled_out_at: int
    position: str


def list_values(array: Array | None) -> list[float] | None:
    """Return an array's values; None for one that lies in the object store."""
    if array is None or isinstance(array, StoredArray):
        return None
    return [float(value) for value in array.tolist()]
