"""`relax run`, `relax worker`, `relax doctor`: what a person, a container and a cautious person start with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def run(config: Path, *overrides: str) -> None:
    """Run everything on this machine, show progress, and end by itself: exit code 0 means that the goal was reached.

    Example: relax run configs/quickstart.toml run.seed=1

    Args:
        config: The run file, TOML.
        overrides: section.key=value, laid over the run file.
    """
    from relax_events.config import load_run_config
    from relax_events.control.preparation import prepare_run
    from relax_events.control.run import RunSession

    settings = load_run_config(config, overrides)
    prepare_run(settings)
    report = RunSession(settings).run()
    name, curve = ("reward", "reward_mean") if settings.algorithm.has_rewards else ("loss", "loss")
    first, last = report["curves"][curve][0], report["curves"][curve][-1]
    page = settings.run_directory / "report.html"
    print(f"{name} {first:.3f} -> {last:.3f} in {report['steps']} steps, {report['wall_seconds']:.0f} s; report: {page}")


def worker(role: str, config: Path, *overrides: str, index: int | Literal["host"] = 0) -> None:
    """Run one worker of a role: what a container, a unit file or a shell starts.

    Example: relax worker rollout configs/quickstart.toml --index 1

    Args:
        role: prompter, rollout, reward, judge, reference, actor-forward, critic, teacher, advantage, trainer, evaluator, controller or metrics.
        config: The run file, TOML.
        overrides: section.key=value, laid over the run file.
        index: Tells workers of one role apart; `host` takes one from the machine's name, for replicas that are started alike.
    """
    from relax_events.cli.roles import load_role
    from relax_events.config import load_run_config
    from relax_events.control.address import attach, open_admin
    from relax_events.control.orphans import end_with_supervisor
    from relax_events.control.replicas import index_of_host

    settings = load_run_config(config, overrides)
    start, number = load_role(role), index_of_host() if index == "host" else index
    end_with_supervisor(drain_seconds=settings.workers.drain_seconds)
    settings = attach(settings, principal=role)
    open_admin(settings, name=f"{role}-{number}", timeout_seconds=settings.broker.request_timeout_seconds)  # it may still be starting
    start(settings, index=number)


def doctor(config: Path, *overrides: str) -> int:
    """Check all that a run needs without starting it; exit code 6 when something is missing.

    Example: relax doctor configs/quickstart.toml

    Args:
        config: The run file, TOML.
        overrides: section.key=value, laid over the run file.
    """
    from relax_events.config import load_run_config
    from relax_events.control.doctor import examine

    findings = examine(load_run_config(config, overrides))
    for finding in findings:
        print(f"{'ok ' if finding.is_good else 'NO '} {finding.what}: {finding.text}")
    return 0 if all(finding.is_good for finding in findings) else 6
