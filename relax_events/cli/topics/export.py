"""`relax topics export`."""

from __future__ import annotations

import sys
from pathlib import Path

from relax_events.cli.output import print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.cli.topics.run_topics import open_run


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
