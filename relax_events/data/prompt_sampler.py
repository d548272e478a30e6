"""Which row of the prompt stream is issued next, given those that were issued or passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from relax_events.data.prompt_filter import History, Judge, Verdict
from relax_events.data.stream import PromptStream
from relax_events.errors import ConfigError

MAX_PASSED_OVER = 100_000


@dataclass(frozen=True, slots=True)
class Choice:
    """A row to issue, and those that were passed over for good since the choice before it, with the
    reasons.
    """

    row: int
    passed_over: Mapping[int, str] = field(default_factory=dict)


class PromptChooser:
    """Takes each row of the stream once, block by block; within a block in the order that the
    judges give.

    Its state is the set of rows that were taken or passed over, all of which the log knows: see
    `PromptGroupIssued.passed_over`. A block is left when nothing in it is left to take. Without a
    hook a block is one row, so that rows come in the order of the stream.
    """

    def __init__(
        self,
        stream: PromptStream,
        judges: Sequence[Judge] = (),
        *,
        block_rows: int = 1,
        first_row: int = 0,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with nothing taken.

        Args:
            stream: The prompts.
            judges: Each may pass over a row; the places in the order that they give are added.
            block_rows: Rows among which the order chooses.
            first_row: Of the stream; those before it are another run's.
            beat: Called once for each block that is judged, which may take long.
        """
        self._stream, self._judges, self._beat = stream, judges, beat
        self._block_rows = block_rows
        self._floor = first_row
        self._known: set[int] = set()
        self.history = History()

    @property
    def floor(self) -> int:
        """Lowest row that was neither taken nor passed over."""
        return self._floor

    @property
    def later_rows(self) -> list[int]:
        """Rows above the floor that were taken or passed over, in order."""
        return sorted(self._known)

    def begin_at(self, floor: int, later_rows: Iterable[int]) -> None:
        """Go on where another chooser had come to."""
        self._floor, self._known = max(self._floor, floor), set(later_rows)

    def mark(self, row: int) -> None:
        """Enter a row that was taken or passed over."""
        if row >= self._floor:
            self._known.add(row)
            self._settle()

    def begin_at_block_of(self, row: int) -> None:
        """Enter all rows before this one, the first that the log still tells of: those before it
        may have been deleted.

        Blocks are issued in order, and the rows of a block in any; so it is the rows up to the end
        of this one's block.
        """
        size = self._block_rows
        self._floor = max(self._floor, row if size == 1 else (row // size + 1) * size)
        self._known = {known for known in self._known if known >= self._floor}
        self._settle()

    def _settle(self) -> None:
        while self._floor in self._known:
            self._known.remove(self._floor)
            self._floor += 1

    def note_reward(self, row: int, mean_reward: float) -> None:
        """Enter what a row's prompt group earned."""
        if self._judges:
            self.history.note(self._stream.order.place(row), mean_reward)

    def take(self, count: int, *, train_step: int) -> list[Choice]:
        """Choose rows, and mark them as taken.

        Args:
            count: How many.
            train_step: The step that they are for.
        Raises:
            ConfigError: The judges pass over everything.
        """
        choices: list[Choice] = []
        passed_over: dict[int, str] = {}
        while len(choices) < count:
            kept = self._judged(train_step, passed_over)
            for row in kept[: count - len(choices)]:
                choices.append(Choice(row, passed_over))
                passed_over = {}
                self.mark(row)
        return choices

    def _judged(self, train_step: int, passed_over: dict[int, str]) -> list[int]:
        """Return the rows of the first block that has any, in order; blocks that have none are
        passed over.
        """
        while True:
            if self._judges:
                self._beat()
            first = self._floor - self._floor % self._block_rows
            rows = [
                row
                for row in range(max(first, self._floor), first + self._block_rows)
                if row not in self._known
            ]
            verdicts = {row: self._verdict(row, train_step) for row in rows}
            if kept := sorted(
                (place, row) for row, place in verdicts.items() if not isinstance(place, str)
            ):
                return [row for _, row in kept]
            passed_over |= {row: str(reason) for row, reason in verdicts.items()}
            for row in rows:
                self.mark(row)
            self._refuse_to_starve(passed_over)

    def _verdict(self, row: int, train_step: int) -> Verdict:
        if not self._judges:
            return 0.0
        prompt, mean_rewards = self._stream[row], self.history[self._stream.order.place(row)]
        place = 0.0
        for judge in self._judges:
            verdict = judge(prompt, mean_rewards=mean_rewards, train_step=train_step)
            if isinstance(verdict, str):
                return verdict
            place += verdict
        return place

    def _refuse_to_starve(self, passed_over: Mapping[int, str]) -> None:
        limit = min(MAX_PASSED_OVER, 2 * max(self._stream.rows, self._block_rows))
        if len(passed_over) > limit:
            reasons = sorted({*passed_over.values()})
            remedy = (
                "widen data.min_prompt_tokens, data.max_prompt_tokens, data.pass_rate or data.hook"
            )
            raise ConfigError(
                f"{len(passed_over)} prompts in a row were passed over "
                f"({', '.join(reasons)}); {remedy}"
            )
