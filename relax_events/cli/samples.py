"""`relax samples`: samples and their outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.cli.sample_rendering import Which

if TYPE_CHECKING:
    from relax_events.history.run_log import RunLog
    from relax_events.history.samples.view import SampleLine

app = App(
    name="samples",
    help=(
        "Look at the samples of a run.\n\nExample: relax samples tail configs/quickstart.toml "
        "--last 5 --no-follow"
    ),
)
EVERYTHING = Which()


@app.command
def tail(
    config: RunFile,
    *overrides: Overrides,
    which: Annotated[Which, Parameter(name="*")] = EVERYTHING,
    from_: Annotated[Literal["beginning", "end"], Parameter(name="--from")] = "end",
    last: int = 0,
    limit: int | None = None,
    follow: bool | None = None,
    output: Literal["table", "json"] = "table",
) -> None:
    """Show samples as they are generated and scored, one line each; Ctrl-C ends it.

    Example: relax samples tail configs/quickstart.toml --from beginning --reward 0.9.. --limit 20

    Args:
        which: Which samples.
        from_: Start with the oldest sample, or with those that are generated from now on.
        last: Start with so many of the newest samples that are there.
        limit: End after so many samples.
        follow: Go on with what comes; by default unless the flags name a version, step, prompt
            group or sample of the past.
        output: A line to read, or a JSON object a line for programs.
    """
    from relax_events.cli.run_reader import note_unreadable, open_run_log, reader_may_leave
    from relax_events.cli.sample_rendering import print_line

    is_followed = not which.has_end if follow is None else follow
    from_beginning = from_ == "beginning" or (not is_followed and not last)
    with open_run_log(config, overrides, name="samples") as log, reader_may_leave():
        for number, line in enumerate(
            islice(
                _lines(log, which, from_beginning=from_beginning, last=last, follow=is_followed),
                limit,
            )
        ):
            print_line(line, output, with_head=number == 0)
        note_unreadable(log)


def _lines(
    log: RunLog, which: Which, *, from_beginning: bool, last: int, follow: bool
) -> Iterator[SampleLine]:
    from relax_events.history.samples.reader import (
        follow_samples,
        live_starts,
        read_last_lines,
        read_lines,
    )

    selection, starts = which.as_filter(), live_starts(log)
    if from_beginning:
        yield from read_lines(log, selection)
    elif last:
        yield from read_last_lines(log, selection, count=last)
    if follow:
        yield from follow_samples(log, selection, starts)


@app.command
def show(
    sample_id: str,
    config: RunFile,
    *overrides: Overrides,
    tokens: bool = False,
    output: Output = "table",
) -> None:
    """Show a sample: the conversation, its reward, its outcome, and its tokens with --tokens.

    Example: relax samples show 000000-0000-0/0 configs/quickstart.toml --tokens

    Args:
        sample_id: Such as 000012-0003-0/5.
        tokens: Add a table of all tokens with their log-probabilities, advantages and loss mask.
    """
    from relax_events.cli.output import print_json
    from relax_events.cli.run_reader import note_unreadable, open_run_log
    from relax_events.cli.sample_rendering import print_sample, sample_document
    from relax_events.history.samples.detail import read_detail

    with open_run_log(config, overrides, name="samples") as log:
        detail = read_detail(log, sample_id, with_tokens=tokens)
        note_unreadable(log)
    if output == "json":
        print_json(sample_document(detail))
    else:
        print_sample(detail)


@app.command
def export(
    config: RunFile,
    *overrides: Overrides,
    output_file: Path | None = None,
    which: Annotated[Which, Parameter(name="*")] = EVERYTHING,
    tokens: bool = False,
    media: Path | None = None,
    last: int = 0,
    limit: int | None = None,
    exporter: str = "",
) -> None:
    """Write samples into a .jsonl or .parquet file, with their media next to it, or by another
    exporter.

    Example: relax samples export configs/quickstart.toml --output-file samples.jsonl --reward 0.9..

    Args:
        output_file: File to write; without it JSON lines go to stdout.
        which: Which samples.
        tokens: Add token ids, loss mask and rollout log-probabilities.
        media: Folder for images, videos and audio; by default `<file>-media` next to the file.
        last: Write only so many of the newest samples.
        limit: End after so many samples.
        exporter: What writes the rows: an installed exporter, or path/to/file.py:function; by
            default the one of the file's suffix.
    """
    from relax_events.cli.run_reader import note_unreadable, open_run_log, reader_may_leave
    from relax_events.history.samples.reader import read_last_samples, read_samples
    from relax_events.reports.sample_export import export_samples

    selection = which.as_filter()
    with open_run_log(config, overrides, name="samples") as log:
        views = (
            read_last_samples(log, selection, count=last) if last else read_samples(log, selection)
        )
        with reader_may_leave() if output_file is None else nullcontext():
            rows = export_samples(
                log,
                islice(views, limit),
                output_file,
                exporter=exporter,
                media=media,
                tokens=tokens,
            )
        note_unreadable(log)
    if output_file is not None:
        print(f"wrote {rows.num_rows} samples to {output_file}, with {rows.num_media} media")
