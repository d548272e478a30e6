"""`relax broker secure`: access control of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from relax_events.cli.output import agreed
from relax_events.cli.parameters import Overrides, RunFile, Yes
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.kafka.connection import Connection
    from relax_events.kafka.security.principals import SecurityChanges

DEFAULT_FOLDER = Path(".relax/security")


def secure(
    config: RunFile,
    *overrides: Overrides,
    out: Path | None = None,
    hosts: list[str] | None = None,
    days: int = 365,
    renew_certificates: bool = False,
    renew_passwords: bool = False,
    apply: bool = False,
    withdraw: bool = False,
    dry_run: bool = False,
    yes: Yes = False,
) -> int:
    """Make all that secures a run: certificates, a password for every role and person, and the
    least rights that each needs.

    Example: relax broker secure configs/quickstart.toml --out .relax/security

    Args:
        out: The folder, one for a cluster; broker.credentials or .relax/security when not given.
            What is there stays.
        hosts: Names of brokers that need a certificate, as clients use them; this machine always
            gets one.
        days: How long brokers' certificates hold.
        renew_certificates: Renew the brokers' certificates.
        renew_passwords: Renew the run's passwords.
        apply: Bring the run's users and rights onto the cluster, as the folder's super user or as
            broker.username.
        withdraw: Take them off the cluster and out of the folder instead, when the run is deleted.
        dry_run: Show what would change on the cluster and change nothing there.
    """
    from datetime import timedelta

    from relax_events.config import load_run_config
    from relax_events.errors import ConfigError
    from relax_events.ops.security import Renewal, create_folder

    settings = load_run_config(config, overrides)
    folder = (out or settings.broker.credentials or DEFAULT_FOLDER).absolute()
    overrides = (*overrides, f"broker.credentials={folder}")
    if withdraw:
        if apply or renew_certificates or renew_passwords or hosts:
            raise ConfigError(
                "--withdraw takes what is there away; give it without --apply, --hosts, "
                "--renew-certificates and --renew-passwords"
            )
        return _withdraw(config, overrides, dry_run=dry_run, yes=yes)
    renewal = Renewal(certificates=renew_certificates, passwords=renew_passwords)
    if not dry_run:
        for file in create_folder(
            settings, folder, hosts=hosts or (), lifetime=timedelta(days=days), renewal=renewal
        ):
            print(file)
    if apply:
        return _apply(config, overrides, dry_run=dry_run, yes=yes)
    advice = "set broker.credentials to it, and bring it onto a cluster with --apply"
    print(f"made in {folder}; {advice}", file=sys.stderr)
    return 0


def _apply(config: Path, overrides: tuple[str, ...], *, dry_run: bool, yes: bool) -> int:
    """Show which users and rights the cluster lacks, ask, and bring them onto it."""
    from relax_events.ops.security import apply_security, plan_security

    with _reach(config, overrides) as (settings, connection):
        _show(plan_security(settings, connection))
        if dry_run:
            return 0
        if not agreed("apply these changes?", yes=yes):
            return CheckFailed.exit_code
        apply_security(settings, connection)
        return 0


def _withdraw(config: Path, overrides: tuple[str, ...], *, dry_run: bool, yes: bool) -> int:
    """Show what the cluster has of the run, ask, and take it off the cluster and out of the
    folder.
    """
    from relax_events.ops.security import plan_removal, remove_security

    with _reach(config, overrides) as (settings, connection):
        _show(plan_removal(settings.run, connection))
        if dry_run:
            return 0
        if not agreed(f"take these, and the secrets of run {settings.run.id}, away?", yes=yes):
            return CheckFailed.exit_code
        for file in remove_security(settings, connection):
            print(f"deleted {file}", file=sys.stderr)
        return 0


@contextmanager
def _reach(config: Path, overrides: tuple[str, ...]) -> Iterator[tuple[RunConfig, Connection]]:
    """Give the run's settings and the connection of a user that may change users, once a broker has
    answered it.
    """
    from relax_events.config import load_run_config
    from relax_events.kafka.admin import Admin
    from relax_events.ops.security import admin_connection
    from relax_events.session.broker_address import ANSWER_SECONDS, locate_broker

    with locate_broker(load_run_config(config, overrides), by="relax broker secure") as settings:
        connection = admin_connection(settings)
        Admin(connection).ping(
            timeout_seconds=min(ANSWER_SECONDS, settings.broker.request_timeout_seconds)
        )
        yield settings, connection


def _show(changes: SecurityChanges) -> None:
    from relax_events.cli.output import print_rows

    rows = [["set", user, "password of the folder", ""] for user in changes.users]
    rows += [["delete", user, "not wanted", ""] for user in changes.unexpected_users]
    for change, acls in (("allow", changes.missing), ("withdraw", changes.surplus)):
        rows += [
            [
                change,
                acl.username,
                acl.operation,
                f"{acl.resource} {acl.name}{'*' if acl.pattern == 'prefixed' else ''}",
            ]
            for acl in acls
        ]
    print_rows(["change", "user", "what", "on"], rows)
