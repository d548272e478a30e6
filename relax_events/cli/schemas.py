"""`relax schemas`: the contract of the log, how it has changed, and whether old and new still read
each other.
"""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from relax_events.cli.output import agreed
from relax_events.cli.parameters import Output, Overrides, Yes
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.events.compatibility import Incompatibility
    from relax_events.events.schemas import Schema

app = App(
    name="schemas",
    help="Show, compare, check and release the schemas of the log.\n\nExample: relax schemas check",
)


@app.command
def check(
    config: Path | None = None,
    *overrides: Overrides,
    directory: Path | None = None,
    output: Output = "table",
) -> int:
    """Prove that every release reads the current records and the reverse; exit code 6 when not.

    Example: relax schemas check configs/quickstart.toml

    Args:
        config: A run file, TOML: checks also against what the run's writers have published.
        directory: Folder of .avsc files with their releases; by default the installed ones.
    """
    from relax_events.ops.schemas import check_releases, check_run, find_unreleased

    folder = _folder(directory)
    problems = check_releases(folder)
    if config is not None:
        from relax_events.config import load_run_config
        from relax_events.session.broker_address import attach

        with attach(load_run_config(config, overrides), by="relax schemas") as settings:
            problems += check_run(settings, folder)
    _show_problems(problems, find_unreleased(folder), output)
    return CheckFailed.exit_code if problems else 0


@app.command
def diff(
    old: str, new: str = "current", *, directory: Path | None = None, output: Output = "table"
) -> None:
    """Show how the schemas of two releases differ.

    Example: relax schemas diff 0.1.0 current

    Args:
        old: A released version, or `current`.
        new: A released version, or `current` for the current schemas.
        directory: Folder of .avsc files with their releases; by default the installed ones.
    """
    from relax_events.cli.output import print_rows
    from relax_events.events.compatibility import changes
    from relax_events.events.schemas import find_release

    folder = _folder(directory)
    rows = [
        [change.schema, change.field, change.what]
        for change in changes(find_release(folder, old).schemas, find_release(folder, new).schemas)
    ]
    print_rows(["schema", "field", "change"], rows, output)


@app.command
def show(
    name: str = "",
    *,
    release: str = "current",
    directory: Path | None = None,
    output: Output = "table",
) -> None:
    """Show an event's fields, types, meaning and fingerprint; without a name, list the events.

    Example: relax schemas show SamplesRolledOut

    Args:
        name: An event, by its short or full name.
        release: A released version, or `current` for the current schemas.
        directory: Folder of .avsc files with their releases; by default the installed ones.
    """
    from relax_events.events.schemas import find_release

    schemas = find_release(_folder(directory), release)
    if name:
        _show_event(schemas.find(name), output)
    else:
        _show_list(schemas.schemas, output)


@app.command(name="release")
def add_release(
    version: str, *, directory: Path | None = None, dry_run: bool = False, yes: Yes = False
) -> int:
    """Keep the current schemas as a release that all later ones must stay compatible with.

    Example: relax schemas release 1.0.0 --dry-run

    Args:
        version: Of the release, above all before it.
        directory: Folder of .avsc files with their releases; by default the checkout's.
        dry_run: Check, show what would be written, and write nothing.
    """
    import sys

    from relax_events.events.schemas import write_release
    from relax_events.ops.schemas import build_release

    folder = _folder(directory)
    release = build_release(folder, version)
    print(
        f"{len(release.schemas)} events will be released as {version} in {folder}", file=sys.stderr
    )
    if dry_run:
        return 0
    if not agreed("write this release?", yes=yes):
        return CheckFailed.exit_code
    print(write_release(folder, release))
    return 0


def _folder(directory: Path | None) -> Path:
    from relax_events.events.schemas import schema_directory

    return directory or schema_directory()


def _show_problems(problems: list[Incompatibility], unreleased: list[str], output: Output) -> None:
    from relax_events.cli.output import print_json, print_rows

    if output == "json":
        rows = [asdict(problem) for problem in problems]
        print_json({"problems": rows, "unreleased": unreleased})
        return
    if problems:
        print_rows(["schema", "field", "what", "remedy"], list(map(astuple, problems)), output)
    else:
        print("every release reads what is written now, and the reverse")
    if unreleased:
        print(f"not in any release as they stand: {', '.join(unreleased)}")


def _show_event(schema: Schema, output: Output) -> None:
    from relax_events.cli.output import print_fields, print_json, print_rows
    from relax_events.events.compatibility import field_rows
    from relax_events.events.schemas import get_full_name, schema_fingerprint

    facts: dict[str, Any] = {
        "name": get_full_name(schema),
        "doc": schema["doc"],
        "fingerprint": schema_fingerprint(schema).hex(),
    }
    fields = field_rows(schema)
    if output == "json":
        print_json({**facts, "fields": list(map(asdict, fields)), "schema": schema})
        return
    print_fields(facts)
    rows = [[row.path, row.logical_type or row.type, row.default, row.doc] for row in fields]
    print_rows(["path", "type", "default", "doc"], rows, output)


def _show_list(schemas: dict[str, Schema], output: Output) -> None:
    from relax_events.cli.output import print_rows
    from relax_events.events.schemas import schema_fingerprint

    rows = [
        [name, schema_fingerprint(schema).hex(), schema["doc"]]
        for name, schema in sorted(schemas.items())
    ]
    print_rows(["name", "fingerprint", "doc"], rows, output)
