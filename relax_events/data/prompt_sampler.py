"""Select the next rows of the prompt stream, excluding rows that were issued or skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from relax_events.data.prompt_filter import FilterResult, PromptFilter, RewardHistory
from relax_events.data.stream import PromptStream
from relax_events.errors import ConfigError

MAX_SKIPPED = 100_000


@dataclass(frozen=True, slots=True)
class SelectedRow:
    """A row to issue, and the rows skipped for good since the previous selection, with the
    reasons.
    """

    row: int
    skipped: Mapping[int, str] = field(default_factory=dict)


class PromptSampler:
    """Selects each row of the stream once, block by block; within a block by the rank that the
    filters return.

    Its state is the set of rows that were issued or skipped, all recorded on the log: see
    `PromptGroupIssued.skipped_rows`. A block ends when all of its rows are used. Without a user
    function a block is one row, so rows come in the order of the stream.
    """

    def __init__(
        self,
        stream: PromptStream,
        filters: Sequence[PromptFilter] = (),
        *,
        block_rows: int = 1,
        first_row: int = 0,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """Start with no row used.

        Args:
            stream: The prompts.
            filters: Each may skip a row; the ranks that they return are added.
            block_rows: Rows that are ranked together.
            first_row: First row of the stream; the rows before it belong to another run.
            heartbeat: Called before each block is filtered, which may take long.
        """
        self._stream, self._filters, self._heartbeat = stream, filters, heartbeat
        self._block_rows = block_rows
        self._floor = first_row
        self._used_rows: set[int] = set()
        self.history = RewardHistory()

    @property
    def floor(self) -> int:
        """Lowest row that was neither issued nor skipped."""
        return self._floor

    @property
    def later_rows(self) -> list[int]:
        """Rows above the floor that were issued or skipped, in order."""
        return sorted(self._used_rows)

    def resume_at(self, floor: int, later_rows: Iterable[int]) -> None:
        """Continue from the state of another sampler."""
        self._floor, self._used_rows = max(self._floor, floor), set(later_rows)

    def mark_used(self, row: int) -> None:
        """Mark a row that was issued or skipped."""
        if row >= self._floor:
            self._used_rows.add(row)
            self._advance_floor()

    def skip_to_block(self, row: int) -> None:
        """Mark all rows up to the first row that the log still contains; the records of earlier
        rows may have been deleted.

        Blocks are issued in order, but the rows of a block in any order, so all rows up to the end
        of this row's block are marked.
        """
        size = self._block_rows
        self._floor = max(self._floor, row if size == 1 else (row // size + 1) * size)
        self._used_rows = {used for used in self._used_rows if used >= self._floor}
        self._advance_floor()

    def _advance_floor(self) -> None:
        while self._floor in self._used_rows:
            self._used_rows.remove(self._floor)
            self._floor += 1

    def add_reward(self, row: int, mean_reward: float) -> None:
        """Add the mean reward of a row's prompt group."""
        if self._filters:
            self.history.add(self._stream.order.dataset_row(row), mean_reward)

    def next_rows(self, count: int, *, train_step: int) -> list[SelectedRow]:
        """Select rows, and mark them as used.

        Args:
            count: Number of rows.
            train_step: The train step that the rows are for.
        Raises:
            ConfigError: The filters skip all rows.
        """
        selected: list[SelectedRow] = []
        skipped: dict[int, str] = {}
        while len(selected) < count:
            kept = self._next_kept_rows(train_step, skipped)
            for row in kept[: count - len(selected)]:
                selected.append(SelectedRow(row, skipped))
                skipped = {}
                self.mark_used(row)
        return selected

    def _next_kept_rows(self, train_step: int, skipped: dict[int, str]) -> list[int]:
        """Return the kept rows of the first block that has any, by rank; blocks without any are
        skipped.
        """
        while True:
            if self._filters:
                self._heartbeat()
            first = self._floor - self._floor % self._block_rows
            rows = [
                row
                for row in range(max(first, self._floor), first + self._block_rows)
                if row not in self._used_rows
            ]
            results = {row: self._filter_row(row, train_step) for row in rows}
            if kept := sorted(
                (rank, row) for row, rank in results.items() if not isinstance(rank, str)
            ):
                return [row for _, row in kept]
            skipped |= {row: str(reason) for row, reason in results.items()}
            for row in rows:
                self.mark_used(row)
            self._check_not_starved(skipped)

    def _filter_row(self, row: int, train_step: int) -> FilterResult:
        if not self._filters:
            return 0.0
        prompt, mean_rewards = self._stream[row], self.history[self._stream.order.dataset_row(row)]
        rank = 0.0
        for prompt_filter in self._filters:
            result = prompt_filter(prompt, mean_rewards=mean_rewards, train_step=train_step)
            if isinstance(result, str):
                return result
            rank += result
        return rank

    def _check_not_starved(self, skipped: Mapping[int, str]) -> None:
        limit = min(MAX_SKIPPED, 2 * max(self._stream.num_rows, self._block_rows))
        if len(skipped) > limit:
            reasons = sorted({*skipped.values()})
            raise ConfigError(
                f"{len(skipped)} prompts in a row were skipped ({', '.join(reasons)}); widen "
                "data.min_prompt_tokens, data.max_prompt_tokens, data.pass_rate_range or "
                "data.prompt_filter"
            )
