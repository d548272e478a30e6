"""`relax store`: who may do what in a run's object store."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from relax_events.cli.parameters import Output, Overrides, RunFile

app = App(
    name="store",
    help=(
        "Show what each role may do in the object store, and make its policies.\n\n"
        "Example: relax store rights"
    ),
)


@app.command
def rights(*, output: Output = "table") -> None:
    """Show the folders of the object store that each role reads, writes and deletes in.

    Example: relax store rights --output json
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_rows
    from relax_events.objects.rights import STORE_RIGHTS

    rights_by_role = {role: asdict(rights) for role, rights in STORE_RIGHTS.items()}
    rows = [
        [role, *(" ".join(folders) or "none" for folders in rights.values())]
        for role, rights in rights_by_role.items()
    ]
    print_rows(["role", "reads", "writes", "deletes"], rows, output, data=rights_by_role)


@app.command
def policies(config: RunFile, *overrides: Overrides, out: Path | None = None) -> None:
    """Print the S3 policy of each role and person of a run, or write a file for each.

    Example: relax store policies configs/quickstart.toml objects.uri=s3://runs --out policies

    Args:
        out: A folder for the files, for example trainer.json.
    """
    from relax_events.cli.output import print_json
    from relax_events.config import load_run_config
    from relax_events.ops.store_policies import build_store_policies, write_store_policies

    settings = load_run_config(config, overrides)
    if out is None:
        print_json(build_store_policies(settings))
        return
    for file in write_store_policies(settings, out):
        print(file)
