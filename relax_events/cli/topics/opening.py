"""What the subcommands share: the run behind a run file, and rows on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from relax_events.broker.admin import Admin
    from relax_events.config import RunConfig

Output = Literal["table", "json"]


def open_run(config: Path, overrides: tuple[str, ...]) -> tuple[RunConfig, Admin]:
    """Return the run with its broker's address filled in, and an admin client of that broker, which has answered."""
    from relax_events.config import load_run_config
    from relax_events.control.address import attach, open_admin

    settings = attach(load_run_config(config, overrides))
    return settings, open_admin(settings, name="topics")


def show(columns: Sequence[str], rows: Sequence[Sequence[Any]], output: Output) -> None:
    """Print rows as a table, or as a JSON list of objects."""
    from relax_events.cli.output import print_json, print_table

    if output == "json":
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, [["-" if value is None else value for value in row] for row in rows])
