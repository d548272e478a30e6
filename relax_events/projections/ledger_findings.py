"""The promises of a run, and the ledger's findings against them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

MAX_EXAMPLES = 5

FORK = (
    "the policy has learned from it: fork the run at the version before (relax runs fork) and "
    "report it with the log"
)
WRITER = "check who else may write to the topic (relax security), and report it with the log"
PURGED = "since their records are purged"
LINEAGE = "relax lineage GROUP shows its records"


class Rule(StrEnum):
    """Rules that hold in every run; each value describes its violation."""

    TRAINED_TWICE = "sample trained twice"
    SLOT_TRAINED_TWICE = "batch slot of a train step trained twice"
    INCOMPLETE_GROUP = "prompt group not trained completely"
    SAMPLE_NOT_TRAINED = "sample of a trained prompt group was not trained"
    NEVER_GENERATED = "sample trained that was never generated"
    OTHER_TOKENS = "sample trained with other tokens or versions than were generated"
    OTHER_TRAJECTORY = (
        "sample trained with another loss mask, log-probabilities, segments, paths, temperature or "
        "media than were generated"
    )
    OTHER_GENERATION = "samples of a trained prompt group are not those of its generation digest"
    OTHER_RECORD = "trained offset holds another record than the train step says"
    NOT_SCORED = "sample trained with a reward that no score gives"
    OTHER_EVALUATION = "sample trained with numbers of another model that no record of it gives"
    OTHER_ADVANTAGES = "sample trained with advantages that its rewards don't give"
    NEVER_ISSUED = "prompt group trained that was never issued"
    ISSUED_TWICE = "prompt group issued twice"
    EXTERNAL_TRAINED = "external prompt group trained"
    TOO_STALE = "staleness above max_staleness"
    TRAINED_BY_OLDER_VERSION = "sample trained by an older version than generated it"
    WRONG_STALENESS_COUNTS = "train step reports wrong staleness counts"
    BAD_STEP = "train step contradicts itself"
    SKIPPED_MOVED = "train step that skipped its update committed other weights"
    NOT_AS_SOURCE = "replayed train step trained other samples than its source"
    NO_OUTCOME = "prompt group trained without an outcome on control.prompt-group-outcomes"
    OUTCOME_WITHOUT_STEP = "prompt group with outcome trained that no step trained"
    OUTCOME_MISMATCH = "outcome of a prompt group contradicts its train step"
    CONFLICTING_OUTCOMES = "prompt group with two different outcomes"
    DUPLICATE_OUTCOME = "prompt group ended twice"
    NO_REASON = "prompt group ended untrained without a reason"
    STEP_WITHOUT_OUTCOME = "prompt group of a trained step without an outcome"
    OFFSETS_WITHOUT_OUTCOME = "committed offsets passed a prompt group without an outcome"
    OFFSET_WENT_BACK = "consumed offset went back"
    TRAINED_BELOW_OFFSET = "sample trained below the consumed offset"
    STEP_ORDER = "train steps not in order"
    VERSION_ORDER = "policy versions not in order"
    UNPAIRED = "policy version published without its train step"
    TWO_HISTORIES = "two histories on one log"
    UNREADABLE_CONTROL = "control record that can't be read"
    MANIFEST = "weight manifest is not the one that was published"


REMEDIES = {
    Rule.TRAINED_TWICE: FORK,
    Rule.SLOT_TRAINED_TWICE: FORK,
    Rule.INCOMPLETE_GROUP: FORK,
    Rule.SAMPLE_NOT_TRAINED: f"{LINEAGE}; {FORK}",
    Rule.NEVER_GENERATED: FORK,
    Rule.OTHER_TOKENS: FORK,
    Rule.OTHER_TRAJECTORY: FORK,
    Rule.OTHER_GENERATION: f"{WRITER}; {FORK}",
    Rule.OTHER_RECORD: (
        "is this the run's own cluster, or was a topic restored incompletely? Otherwise " + FORK
    ),
    Rule.NOT_SCORED: FORK,
    Rule.OTHER_EVALUATION: FORK,
    Rule.OTHER_ADVANTAGES: FORK,
    Rule.NEVER_ISSUED: f"{WRITER}; {FORK}",
    Rule.ISSUED_TWICE: (
        "it is generated twice and trained once; many of them: do prompters of an older release "
        "run (relax run on two machines)?"
    ),
    Rule.EXTERNAL_TRAINED: FORK,
    Rule.TOO_STALE: FORK,
    Rule.TRAINED_BY_OLDER_VERSION: FORK,
    Rule.WRONG_STALENESS_COUNTS: (
        "use the ledger's counts, not the step's, and report it with the log"
    ),
    Rule.BAD_STEP: WRITER,
    Rule.SKIPPED_MOVED: f"{WRITER}; {FORK}",
    Rule.NOT_AS_SOURCE: "start the replay again under another run.id",
    Rule.NO_OUTCOME: f"{WRITER}; {LINEAGE}",
    Rule.OUTCOME_WITHOUT_STEP: f"{WRITER}; {LINEAGE}",
    Rule.OUTCOME_MISMATCH: f"{WRITER}; {LINEAGE}",
    Rule.CONFLICTING_OUTCOMES: f"{WRITER}; {LINEAGE}",
    Rule.DUPLICATE_OUTCOME: f"{WRITER}; {LINEAGE}",
    Rule.NO_REASON: f"{WRITER}; {LINEAGE}",
    Rule.STEP_WITHOUT_OUTCOME: (
        f"the step trained later batch slots, and left this one open; {LINEAGE}"
    ),
    Rule.OFFSETS_WITHOUT_OUTCOME: f"the trainer will not read it again; {LINEAGE}",
    Rule.OFFSET_WENT_BACK: WRITER,
    Rule.TRAINED_BELOW_OFFSET: FORK,
    Rule.STEP_ORDER: WRITER,
    Rule.VERSION_ORDER: WRITER,
    Rule.UNPAIRED: WRITER,
    Rule.TWO_HISTORIES: (
        "the run began again although it had a history: resume it from an import of the log as it "
        "was (relax topics import), or train again under another run.id"
    ),
    Rule.UNREADABLE_CONTROL: (
        "does broker.schema_registry name the registry of this run? Its ids are those of "
        f"control.schemas. Otherwise {WRITER}"
    ),
    Rule.MANIFEST: (
        "restore the object from a backup, or fork the run at another version (relax runs fork)"
    ),
}


WARNINGS = frozenset({Rule.ISSUED_TWICE})
"""What a crash may cause although all promises hold: a prompter that is stopped before a write, and
replaced meanwhile, writes that part again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: how often, with the first examples."""

    rule: Rule
    count: int
    examples: tuple[str, ...]

    @property
    def remedy(self) -> str:
        """The remedy."""
        return REMEDIES[self.rule]

    def __str__(self) -> str:
        return f"{self.rule}: {self.count}, for example {self.examples[0]}; {self.remedy}"


class Comparison(NamedTuple):
    """Where the two records of a sample are that differ."""

    sample_id: str
    partition: int
    ready_offset: int
    generated_offset: int


@dataclass(slots=True)
class Findings:
    """Counts broken promises; memory does not grow with their number."""

    counts: dict[Rule, int] = field(default_factory=dict)
    examples: dict[Rule, list[str]] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    """Of the examples that are records to compare."""

    def add(self, rule: Rule, example: str, *, comparison: Comparison | None = None) -> None:
        """Count a broken promise, with an example."""
        self.counts[rule] = self.counts.get(rule, 0) + 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(example)
            self.comparisons |= {} if comparison is None else {example: comparison}

    def add_all(self, other: Findings) -> None:
        """Add the findings of another."""
        for rule, count in other.counts.items():
            self.counts[rule] = self.counts.get(rule, 0) + count
            self.examples[rule] = [*self.examples.get(rule, ()), *other.examples[rule]][
                :MAX_EXAMPLES
            ]
            named = other.comparisons.keys() & self.examples[rule]
            self.comparisons |= {example: other.comparisons[example] for example in named}

    def as_list(self, rules: Set[Rule]) -> list[Finding]:
        """Return the findings by these rules, in the order of all rules."""
        return [
            Finding(rule, self.counts[rule], tuple(self.examples[rule]))
            for rule in Rule
            if rule in self.counts.keys() & rules
        ]


@dataclass(slots=True)
class LedgerTotals:
    """Counts, staleness and findings, as sums: of finalized facts, or of open ones on demand."""

    counts: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    unverified: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)

    def add(self, other: LedgerTotals) -> None:
        """Add the totals of another."""
        self.counts.update(other.counts)
        self.staleness.update(other.staleness)
        self.unverified.update(other.unverified)
        self.findings.add_all(other.findings)
