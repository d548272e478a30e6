"""`relax store`: who may do what in a run's object store."""

from __future__ import annotations

from pathlib import Path

from relax_events.cli.parameters import Output, Overrides


def store(
    config: Path | None = None,
    *overrides: Overrides,
    out: Path | None = None,
    output: Output = "table",
) -> None:
    """Show the folders of the object store that each role reads, writes and deletes in; of a run,
    print the S3 policy of each role and person, or write a file for each.

    Example: relax store configs/quickstart.toml objects.uri=s3://runs --out policies

    Args:
        config: The run file, TOML, of the run whose policies are made.
        out: A folder for the policies' files, for example trainer.json.
        output: The rights as a table to read, or JSON for programs.
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_json, print_rows
    from relax_events.config import load_run_config
    from relax_events.errors import ConfigError
    from relax_events.objects.rights import STORE_RIGHTS
    from relax_events.ops.store_policies import build_store_policies, write_store_policies

    if config is None:
        if out is not None:
            raise ConfigError("--out is for a run's policies; give its run file")
        rights_by_role = {role: asdict(rights) for role, rights in STORE_RIGHTS.items()}
        rows = [
            [role, *(" ".join(folders) or "none" for folders in rights.values())]
            for role, rights in rights_by_role.items()
        ]
        print_rows(["role", "reads", "writes", "deletes"], rows, output, data=rights_by_role)
        return
    settings = load_run_config(config, overrides)
    if out is None:
        print_json(build_store_policies(settings))
        return
    for file in write_store_policies(settings, out):
        print(file)
