"""Compact columns of all samples of a run, filtered and sorted for the sample pages.

A sample takes some 60 bytes. Its texts and arrays stay on the log and are read by offset when a
page shows them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.api.errors import ConfigError, CorruptRecord
from relax_events.api.events import FinishReason, Outcome, PromptGroupEnded
from relax_events.staleness import IssuedGroup

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
OUTCOMES = ("open", "superseded", *(outcome.value for outcome in Outcome))
FINISH_REASONS = tuple(reason.value for reason in FinishReason)
OPEN, SUPERSEDED = 0, 1
SORTS = ("time", "reward", "tokens", "staleness", "version", "step")
FIRST_CAPACITY = 4096
GROWTH = 1.5
STEP_BITS, INDEX_BITS, ATTEMPT_BITS = 25, 24, 14
SamplePosition = tuple[int, int, int]
"""Partition and offset of a sample's record, and its index in its prompt group."""
COLUMNS: dict[str, str] = {
    "group": "i8",
    "index": "i2",
    "version": "i4",
    "min_version": "i4",
    "reward": "f4",
    "tokens": "i4",
    "finish": "i1",
    "worker": "i2",
    "source": "i2",
    "at": "i8",
    "partition": "i2",
    "offset": "i8",
    "outcome": "i1",
    "step": "i4",
}
ENDED_COLUMNS = {"group": "i8", "outcome": "i1", "version": "i4", "step": "i4"}


class Columns:
    """Growing numpy columns of equal length; appending costs amortized constant time."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = kinds
        self._arrays: dict[str, NDArray[Any]] = {
            name: np.empty(FIRST_CAPACITY, kind) for name, kind in kinds.items()
        }
        self.length = 0

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column's values, as a view."""
        return self._arrays[name][: self.length]

    def append(self, *values: float) -> int:
        """Append a row, its values in the order of the columns; return its number."""
        row = self.length
        if row == len(next(iter(self._arrays.values()))):
            self._grow()
        for array, value in zip(self._arrays.values(), values, strict=True):
            array[row] = value
        self.length += 1
        return row

    def _grow(self) -> None:
        """Grow one column after the other, so that only one is held twice at a time."""
        for name, array in self._arrays.items():
            larger = np.empty(int(len(array) * GROWTH), array.dtype)
            larger[: len(array)] = array
            self._arrays[name] = larger

    @property
    def num_bytes(self) -> int:
        """Memory of all columns."""
        return sum(array.nbytes for array in self._arrays.values())


MAX_GROUP_ROWS = 64
"""Samples of a prompt group that are shown side by side."""


@dataclass(frozen=True, slots=True)
class SampleQuery:
    """Selects, sorts and pages samples; bounds are closed, None stands for all."""

    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By `reward`, `tokens`, `staleness`, `version` or `step`."""
    outcome: str = ""
    finish: str = ""
    source: str = ""
    worker: str = ""
    group: str = ""
    sort: str = "time"
    descending: bool = True
    first: int = 0
    count: int = 50

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise ConfigError(f"sort must be one of {', '.join(SORTS)}, got {self.sort!r}")
        for name, allowed in (("outcome", OUTCOMES), ("finish", FINISH_REASONS)):
            value = getattr(self, name)
            if value and value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class NewSample:
    """What the table keeps of a sample's record; `key` joins it with its score."""

    key: int
    group: int
    index: int
    version: int
    min_version: int
    tokens: int
    finish: str
    worker: str
    source: str
    at: int
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Page:
    """The rows of one page, and how many rows matched."""

    rows: Rows
    num_matching: int


class Names:
    """Numbers names in the order of their appearance; those beyond the limit share the last."""

    def __init__(self, limit: int = 30_000) -> None:
        self._numbers: dict[str, int] = {}
        self.names: list[str] = []
        self._limit = limit

    def number(self, name: str) -> int:
        """Return a name's number."""
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) >= self._limit:
                return self._limit - 1
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def find(self, name: str) -> int:
        """Return a known name's number, -1 for an unknown one."""
        return self._numbers.get(name, -1)


def encode_group(prompt_group_id: str) -> int:
    """Return the number that stands for a prompt group's id; -1 for an id of another form."""
    try:
        group = IssuedGroup.parse(prompt_group_id)
    except CorruptRecord:
        return -1
    slot = group.slot
    if slot.group_index >> INDEX_BITS or slot.train_step >> STEP_BITS:
        return -1
    return (
        slot.train_step << (INDEX_BITS + ATTEMPT_BITS)
        | slot.group_index << ATTEMPT_BITS
        | min(group.attempt, (1 << ATTEMPT_BITS) - 1)
    )


def decode_group(code: int) -> str:
    """Return the id of a prompt group's number."""
    if code < 0:
        return ""
    attempt = code & ((1 << ATTEMPT_BITS) - 1)
    index = code >> ATTEMPT_BITS & ((1 << INDEX_BITS) - 1)
    return f"{code >> INDEX_BITS + ATTEMPT_BITS:06d}-{index:04d}-{attempt}"


class SampleTable:
    """All samples of a run with their rewards and outcomes.

    One thread adds; any thread selects. Prompt groups end in any order with their samples: `settle`
    joins the two.
    """

    def __init__(self) -> None:
        self.columns = Columns(COLUMNS)
        self._ended = Columns(ENDED_COLUMNS)
        self.workers, self.sources = Names(), Names()
        self.newest_version = -1
        self._lock = threading.Lock()
        self._num_settled = (0, 0)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.columns.length

    def add(self, sample: NewSample) -> int:
        """Add a sample without a reward; return its row."""
        with self._lock:
            return self.columns.append(
                sample.group,
                sample.index,
                sample.version,
                sample.min_version,
                np.nan,
                sample.tokens,
                FINISH_REASONS.index(sample.finish),
                self.workers.number(sample.worker),
                self.sources.number(sample.source),
                sample.at,
                sample.partition,
                sample.offset,
                OPEN,
                -1,
            )

    def set_reward(self, row: int, reward: float | None) -> None:
        """Set a sample's reward; None where scoring failed."""
        self.columns["reward"][row] = np.nan if reward is None else reward

    def end(self, event: PromptGroupEnded) -> None:
        """Record how a prompt group ended; the first outcome counts."""
        with self._lock:
            self._ended.append(
                encode_group(event.prompt_group_id),
                OUTCOMES.index(event.outcome.value),
                event.policy_version,
                event.trainer_version,
            )

    def settle(self) -> None:
        """Give the open samples the outcomes of their prompt groups."""
        with self._lock:
            if self._num_settled == (self.columns.length, self._ended.length):
                return
            self._num_settled = self.columns.length, self._ended.length
            rows = np.flatnonzero(self.columns["outcome"] == OPEN)
            if not len(rows) or not self._ended.length:
                return
            order = np.argsort(self._ended["group"], kind="stable")
            ended_groups = self._ended["group"][order]
            groups = self.columns["group"][rows]
            at = np.minimum(np.searchsorted(ended_groups, groups), len(ended_groups) - 1)
            matches = (ended_groups[at] == groups) & (groups >= 0)
            rows, ended = rows[matches], order[at[matches]]
            outcome = self._ended["outcome"][ended]
            trained = outcome == OUTCOMES.index(Outcome.TRAINED.value)
            other = self._ended["version"][ended] != self.columns["version"][rows]
            self.columns["outcome"][rows] = np.where(trained & other, SUPERSEDED, outcome)
            self.columns["step"][rows] = np.where(trained & ~other, self._ended["step"][ended], -1)

    def staleness(self) -> NDArray[np.int32]:
        """Return each sample's staleness when it was trained, or against the newest version."""
        step = self.columns["step"]
        newest = np.where(step >= 0, step, self.newest_version)
        behind: NDArray[np.int32] = newest - self.columns["min_version"]
        return behind

    def select(self, query: SampleQuery) -> Page:
        """Return the rows of a page; samples without a reward come last when sorted by reward."""
        self.settle()
        with self._lock:
            matching = self._matching(query)
            values = self._sort_values(query.sort)
        rows = np.flatnonzero(matching)
        keys = values[rows]
        if query.descending:
            keys = -keys
        stop = query.first + query.count
        if 0 < stop < len(rows) // 4:
            bound = np.partition(keys, stop - 1)[stop - 1]
            chosen = np.flatnonzero(keys <= bound) if not np.isnan(bound) else np.arange(len(rows))
            rows, keys = rows[chosen], keys[chosen]
        order = np.argsort(keys, kind="stable")[query.first : stop]
        return Page(rows[order], int(np.count_nonzero(matching)))

    def _matching(self, query: SampleQuery) -> Mask:
        columns = self.columns
        matching = np.ones(columns.length, bool)
        for name, (low, high) in query.bounds.items():
            values = self.staleness() if name == "staleness" else columns[name]
            matching &= (values >= low) & (values <= high)
        if query.outcome:
            matching &= columns["outcome"] == OUTCOMES.index(query.outcome)
        if query.finish:
            matching &= columns["finish"] == FINISH_REASONS.index(query.finish)
        if query.source:
            matching &= columns["source"] == self.sources.find(query.source)
        if query.worker:
            matching &= columns["worker"] == self.workers.find(query.worker)
        if query.group:
            code = encode_group(query.group)
            matching &= (columns["group"] == code) & (code >= 0)
        return matching

    def _sort_values(self, sort: str) -> NDArray[Any]:
        if sort == "staleness":
            return self.staleness()
        return self.columns[{"time": "at"}.get(sort, sort)].copy()

    def describe(self, rows: Sequence[int] | Rows) -> list[dict[str, Any]]:
        """Return rows as plain values."""
        columns, described = self.columns, []
        for row in map(int, rows):
            group = decode_group(int(columns["group"][row]))
            step, reward = int(columns["step"][row]), float(columns["reward"][row])
            newest = step if step >= 0 else self.newest_version
            described.append(
                {
                    "row": row,
                    "prompt_group_id": group,
                    "sample_id": f"{group}/{int(columns['index'][row])}",
                    "policy_version": int(columns["version"][row]),
                    "staleness": newest - int(columns["min_version"][row]),
                    "reward": None if np.isnan(reward) else round(reward, 6),
                    "tokens": int(columns["tokens"][row]),
                    "finish": FINISH_REASONS[int(columns["finish"][row])],
                    "worker": self.workers.names[int(columns["worker"][row])],
                    "source": self.sources.names[int(columns["source"][row])],
                    "at": int(columns["at"][row]) // 1000,
                    "outcome": OUTCOMES[int(columns["outcome"][row])],
                    "train_step": step if step >= 0 else None,
                }
            )
        return described

    def group_rows(self, row: int) -> list[int]:
        """Return the rows of a sample's prompt group at its policy version, at most 64, by sample
        index.
        """
        with self._lock:  # else a sample that is added meanwhile makes one column longer
            columns = self.columns
            code = columns["group"][row]
            if code < 0:
                return [row]
            same = (columns["group"] == code) & (columns["version"] == columns["version"][row])
            rows: list[int] = np.flatnonzero(same)[:MAX_GROUP_ROWS].tolist()
            return sorted(rows, key=lambda other: int(columns["index"][other]))

    def position(self, row: int) -> SamplePosition:
        """Return where a sample lies on the log.

        Raises:
            ConfigError: There is no such row.
        """
        if not 0 <= row < self.columns.length:
            raise ConfigError(f"there is no sample in row {row}; the table has {len(self)} rows")
        columns = self.columns
        return (
            int(columns["partition"][row]),
            int(columns["offset"][row]),
            int(columns["index"][row]),
        )

    def find(self, sample_id: str) -> int:
        """Return the row of a sample: the trained generation, or else the newest.

        Raises:
            ConfigError: It is not known.
        """
        group, _, index = sample_id.rpartition("/")
        code = encode_group(group)
        self.settle()
        columns = self.columns
        rows = np.flatnonzero(columns["group"] == code) if code >= 0 else np.zeros(0, np.int64)
        rows = rows[columns["index"][rows] == int(index)] if index.isdecimal() else rows[:0]
        if not len(rows):
            raise ConfigError(f"sample {sample_id!r} is not known; ids look like 000012-0003-0/5")
        best = np.lexsort((columns["at"][rows], columns["step"][rows]))
        return int(rows[best[-1]])
