"""How much of a reward function's printed output reaches the log."""

from __future__ import annotations

from relax_events.confinement.prints import (
    BURST_BYTES,
    BYTES_PER_SECOND,
    MAX_LINE_BYTES,
    PrintBudget,
)


def test_ordinary_output_passes_unchanged_in_any_chunks() -> None:
    budget = PrintBudget(now=0.0)
    assert (
        b"".join(budget.limit(part, now=0.0) for part in (b"one", b" line\ntwo\n", b"", b"three"))
        == b"one line\ntwo\nthree"
    )


def test_overlong_printed_line_is_cut_and_the_next_line_is_kept() -> None:
    budget = PrintBudget(now=0.0)
    written = b"".join(
        budget.limit(part, now=0.0) for part in [b"x" * 1_000] * 10 + [b"x\nshort\n"]
    )
    assert written == b"x" * MAX_LINE_BYTES + b"...\nshort\n"


def test_dropped_output_is_counted_until_the_print_budget_recovers() -> None:
    budget, line = PrintBudget(now=0.0), b"y" * 1_023 + b"\n"
    written = budget.limit(line * 1_000, now=0.0)
    assert written == line * (BURST_BYTES // len(line))
    num_left_out = 1_000 * len(line) - len(written)
    later = budget.limit(b"again\n", now=60.0)
    assert (
        later
        == f"({num_left_out} bytes that a child process printed were dropped)\nagain\n".encode()
    )
    assert len(budget.limit(line * 1_000, now=60.0)) <= 60 * BYTES_PER_SECOND
