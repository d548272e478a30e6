"""`relax samples`: samples and their outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from relax_events.cli.output import print_json
from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.cli.sample_rendering import Which, print_line, print_sample, sample_document

if TYPE_CHECKING:
    from relax_events.history.run_log import RunLog
    from relax_events.history.samples.view import SampleLine, SampleView

EVERYTHING = Which()


def samples(
    config: RunFile,
    *overrides: Overrides,
    which: Annotated[Which, Parameter(name="*")] = EVERYTHING,
    from_: Annotated[Literal["beginning", "end"], Parameter(name="--from")] = "end",
    last: int = 0,
    limit: int | None = None,
    follow: bool | None = None,
    tokens: bool = False,
    out: str = "",
    exporter: str = "",
    media: Path | None = None,
    output: Literal["table", "json"] = "table",
) -> None:
    """Show samples as they are generated and scored, one line each, until Ctrl-C; one in full with
    --sample; or export them with --out.

    Example: relax samples configs/quickstart.toml --from beginning --reward 0.9.. --limit 20

    Args:
        which: Which samples.
        from_: Start with the oldest sample, or with those that are generated from now on.
        last: Start with so many of the newest samples that are there; export only these.
        limit: End after so many samples.
        follow: Go on with what comes; by default unless the flags name a version, step or prompt
            group of the past.
        tokens: Of one sample, add a table of all tokens with their log-probabilities, advantages
            and loss mask; of an export, token ids, loss mask and rollout log-probabilities.
        out: File to export to, .jsonl or .parquet, with media next to it; - writes JSON lines to
            stdout.
        exporter: What writes the rows: an installed exporter, or path/to/file.py:function; by
            default the one of the file's suffix.
        media: Folder for images, videos and audio; by default `<file>-media` next to the file.
        output: Text to read, or JSON for programs: an object a line, or the sample.
    """
    from relax_events.cli.run_reader import note_unreadable, open_run_log, reader_may_leave

    with open_run_log(config, overrides, name="samples") as log:
        if out or exporter:
            file = None if out in ("", "-") else Path(out)
            views = islice(_views(log, which, last), limit)
            with reader_may_leave() if file is None else nullcontext():
                _export(log, views, file, exporter=exporter, media=media, tokens=tokens)
        elif which.sample:
            _show(log, which.sample, tokens, output)
        else:
            is_followed = not which.has_end if follow is None else follow
            starts_first = from_ == "beginning" or (not is_followed and not last)
            with reader_may_leave():
                lines = _lines(
                    log, which, from_beginning=starts_first, last=last, follow=is_followed
                )
                for number, line in enumerate(islice(lines, limit)):
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


def _show(log: RunLog, sample_id: str, tokens: bool, output: Output) -> None:
    from relax_events.history.samples.detail import read_detail

    detail = read_detail(log, sample_id, with_tokens=tokens)
    if output == "json":
        print_json(sample_document(detail))
    else:
        print_sample(detail)


def _views(log: RunLog, which: Which, last: int) -> Iterator[SampleView]:
    from relax_events.history.samples.reader import read_last_samples, read_samples

    selection = which.as_filter()
    return (
        iter(read_last_samples(log, selection, count=last))
        if last
        else read_samples(log, selection)
    )


def _export(
    log: RunLog,
    views: Iterable[SampleView],
    file: Path | None,
    *,
    exporter: str,
    media: Path | None,
    tokens: bool,
) -> None:
    from relax_events.reports.sample_export import export_samples

    rows = export_samples(log, views, file, exporter=exporter, media=media, tokens=tokens)
    if file is not None:
        print(f"wrote {rows.num_rows} samples to {file}, with {rows.num_media} media")
