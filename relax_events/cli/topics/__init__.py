"""`relax topics`: the run's topics, groups and offsets, as planned and as they are."""

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
    "plan": "changes:plan",
    "apply": "changes:apply",
    "check": "inspection:check",
    "describe": "inspection:describe",
    "lag": "inspection:lag",
    "tail": "inspection:tail",
    "purge": "changes:purge",
    "reset": "changes:reset",
    "export": "transfer:export_run",
    "import": "transfer:import_run",
}
for name, module in MODULES.items():
    app.command(f"relax_events.cli.topics.{module}", name=name)
