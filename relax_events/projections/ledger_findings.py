"""The promises of a run, and what the ledger found against them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

NUM_EXAMPLES = 5

FORK = (
    "the policy has learnt from it: fork the run at the version before (relax runs fork) and "
    "report it with the log"
)
WRITER = "see who else may write to the topic (relax security), and report it with the log"
LOOK = "relax lineage prompt GROUP shows its records"


class Rule(StrEnum):
    """What holds in every run; each value says what was found where it does not."""

    TRAINED_TWICE = "sample trained twice"
    SEAT_TWICE = "seat of a train step trained twice"
    NOT_WHOLE = "prompt group not trained whole"
    LOST = "sample of a trained prompt group was not trained"
    NEVER_GENERATED = "sample trained that was never generated"
    OTHER_TOKENS = "sample trained with other tokens or versions than were generated"
    OTHER_RECORD = "trained offset holds another record than the train step says"
    NOT_SCORED = "sample trained with a reward that no score gives"
    NEVER_ISSUED = "prompt group trained that was never issued"
    GUEST = "prompt group of a guest was trained"
    TOO_STALE = "staleness above max_staleness"
    AHEAD = "sample trained by an older version than generated it"
    MISCOUNTED = "train step counts staleness otherwise than its samples' versions"
    BAD_STEP = "train step contradicts itself"
    SKIPPED_MOVED = "train step that skipped its update committed other weights"
    NOT_AS_SOURCE = "replayed train step trained other samples than its source"
    NO_END = "prompt group trained without an end on control.group-outcomes"
    END_WITHOUT_STEP = "prompt group ended as trained that no step trained"
    OTHER_END = "end of a prompt group contradicts its train step"
    TWO_WAYS = "prompt group ended in two ways"
    ENDED_TWICE = "prompt group ended twice"
    NO_REASON = "prompt group ended untrained without a reason"
    LEFT_OPEN = "prompt group of a trained step never ended"
    PASSED_OVER = "committed offsets passed a prompt group that never ended"
    WENT_BACK = "consumed offset went back"
    BELOW = "sample trained below the consumed offset"
    STEPS = "train steps not in order"
    VERSIONS = "policy versions not in order"
    UNPAIRED = "policy version published without its train step"
    MANIFEST = "weight manifest is not the one that was published"


REMEDIES = {
    Rule.TRAINED_TWICE: FORK,
    Rule.SEAT_TWICE: FORK,
    Rule.NOT_WHOLE: FORK,
    Rule.LOST: f"{LOOK}; {FORK}",
    Rule.NEVER_GENERATED: FORK,
    Rule.OTHER_TOKENS: FORK,
    Rule.OTHER_RECORD: f"is this the run's own cluster, or was a topic restored incompletely? Otherwise {FORK}",
    Rule.NOT_SCORED: FORK,
    Rule.NEVER_ISSUED: f"{WRITER}; {FORK}",
    Rule.GUEST: FORK,
    Rule.TOO_STALE: FORK,
    Rule.AHEAD: FORK,
    Rule.MISCOUNTED: "take the ledger's counts, not the step's, and report it with the log",
    Rule.BAD_STEP: WRITER,
    Rule.SKIPPED_MOVED: f"{WRITER}; {FORK}",
    Rule.NOT_AS_SOURCE: "start the replay again under another run.id",
    Rule.NO_END: f"{WRITER}; {LOOK}",
    Rule.END_WITHOUT_STEP: f"{WRITER}; {LOOK}",
    Rule.OTHER_END: f"{WRITER}; {LOOK}",
    Rule.TWO_WAYS: f"{WRITER}; {LOOK}",
    Rule.ENDED_TWICE: f"{WRITER}; {LOOK}",
    Rule.NO_REASON: f"{WRITER}; {LOOK}",
    Rule.LEFT_OPEN: f"was run.groups_per_step changed between two starts of the run? {LOOK}",
    Rule.PASSED_OVER: f"the trainer will not read it again; {LOOK}",
    Rule.WENT_BACK: WRITER,
    Rule.BELOW: FORK,
    Rule.STEPS: WRITER,
    Rule.VERSIONS: WRITER,
    Rule.UNPAIRED: WRITER,
    Rule.MANIFEST: "restore the object from a backup, or fork the run at another version (relax runs fork)",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: how often, and the first places."""

    rule: Rule
    count: int
    examples: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.rule]

    def __str__(self) -> str:
        return f"{self.rule}: {self.count}, for example {self.examples[0]}; {self.remedy}"


@dataclass(slots=True)
class Findings:
    """Counts broken promises; memory does not grow with their number."""

    counts: dict[Rule, int] = field(default_factory=dict)
    examples: dict[Rule, list[str]] = field(default_factory=dict)

    def add(self, rule: Rule, example: str) -> None:
        """Note a broken promise and where it was seen."""
        self.counts[rule] = self.counts.get(rule, 0) + 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(example)

    def add_all(self, other: Findings) -> None:
        """Take over what was found elsewhere."""
        for rule, count in other.counts.items():
            self.counts[rule] = self.counts.get(rule, 0) + count
            self.examples[rule] = [*self.examples.get(rule, ()), *other.examples[rule]][
                :NUM_EXAMPLES
            ]

    def listed(self) -> list[Finding]:
        """Return them in the order of the rules."""
        return [
            Finding(rule, self.counts[rule], tuple(self.examples[rule]))
            for rule in Rule
            if rule in self.counts
        ]
