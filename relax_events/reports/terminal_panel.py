"""Draws the progress of a run for a terminal: metrics, workers and lag, fitted to the window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.box import ASCII2, ROUNDED, SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_events.printable import printable
from relax_events.projections.run_view import RunView, WorkerRow
from relax_events.reports.terminal import format_clock, format_decimal, format_end
from relax_events.topics import compute_slot

BLOCKS = "".join(chr(0x2581 + height) for height in range(8))
ASCII_BLOCKS = " .:-=+*#"
PHASE_STYLES = ("bright_black", "cyan", "green", "yellow", "magenta", "blue")
ASCII_PHASES = ".#=+*-"
MIN_BAR, MAX_BAR = 12, 40
FRAME_ROWS = 7
TABLE_HEAD_ROWS = 3
MIN_WORKER_ROWS, MAX_ENGINE_ROWS = 3, 8
LAG_NAME_WIDTH, LAG_COLUMN_WIDTH = 16, 13
STATE_STYLES = {
    "working": "green",
    "idle": "",
    "down": "bold red",
    "silent": "bold yellow",
    "draining": "yellow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressPanel:
    """One frame of the live panel; it fits itself to the window that it is printed to."""

    view: RunView
    elapsed_seconds: float
    num_slots: int
    address: str = ""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        """Draw the panel. Narrow windows have fewer columns, low ones fewer rows; the metrics
        stay.
        """
        room = options.max_height - FRAME_ROWS - TABLE_HEAD_ROWS
        room -= bool(self.address) + bool(self.view.phase_ratios)
        tables: list[Table] = []
        for table in (self._lag_table(options.max_width), self._engine_table(options.max_width)):
            if table and room >= MIN_WORKER_ROWS + table.row_count + TABLE_HEAD_ROWS:
                room -= table.row_count + TABLE_HEAD_ROWS
                tables.insert(0, table)
        parts: list[RenderableType] = [self._frame(options)]
        if room >= MIN_WORKER_ROWS:
            parts += ["", self._worker_table(room, options.max_width)]
        for table in tables:
            parts += ["", table]
        yield Group(*parts)

    def _frame(self, options: ConsoleOptions) -> Panel:
        view = self.view
        inner = options.max_width - 4
        head = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None, None):
            head.add_column(no_wrap=True, ratio=ratio)
        done = min(view.step / view.num_steps, 1.0)
        bar = ProgressBar(total=view.num_steps, completed=min(view.step, view.num_steps))
        head.add_row(
            Text(f"step {view.step}/{view.num_steps}", "bold"),
            bar,
            f"{done:.0%}",
            f"ETA {format_clock(view.remaining_seconds)}{format_end(view.remaining_seconds)}",
        )
        first, pace = format_learning(view), format_pace(view)
        spark = sparkline(
            view.rewards[-max(inner - first.cell_len - 2, 0) :],
            blocks=ASCII_BLOCKS if options.ascii_only else BLOCKS,
        )
        lines: list[RenderableType] = [
            head,
            _format_verdict(view),
            Text.assemble(first, "  ", (spark, "cyan"), no_wrap=True),
            pace,
            format_outcomes(view),
        ]
        if view.phase_ratios:
            lines.append(draw_phases(view.phase_ratios, width=inner, ascii_only=options.ascii_only))
        if self.address:
            lines.append(Text(f"watch: {self.address}", "dim", no_wrap=True, overflow="ellipsis"))
        body = Group(*lines)
        title, box = (
            Text(f"relax run {self.view.run_id}", "bold"),
            ASCII2 if options.ascii_only else ROUNDED,
        )
        return Panel(
            body,
            title=title,
            title_align="left",
            subtitle=format_clock(self.elapsed_seconds),
            subtitle_align="right",
            box=box,
        )

    def _worker_table(self, room: int, width: int) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
        columns = [name for name, (least, _) in WORKER_COLUMNS.items() if width >= least]
        for name in columns:
            table.add_column(
                name, justify="left" if name in ("worker", "state") else "right", no_wrap=True
            )
        shown, num_hidden = select_workers(self.view.workers, room)
        for row in shown:
            table.add_row(*(WORKER_COLUMNS[name][1](row) for name in columns))
        if num_hidden:
            table.add_row(Text(f"and {num_hidden} more", "dim"))
        return table

    def _engine_table(self, width: int) -> Table | None:
        """Draw the state of the inference engines."""
        engines = [row for row in self.view.workers if row.engine]
        if not engines:
            return None
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
        columns = [name for name, (least, _) in ENGINE_COLUMNS.items() if width >= least]
        for name in columns:
            table.add_column(name, justify="left" if name == "engine of" else "right", no_wrap=True)
        for row in engines[:MAX_ENGINE_ROWS]:
            table.add_row(
                row.worker_id, *(ENGINE_COLUMNS[name][1](row.engine) for name in columns[1:])
            )
        if len(engines) > MAX_ENGINE_ROWS:
            table.add_row(Text(f"and {len(engines) - MAX_ENGINE_ROWS} more", "dim"))
        return table

    def _lag_table(self, width: int) -> Table | None:
        """Draw the lag in records by role and slot, with the newest version's slot marked; the
        oldest slots are omitted where space is short.
        """
        if not self.view.lag:
            return None
        version = max(self.view.policy_version, 0)
        room = max((width - LAG_NAME_WIDTH) // LAG_COLUMN_WIDTH, 1)
        ages = range(
            min(self.num_slots, room)
        )  # the slot of version - age; the last one is cleared for the next version
        slots = sorted(compute_slot(version - age, num_slots=self.num_slots) for age in ages)
        current = compute_slot(version, num_slots=self.num_slots)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
        table.add_column("lag in records", no_wrap=True, min_width=LAG_NAME_WIDTH - 2)
        for slot in slots:
            is_current = slot == current and self.view.policy_version >= 0
            mark = (
                Text(f"slot {slot} *v{version}", "bold green")
                if is_current
                else Text(f"slot {slot}")
            )
            table.add_column(mark, justify="right", no_wrap=True)
        for role, counts in self.view.lag.items():
            table.add_row(Text(role), *(format_integer(counts.get(slot)) for slot in slots))
        return table


def select_workers(workers: Sequence[WorkerRow], room: int) -> tuple[Sequence[WorkerRow], int]:
    """Return the workers that fit into so many rows, unhealthy ones first, and the number of
    omitted ones.
    """
    if len(workers) <= room:
        return workers, 0
    chosen = sorted(range(len(workers)), key=lambda index: (workers[index].is_healthy, index))[
        : room - 1
    ]
    return [workers[index] for index in sorted(chosen)], len(workers) - len(chosen)


def format_learning(view: RunView) -> Text:
    """Return the newest step's learning view."""
    styles = {"reward": "bold"}
    return Text("  ").join(
        Text.assemble(f"{name} ", (format_decimal(value), styles.get(name, "")))
        for name, value in view.learning_metrics.items()
    )


def _format_verdict(view: RunView) -> Text:
    """Return what fits of the verdict in a row."""
    style = "" if view.verdict.is_good else "bold yellow"
    return Text(printable(view.verdict.line), style, no_wrap=True, overflow="ellipsis")


def format_pace(view: RunView) -> Text:
    """Return version, staleness and throughput."""
    version = view.policy_version if view.policy_version >= 0 else "-"
    staleness = (
        f"staleness {format_decimal(view.staleness_mean, 2)} max "
        f"{view.staleness_max if view.staleness_max is not None else '-'}"
    )
    rates = (
        f"tokens/s {format_integer(view.tokens_per_second)}  samples/s "
        f"{format_decimal(view.samples_per_second)}"
    )
    return Text(
        f"policy version {version}  {staleness}  {rates}", no_wrap=True, overflow="ellipsis"
    )


def format_outcomes(view: RunView) -> Text:
    """Return the outcomes of prompt groups, and the lag in records."""
    ended = "  ".join(
        f"{name} {view.outcomes.get(name, 0)}"
        for name in ("trained", "filtered", "expired", "failed")
    )
    return Text(
        f"prompt groups: {ended}  lag {view.num_lagging}", no_wrap=True, overflow="ellipsis"
    )


def sparkline(values: Sequence[float], *, blocks: str = BLOCKS) -> str:
    """Draw a value per character between the lowest and the highest; equal values are centred."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if not high > low:
        return blocks[len(blocks) // 2] * len(values)
    return "".join(
        blocks[min(int((value - low) / (high - low) * len(blocks)), len(blocks) - 1)]
        for value in values
    )


def draw_phases(ratios: Mapping[str, float], *, width: int, ascii_only: bool = False) -> Text:
    """Draw the trainer's phases as one bar with their shares behind it; the smallest shares are
    omitted where space is short.
    """
    styles = dict(zip(ratios, itertools.cycle(PHASE_STYLES), strict=False))
    legend = Text()
    for phase, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        part = f"  {phase.replace('_', '+')} {ratio:.0%}"
        if legend.cell_len + len(part) > width - MIN_BAR:
            break
        legend.append(part, styles[phase])
    length = min(width - legend.cell_len, MAX_BAR)
    bar, begin, reached = Text(), 0, 0.0
    for number, (phase, ratio) in enumerate(ratios.items()):
        reached += ratio
        until = min(round(reached * length), length)
        block = ASCII_PHASES[number % len(ASCII_PHASES)] if ascii_only else BLOCKS[-1]
        bar.append(block * (until - begin), styles[phase])
        begin = until
    return Text.assemble(bar, legend, no_wrap=True)


def format_integer(value: float | None) -> str:
    """Format a count or a rate as an integer; a dash when it is unknown."""
    return "-" if value is None else f"{value:.0f}"


def format_percent(value: float | None) -> str:
    """Format a share; a dash when it is unknown."""
    return "-" if value is None else f"{value:.0%}"


ENGINE_COLUMNS: dict[
    str, tuple[int, Callable[[Mapping[str, float]], str]]
] = {  # name -> least width of the window, cell
    "engine of": (0, lambda _: ""),
    "decoding": (
        0,
        lambda engine: (
            f"{format_integer(engine.get('decoding_samples'))}/{format_integer(engine.get('capacity_samples'))}"
        ),
    ),
    "waiting": (86, lambda engine: format_integer(engine.get("waiting_samples"))),
    "tokens/s": (0, lambda engine: format_integer(engine.get("tokens_per_second"))),
    "generating": (54, lambda engine: format_percent(engine.get("generating_ratio"))),
    "loading": (64, lambda engine: format_percent(engine.get("loading_ratio"))),
    "cached": (74, lambda engine: format_percent(engine.get("cached_ratio"))),
    "recomputed": (94, lambda engine: format_integer(engine.get("recomputed_tokens"))),
}
WORKER_COLUMNS: dict[
    str, tuple[int, Callable[[WorkerRow], Text | str]]
] = {  # name -> least width of the window, cell
    "worker": (0, lambda row: Text(row.worker_id)),
    "state": (0, lambda row: Text(row.state, STATE_STYLES.get(row.state, "dim"))),
    "version": (64, lambda row: format_integer(row.policy_version)),
    "processed": (0, lambda row: format_integer(row.num_processed)),
    "in flight": (86, lambda row: format_integer(row.num_in_flight)),
    "per s": (94, lambda row: format_decimal(row.records_per_second)),
    "heartbeat": (
        54,
        lambda row: (
            "-" if row.heartbeat_age_seconds is None else f"{row.heartbeat_age_seconds:.1f} s"
        ),
    ),
    "inside": (104, lambda row: Text(row.activity)),
    "restarts": (74, lambda row: format_integer(row.num_restarts)),
}
