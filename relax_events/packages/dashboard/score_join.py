"""Joins the samples of a log with their scores, in whichever order they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from relax_events.api.events import SampleRolledOut, SampleScored, get_trajectory_key
from relax_events.packages.dashboard.run_fold import RunFold
from relax_events.packages.dashboard.sample_columns import NewSample, SampleTable, encode_group

MAX_JOINING = 50_000


class ScoreJoin:
    """Joins samples with scores that come before or after them; memory is bounded."""

    def __init__(self, table: SampleTable, fold: RunFold) -> None:
        self._table, self._fold = table, fold
        self._rows: dict[int, int] = {}
        self._scores: dict[int, float | None] = {}

    def add_sample(self, sample: NewSample) -> int | None:
        """Add a sample and return its row; None for a copy of one that was added a short time
        before.
        """
        if sample.key in self._rows:
            return None
        row = self._table.add(sample)
        _keep(self._rows, sample.key, row)
        if sample.key in self._scores:
            self._table.set_reward(row, self._scores.pop(sample.key))
        return row

    def add_score(self, score: NewScore) -> None:
        """Add a score; of several the first counts."""
        row = self._rows.get(score.key)
        if row is None:
            if score.key not in self._scores:
                self._fold.add_score(score.version, score.values)
                _keep(self._scores, score.key, score.reward)
        elif np.isnan(self._table.columns["reward"][row]):
            self._fold.add_score(score.version, score.values)
            self._table.set_reward(row, score.reward)


@dataclass(frozen=True, slots=True)
class NewScore:
    """What is kept of a score: `values` are the reward and its components, if any."""

    key: int
    version: int
    reward: float | None
    values: dict[str, float]

    @classmethod
    def of(cls, score: SampleScored) -> NewScore:
        """Return what is kept of a score's record."""
        values = {} if score.reward is None else {"reward": score.reward, **score.components}
        return cls(hash(get_trajectory_key(score)), score.policy_version, score.reward, values)


def new_sample(sample: SampleRolledOut, *, partition: int, offset: int) -> NewSample:
    """Return what is kept of a sample's record."""
    key = sample.key
    return NewSample(
        hash(get_trajectory_key(sample)),
        encode_group(key.prompt_group_id),
        key.sample_index,
        key.policy_version,
        key.min_policy_version,
        len(sample.tokens) - sample.num_prompt_tokens,
        sample.finish_reason.value,
        sample.worker_id,
        read_source(sample.metadata),
        sample.rolled_out_at,
        partition,
        offset,
    )


def _keep(kept: dict[int, Any], key: int, value: Any) -> None:
    kept.setdefault(key, value)
    if len(kept) > MAX_JOINING:
        del kept[next(iter(kept))]


def read_source(metadata: str) -> str:
    """Return what a sample's metadata names as its source or task; empty for neither."""
    if len(metadata) <= 2:
        return ""
    try:
        fields = orjson.loads(metadata)
    except orjson.JSONDecodeError:
        return ""
    if not isinstance(fields, dict):
        return ""
    for name in ("source", "data_source", "dataset", "task"):
        if isinstance(fields.get(name), str):
            return str(fields[name])[:64]
    return ""
