"""`relax logs`: what the workers of a run wrote into their logs, readable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def logs(
    run: str,
    *workers: str,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="")] = False,
    level: Literal["debug", "info", "warning", "error"] = "info",
    lines: Annotated[int, Parameter(name=["--lines", "-n"])] = 0,
    directory: Path = Path(".relax"),
    output: Literal["table", "json"] = "table",
) -> None:
    """Show the logs of a run's workers on this machine, in order of time.

    Example: relax logs quickstart trainer-0 --level warning --follow

    Args:
        run: Id of the run, or its run file.
        workers: Whose logs: ids such as `trainer-0`, roles such as `rollout`, `run` for `relax run`
            itself; none stands for all.
        follow: Follow new lines until Ctrl-C.
        level: Leave out less severe log events; tracebacks and what functions print stay.
        lines: Only so many of the last lines; 0 stands for all.
        directory: Folder of the runs' files, unless a run file names it.
        output: Lines to read, or JSON for programs, one document a line.
    """
    from collections import deque

    from relax_events.cli.output import print_json
    from relax_events.cli.run_reader import reader_may_leave, run_folder
    from relax_events.history.worker_logs import (
        LogLine,
        LogTail,
        filter_by_level,
        log_files,
        read_lines,
    )

    def show(line: LogLine) -> None:
        if output == "json":
            print_json(line, on_a_line=True)
        else:
            print(line, flush=follow)

    folder = run_folder(run, directory) / "logs"
    files = log_files(folder, workers)
    tail = LogTail(folder, workers) if follow else None
    with reader_may_leave():
        written = filter_by_level(read_lines(files, ends=tail.ends if tail else None), level)
        for line in deque(written, maxlen=lines) if lines else written:
            show(line)
        if tail is not None:
            for line in filter_by_level(tail.lines(), level):
                show(line)
