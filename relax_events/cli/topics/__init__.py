"""`relax topics`: the run's topics, groups and offsets, as planned and as they are. One file a
subcommand.
"""

from __future__ import annotations

from cyclopts import App

app = App(
    name="topics",
    help=(
        "Plan, apply, check, inspect, move and delete a run's topics.\n\nExample: relax topics "
        "plan configs/quickstart.toml"
    ),
)
MODULES = {
    "plan": "plan:plan",
    "apply": "plan:apply",
    "check": "check:check",
    "describe": "describe:describe",
    "lag": "lag:lag",
    "tail": "tail:tail",
    "purge": "purge:purge",
    "reset": "reset:reset",
    "export": "export:export_run",
    "import": "import_:import_run",
}
for name, module in MODULES.items():
    app.command(f"relax_events.cli.topics.{module}", name=name)
