"""`relax doctor`: checks a run, and attacks this machine's walls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_events.cli.parameters import Output, Overrides
from relax_events.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from relax_events.attacks.attack_check import AttackResult


def doctor(
    config: Path | None = None,
    *overrides: Overrides,
    attack: bool = False,
    door: str = "",
    output: Output = "table",
) -> int:
    """Check all that a run needs without starting it; exit code 6 when something is missing.

    Example: relax doctor configs/quickstart.toml

    Args:
        config: The run file, TOML. With --attack it may be left out.
        attack: Attack every place where untrusted input enters, on this machine, by hostile
            completions, rows, files, replies, requests and records; some minutes, without a broker.
        door: With --attack, only what comes by one door: completion, row, reply, judge-reply,
            media, template, checkpoint, archive, http, record, store or settings.
        output: Lines to read, or JSON for programs.
    """
    if door and not attack:
        raise ConfigError("--door is for --attack; leave it out, or add --attack")
    if config is None and not attack:
        raise ConfigError("no run file is given to check; give one, or --attack for this machine")
    tree: dict[str, Any] = {}
    is_good = config is None or _check(config, overrides, tree, is_printed=output == "table")
    if attack:
        is_good &= _attack(door, tree, is_printed=output == "table")
    if output == "json":
        from relax_events.cli.output import print_json

        print_json(tree)
    return 0 if is_good else CheckFailed.exit_code


def _check(
    config: Path, overrides: tuple[str, ...], tree: dict[str, Any], *, is_printed: bool
) -> bool:
    """Run the checks of a run file, and print them or add them to the tree."""
    from relax_events.cli.output import print_findings, print_rows
    from relax_events.config import load_run_config
    from relax_events.launcher.checks import check_run

    findings, derived = check_run(load_run_config(config, overrides))
    tree["checks"] = [{"what": f.what, "good": f.is_good, "text": f.text} for f in findings]
    tree["derived"] = [{"key": d.key, "value": str(d.value), "why": d.reason} for d in derived]
    if is_printed:
        print_findings(findings)
    if derived and is_printed:
        print("\nthe run file leaves out, and the run takes:")
        print_rows(
            ["key", "value", "why"],
            [
                [one.key, one.value, f"WARNING: {one.reason}" if one.is_warning else one.reason]
                for one in derived
            ],
        )
    return all(finding.is_good for finding in findings)


def _attack(door: str, tree: dict[str, Any], *, is_printed: bool) -> bool:
    """Make the attacks, and print a line for each entry point or add them to the tree."""
    from relax_events.attacks.attack_check import (
        REMEDY,
        attack_this_machine,
        choose_assaults,
    )

    def show(result: AttackResult) -> None:
        if is_printed:
            print(f"{'FAIL' if result.broken else 'ok  '} {result.describe()}", flush=True)

    results, log = attack_this_machine(choose_assaults(door), on_result=show)
    tree["attacks"] = [result.to_tree() for result in results]
    if log is None:
        return True
    print(f"{REMEDY}; the attacked parts said what is in {log}", file=sys.stderr)
    return False
