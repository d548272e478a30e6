"""`relax schemas`: the contract of the log, how it has changed, and whether old and new still read
each other.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_events.cli.output import agreed
from relax_events.cli.parameters import DEFAULT_BROKER, BrokerOptions, Output, Yes
from relax_events.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from relax_events.events.compatibility import Incompatibility
    from relax_events.events.schemas import Schema


def schemas(
    name: str = "",
    *,
    release: str = "current",
    since: str = "",
    check: bool = False,
    run: str = "",
    add: str = "",
    directory: Path | None = None,
    dry_run: bool = False,
    yes: Yes = False,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> int:
    """List the events of the log, or show one's fields, types, meaning and fingerprint; show how
    the schemas have changed; or prove that every release reads the current records and the reverse.

    Example: relax schemas SamplesRolledOut && relax schemas --check --run configs/quickstart.toml

    Args:
        name: An event, by its short or full name.
        release: A released version, or `current` for the current schemas.
        since: Show how the release differs from this one.
        check: Check the releases against each other; exit code 6 when they are incompatible.
        run: Check also against what the writers of this run have published: its id, or its run
            file.
        add: Keep the current schemas as a release of this version, above all before it; all later
            ones must stay compatible with it.
        directory: Folder of .avsc files with their releases; by default the installed ones.
        dry_run: With --add: check, show what would be written, and write nothing.
    """
    from relax_events.events.schemas import find_release, schema_directory

    flags = {"NAME": name, "--since": since, "--check": check, "--add": add}
    if len(chosen := [flag for flag, value in flags.items() if value]) > 1:
        raise ConfigError(f"{' and '.join(chosen)} exclude each other; give one of them")
    if run and not check:
        raise ConfigError("--run is for --check; add that, or leave it out")
    folder = directory or schema_directory()
    if check:
        return _check(folder, run, broker, output)
    if add:
        return _add_release(folder, add, dry_run=dry_run, yes=yes)
    current = find_release(folder, release)
    if since:
        _show_changes(find_release(folder, since).schemas, current.schemas, output)
    elif name:
        _show_event(current.find(name), output)
    else:
        _show_list(current.schemas, output)
    return 0


def _check(folder: Path, run: str, broker: BrokerOptions, output: Output) -> int:
    from relax_events.ops.schemas import check_releases, check_run, find_unreleased

    problems = check_releases(folder)
    if run:
        with broker.open_run(run, name="schemas") as settings:
            problems += check_run(settings, folder)
    _show_problems(problems, find_unreleased(folder), output)
    return CheckFailed.exit_code if problems else 0


def _add_release(folder: Path, version: str, *, dry_run: bool, yes: bool) -> int:
    from relax_events.events.schemas import write_release
    from relax_events.ops.schemas import build_release

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


def _show_changes(old: dict[str, Schema], new: dict[str, Schema], output: Output) -> None:
    from relax_events.cli.output import print_rows
    from relax_events.events.compatibility import changes

    rows = [[change.schema, change.field, change.what] for change in changes(old, new)]
    print_rows(["schema", "field", "change"], rows, output)


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
