"""The table of running samples: arrays with a row for each, so that a decoding step touches no
Python object per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from relax_events.engines.requests import SampleState
from relax_events.engines.transformers.sampling import RowSampling
from relax_events.events.parts import VersionSegment, merge_segments
from relax_events.events.routed_experts import ExpertShape

NO_TOKEN = -1


class RowTable:
    """Running samples in dense rows 0 to `num_rows`."""

    def __init__(
        self, *, max_rows: int, max_tokens: int, experts: ExpertShape | None = None
    ) -> None:
        self.samples: list[SampleState] = []
        self.next_tokens = np.zeros(max_rows, np.int64)
        """The newest token of each row, which the next step reads."""
        self.positions = np.zeros(max_rows, np.int64)
        """Index of that token: the number of tokens in the row's cache."""
        self.position_shifts = np.zeros(max_rows, np.int64)
        """Rotary position of that token minus its index."""
        self._seeds = np.zeros(max_rows, np.uint64)
        self._counts = np.zeros(max_rows, np.int64)
        self._limits = np.zeros(max_rows, np.int64)
        self._temperatures = np.ones(max_rows, np.float32)
        self._top_ps = np.ones(max_rows, np.float32)
        self._top_ks = np.zeros(max_rows, np.int64)
        self._stops = np.full((max_rows, 1), NO_TOKEN, np.int64)
        self._tokens = np.zeros((max_rows, max_tokens), np.int32)
        self._logprobs = np.zeros((max_rows, max_tokens), np.float32)
        self._top_tokens = np.zeros((max_rows, max_tokens, 0), np.int32)
        none = np.zeros((0, 0, 0), np.uint8) if experts is None else experts.nothing()
        self._experts = np.zeros((max_rows, max_tokens, *none.shape[1:]), none.dtype)
        """Experts of the token that was computed when the token at this index was sampled."""

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self.samples)

    @property
    def num_top_tokens(self) -> int:
        """Number of most probable tokens that a row records: the largest requested by a sample."""
        return self._top_tokens.shape[2]

    def sampling_inputs(
        self, rows: slice
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], RowSampling]:
        """Return seeds, indices in the completion and sampling parameters of rows."""
        return (
            self._seeds[rows],
            self._counts[rows],
            RowSampling(self._temperatures[rows], self._top_ps[rows], self._top_ks[rows]),
        )

    def add(self, sample: SampleState, *, policy_version: int) -> None:
        """Put a sample into the next free row; its first token has yet to be recorded."""
        row, count = self.num_rows, len(sample.tokens)
        self._widen_stops(len(sample.stop_token_ids))
        if num_top := sample.top_tokens.shape[1]:
            self._widen_top_tokens(num_top)
            self._top_tokens[row, :count, :num_top] = sample.top_tokens
        self._stops[row] = NO_TOKEN
        self._stops[row, : len(sample.stop_token_ids)] = sample.stop_token_ids
        self.positions[row] = len(sample.prompt_tokens) + count - 1
        self.position_shifts[row] = sample.position_shift
        self._seeds[row], self._counts[row], self._limits[row] = (
            sample.seed,
            count,
            sample.max_new_tokens,
        )
        self._temperatures[row], self._top_ps[row], self._top_ks[row] = (
            sample.sampling.temperature,
            sample.sampling.top_p,
            sample.sampling.top_k,
        )
        self._tokens[row, :count], self._logprobs[row, :count] = sample.tokens, sample.logprobs
        sample.version_marks = [(count, policy_version, False)]
        self.samples.append(sample)

    def record(
        self,
        rows: slice,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        *,
        top_tokens: NDArray[np.int32] | None = None,
        experts: NDArray[np.generic] | None = None,
    ) -> NDArray[np.int64]:
        """Append a token to each of the rows; return the rows that finished, ascending.

        Args:
            rows: The decoded rows.
            tokens: The sampled token of each row.
            logprobs: Log-probability of each sampled token, in nats.
            top_tokens: The `num_top_tokens` most probable tokens of each row.
            experts: The experts of each row's input token.
        """
        index, counts = np.arange(rows.start, rows.stop), self._counts[rows]
        self._tokens[index, counts], self._logprobs[index, counts] = tokens, logprobs
        if top_tokens is not None:
            self._top_tokens[index, counts] = top_tokens
        if experts is not None:
            self._experts[index, counts] = experts
        self._counts[rows] += 1
        self.positions[rows] += 1
        self.next_tokens[rows] = tokens
        stopped = (self._stops[rows] == tokens[:, None]).any(axis=1)
        finished: NDArray[np.int64] = index[
            stopped | (self._counts[rows] >= self._limits[rows]) | ~np.isfinite(logprobs)
        ]
        return finished

    def mark_version(self, policy_version: int) -> None:
        """Record that later tokens are sampled by another version, with an older one's cache."""
        for sample, count in zip(self.samples, self._counts[: self.num_rows], strict=True):
            sample.version_marks.append((int(count), policy_version, True))

    def remove(self, rows: Sequence[int]) -> tuple[list[SampleState], list[int], list[int]]:
        """Remove samples from rows and close the gaps.

        Returns:
            The samples with all their tokens, and the moves to repeat in the cache: sources and
            targets.
        """
        removed_samples = [self._take(row) for row in rows]
        num_kept = self.num_rows - len(rows)
        removed = set(rows)
        targets = sorted(row for row in removed if row < num_kept)
        sources = [row for row in range(num_kept, self.num_rows) if row not in removed]
        for array in self._arrays():
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.samples[target] = self.samples[source]
        del self.samples[num_kept:]
        return removed_samples, sources, targets

    def _take(self, row: int) -> SampleState:
        """Return the sample of a row that ends, with all its tokens."""
        sample, count = self.samples[row], int(self._counts[row])
        if self._experts.shape[2]:
            sample.experts = np.concatenate(
                [sample.experts, self._experts[row, sample.version_marks[0][0] : count]]
            )
        if num_top := sample.top_tokens.shape[1]:
            sample.top_tokens = self._top_tokens[row, :count, :num_top].copy()
        sample.tokens = self._tokens[row, :count].copy()
        sample.logprobs = self._logprobs[row, :count].copy()
        sample.segments = merge_segments(
            sample.segments, _segments_between(sample.version_marks, count)
        )
        return sample

    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        inputs = (self.next_tokens, self.positions, self.position_shifts)
        scalars = (
            self._seeds,
            self._counts,
            self._limits,
            self._temperatures,
            self._top_ps,
            self._top_ks,
        )
        return (
            *inputs,
            *scalars,
            self._stops,
            self._tokens,
            self._logprobs,
            self._top_tokens,
            self._experts,
        )

    def _widen_stops(self, num_stops: int) -> None:
        if (missing := num_stops - self._stops.shape[1]) > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=NO_TOKEN)

    def _widen_top_tokens(self, num_tokens: int) -> None:
        if num_tokens > self.num_top_tokens:
            wider = np.zeros((*self._top_tokens.shape[:2], num_tokens), np.int32)
            wider[..., : self.num_top_tokens] = self._top_tokens
            self._top_tokens = wider


def _segments_between(marks: list[tuple[int, int, bool]], count: int) -> Iterator[VersionSegment]:
    """Yield the segments generated between marks."""
    ends = [start for start, _, _ in marks[1:]] + [count]
    return (
        VersionSegment(version, end - start, kept_cache)
        for (start, version, kept_cache), end in zip(marks, ends, strict=True)
    )
