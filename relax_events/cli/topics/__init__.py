"""`relax topics`: the run's topics, groups and offsets, as planned and as they are."""

from __future__ import annotations

from cyclopts import App

app = App(
    name="topics",
    help=(
        "Show, check, apply, move and delete a run's topics.\n\nExample: relax topics "
        "show configs/quickstart.toml"
    ),
)
MODULES = {
    "show": "inspection:show",
    "apply": "changes:apply",
    "tail": "inspection:tail",
    "purge": "changes:purge",
    "reset": "changes:reset",
    "export": "transfer:export_run",
    "import": "transfer:import_run",
}
for name, module in MODULES.items():
    app.command(f"relax_events.cli.topics.{module}", name=name)
