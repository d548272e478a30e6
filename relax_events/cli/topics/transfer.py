"""`relax topics` export and import: a run as files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from relax_events.cli.output import print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile, Yes
from relax_events.cli.topics.run_topics import open_run
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.ops.run_import import ImportPlan


def export_run(
    config: RunFile,
    folder: Path,
    *overrides: Overrides,
    entity: tuple[str, ...] = (),
    version: str = "",
    objects: bool = False,
    output: Output = "table",
) -> None:
    """Write a run's records into files, byte for byte, with a manifest of counts and digests.

    Example: relax topics export configs/quickstart.toml exported/quickstart

    A partition is an Avro object container file. The same command continues an export that was
    cut short.

    Args:
        folder: Where the files go.
        entity: Only these topics, for example rollout.samples; once for each.
        version: Samples of these policy versions only: 3, 3..7, 3.. or ..7.
        objects: Copy the object store too: weights, checkpoints, media.
    """
    from relax_events.ops.run_export import ExportFilter, export_run, parse_versions

    with open_run(config, overrides) as (settings, admin):
        selection = ExportFilter(entity, parse_versions(version))
        manifest = export_run(
            settings,
            admin,
            folder,
            selection,
            with_objects=objects,
            report=lambda line: print(line, file=sys.stderr),
        )
        length = 16 if output == "table" else None
        rows = [
            [
                i.entity,
                i.partition,
                i.num_records,
                i.num_bytes,
                i.begin,
                i.end,
                i.records_digest[:length],
            ]
            for i in manifest.partitions
        ]
        print_rows(
            ["topic", "partition", "records", "bytes", "begin", "end", "digest"], rows, output
        )


def import_run(
    folder: Path,
    config: Path,
    *overrides: Overrides,
    run_id: str = "",
    verify: bool = False,
    dry_run: bool = False,
    yes: Yes = False,
    output: Output = "table",
) -> int:
    """Make a run out of exported files: every record byte for byte at its offset, and the groups'
    positions.

    Example: relax topics import exported/quickstart configs/quickstart.toml --run-id
        quickstart-copy

    With `--verify`, records that are there already are compared and missing ones are written first.

    Args:
        folder: What `relax topics export` wrote.
        config: The run file, TOML: broker, object store, and the shape of the topics.
        run_id: The id of the new run; that of the run file when not given.
        verify: Read everything back and compare; exit code 6 when something differs.
        dry_run: Show what would be written and write nothing.
    """
    from relax_events.cli.output import agreed
    from relax_events.ops.export_manifest import Manifest, verify_files
    from relax_events.ops.run_import import import_run, plan_import, verify_import

    overrides = (*overrides, f"run.id={run_id}") if run_id else overrides
    with open_run(config, overrides, may_be_new=True) as (settings, admin):
        manifest = Manifest.load(folder)
        verify_files(folder, manifest)
        plan = plan_import(settings, admin, manifest)
        _show_plan(plan, output)
        if dry_run:
            return 0
        if plan.partitions:
            if not agreed(f"write {plan.num_records} records as run {settings.run.id}?", yes=yes):
                return CheckFailed.exit_code
            import_run(
                settings,
                admin,
                folder,
                manifest,
                plan,
                report=lambda line: print(line, file=sys.stderr),
            )
        if verify:
            verify_import(settings, manifest)
            print("every partition is as exported", file=sys.stderr)
        if manifest.objects:
            print(
                (
                    "for references to objects, put into the run file: [objects] uri_aliases = "
                    f'["{manifest.objects_uri}"]'
                ),
                file=sys.stderr,
            )
        return 0


def _show_plan(plan: ImportPlan, output: Output) -> None:
    """Show the partitions that would be written, and how many are there already."""
    rows = [[i.entity, i.partition, i.num_records, i.num_bytes, i.end] for i in plan.partitions]
    print_rows(["topic", "partition", "records", "bytes", "end"], rows, output)
    if plan.num_present:
        print(f"{plan.num_present} partition(s) are there already", file=sys.stderr)
