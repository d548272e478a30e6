"""`relax run`, `relax worker` and `relax gateway`: what a person and a container start with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from relax_events.cli.parameters import Overrides, RunFile
from relax_events.plugins import ROLES, find_plugin


def load_role(name: str) -> Callable[..., None]:
    """Return the function that runs a role.

    Raises:
        ConfigError: No role of that name is installed; the text lists those that are.
    """
    start: Callable[..., None] = find_plugin(ROLES, name, what=f"role {name!r}").load()
    return start


def run(
    config: RunFile, *overrides: Overrides, hosts: str = "", accept_changes: bool = False
) -> None:
    """Run everything on this machine, or on several, show progress, and end by itself: exit code 0
    means that the goal was reached.

    Example: relax run configs/quickstart.toml run.seed=1

    Args:
        hosts: Addresses of all machines, this one first, such as a,b: sets hosts.addresses, and
            starts each one's share of the workers by hosts.command, which is ssh.
        accept_changes: Resume also with changes of the run file that change what is trained from
            here on.
    """
    import json
    import sys

    from relax_events.cli.output import agreed
    from relax_events.config import load_run_config
    from relax_events.launcher.hub_download import find_commit
    from relax_events.launcher.preparation import prepare_run
    from relax_events.launcher.run import RunSession
    from relax_events.reports.report_files import build_export_command
    from relax_events.reports.run_report import format_closing_line
    from relax_events.runtime.private_files import keep_private
    from relax_events.session.defaults import keep_commits, read_resolved
    from relax_events.session.resume import ChangesNotAccepted

    if hosts:
        overrides = (*overrides, f"hosts.addresses={json.dumps(hosts.split(','))}")
    settings = load_run_config(config, overrides, find_commit=find_commit)
    settings = keep_commits(settings, read_resolved(settings))
    keep_private(settings)
    prepare_run(settings)
    try:
        report = RunSession(settings, accepts_changes=accept_changes).run()
    except ChangesNotAccepted as refused:
        if not sys.stdin.isatty():
            raise
        print(refused, file=sys.stderr)
        if not agreed("continue with these changes?", yes=False):
            raise
        report = RunSession(settings, accepts_changes=True).run()
    if report is not None:
        print(format_closing_line(report, settings.run_directory))
    print(f"export the model: {build_export_command(settings)}")


def worker(
    role: str, config: RunFile, *overrides: Overrides, index: int | Literal["host"] = 0
) -> None:
    """Run one worker of a role: what a container, a unit file or a shell starts.

    Example: relax worker rollout configs/quickstart.toml --index 1

    Args:
        role: prompter, rollout, reward, judge, reference, actor-forward, critic, teacher,
            advantage, trainer, evaluator, controller or metrics; or several joined by +, which
            then share a process.
        index: Tells workers of one role apart; `host` takes one from the machine's name, for
            replicas that are started alike.
    """
    from relax_events.config import load_run_config
    from relax_events.runtime.hosting import SEPARATOR, host_workers
    from relax_events.runtime.parent_watch import (
        drain_when_supervisor_exits,
        worker_index_from_hostname,
    )
    from relax_events.runtime.private_files import keep_private
    from relax_events.session.broker_address import attach, open_admin
    from relax_events.session.resume import resolve_worker_config

    settings = load_run_config(config, overrides)
    starts = {name: load_role(name) for name in role.split(SEPARATOR)}
    number = worker_index_from_hostname() if index == "host" else index
    first = next(iter(starts))
    keep_private(settings)
    with attach(settings, by=f"relax worker {role}", principal=first, brings_up=False) as settings:
        drain_when_supervisor_exits(
            drain_seconds=settings.workers.drain_seconds
        )  # only now: the last one that uses a broker stops it
        open_admin(
            settings,
            name=f"{role}-{number}",
            timeout_seconds=settings.broker.request_timeout_seconds,
        )  # it may still be starting
        whole = resolve_worker_config(settings, first)
        if len(starts) == 1:
            starts[first](whole, index=number)
        else:
            host_workers(starts, whole, index=number)


def gateway(config: Path, *overrides: Overrides, index: int | Literal["host"] = 0) -> None:
    """Serve sessions on a run to harnesses that people start, until Ctrl-C: a rollout worker whose
    prompts harnesses take.

    Example: relax gateway run.toml --index 1

    Args:
        config: The run file, TOML; `environment.harness` says where to listen.
        index: Tells it apart from the run's other rollout workers, and is added to the port; `host`
            takes one from the machine's name, for replicas that are started alike.
    """
    from relax_events.config import load_run_config
    from relax_events.errors import ConfigError

    harness = load_run_config(config, overrides).environment.harness
    if not harness.is_served:
        raise ConfigError(
            f"{config} serves no harness; set environment.harness.port and "
            "environment.harness.token_file"
        )
    worker("rollout", config, *overrides, index=index)
