from relax_events.reports.reading_progress import ReadingProgress


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def lines_at(*moments: tuple[float, int], hint: str = "") -> list[str]:
    """Return the lines that are printed when so many of 1,000 records are read at each moment."""
    lines: list[str] = []
    clock = Clock()
    progress = ReadingProgress(lines.append, hint=hint, clock=clock)
    for clock.seconds, num_read in moments:
        progress(num_read, 1000)
    return lines


def test_a_short_reading_says_nothing() -> None:
    assert lines_at((1, 100), (4, 900), (6, 1000)) == []


def test_a_line_says_the_share_and_the_time_that_is_left() -> None:
    (line,) = lines_at((6, 100))
    assert line == (
        "checking that no sample was lost or trained twice: 10% of 1,000 records read, "
        "about 54 s left"
    )
    assert lines_at((60, 100))[0].endswith("about 9 min left")


def test_lines_come_ever_more_rarely() -> None:
    seconds = [float(second) for second in range(1, 3600)]
    lines = lines_at(*((second, 1) for second in seconds))
    # after 5 s, then after 10, 20, 40, 80, 160 and 300 s each
    assert len(lines) == 6 + (3600 - 5 - 310) // 300


def test_the_hint_is_said_once() -> None:
    lines = lines_at((5, 1), (15, 2), hint="; Ctrl-C leaves it out")
    assert [line.endswith("Ctrl-C leaves it out") for line in lines] == [True, False]
