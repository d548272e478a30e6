"""`relax ledger`: what the log proves about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyclopts import App

app = App(name="ledger", help="Prove from the log that nothing was lost or trained twice.\n\nExample: relax ledger check configs/quickstart.toml")


@app.command
def check(config: Path, *overrides: str, output: Literal["table", "json"] = "table") -> int:
    """Read the whole log and check every promise; exit code 6 when one is broken.

    Example: relax ledger check configs/quickstart.toml

    Args:
        config: The run file, TOML.
        overrides: section.key=value, laid over the run file.
        output: A table to read, or JSON for programs.
    """
    from relax_events.cli.output import print_json, print_pairs
    from relax_events.config import load_run_config
    from relax_events.control.address import attach, open_admin
    from relax_events.control.ledger import read_ledger

    settings = attach(load_run_config(config, overrides))
    open_admin(settings, name="ledger")
    ledger = read_ledger(settings)
    figures, problems, unproven = ledger.figures(), ledger.problems(), ledger.unproven()
    if output == "json":
        print_json({**figures, "problems": problems, "unproven": unproven})
    else:
        print_pairs(figures)
        for claim in unproven:
            print(f"NO PROOF  {claim}")
        print("\n".join(f"BROKEN  {problem}" for problem in problems) or "all promises hold")
    return 6 if problems else 0
