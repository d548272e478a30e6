"""`relax topics`: the run's topics as planned and as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App

if TYPE_CHECKING:
    from relax_events.broker.admin import Admin
    from relax_events.config import RunConfig

app = App(name="topics", help="Plan, apply and look at a run's topics.\n\nExample: relax topics plan configs/quickstart.toml")
Output = Literal["table", "json"]


def _open(config: Path, overrides: tuple[str, ...]) -> tuple[RunConfig, Admin]:
    from relax_events.config import load_run_config
    from relax_events.control.address import attach, open_admin

    settings = attach(load_run_config(config, overrides))
    return settings, open_admin(settings, name="topics")


@app.command
def plan(config: Path, *overrides: str, output: Output = "table") -> int:
    """Show what `apply` would change; exit code 6 when something would.

    Example: relax topics plan configs/quickstart.toml

    Args:
        config: The run file, TOML.
        overrides: section.key=value, laid over the run file.
        output: A table to read, or JSON for programs.
    """
    from relax_events.control.topics import plan_changes
    from relax_events.topics import TopicPlan

    settings, admin = _open(config, overrides)
    topics = TopicPlan.of(settings)
    changes = plan_changes(topics.specs(), admin.topics(topics.topic("")))
    _show(["change", "topic", "detail"], [[change.kind, change.topic, change.detail] for change in changes], output)
    return 6 if changes else 0


@app.command
def apply(config: Path, *overrides: str, dry_run: bool = False, yes: bool = False, output: Output = "table") -> int:
    """Create and alter the run's topics; what would misplace records is refused.

    Example: relax topics apply configs/quickstart.toml --dry-run

    Args:
        config: The run file, TOML.
        overrides: section.key=value, laid over the run file.
        dry_run: Show the changes and make none.
        yes: Don't ask.
        output: A table to read, or JSON for programs.
    """
    from relax_events.control.topics import apply_topics

    code = plan(config, *overrides, output=output)
    if dry_run or code == 0:
        return 0
    if not yes and input("apply these changes? [y/N] ").strip().lower() not in ("y", "yes"):
        return 6
    apply_topics(*_open(config, overrides))
    return 0


@app.command
def describe(config: Path, *overrides: str, output: Output = "table") -> None:
    """Show the run's topics: partitions, records, what they are for.

    Example: relax topics describe configs/quickstart.toml

    Args:
        config: The run file, TOML.
        overrides: section.key=value, laid over the run file.
        output: A table to read, or JSON for programs.
    """
    from relax_events.topics import TopicPlan

    settings, admin = _open(config, overrides)
    topics = TopicPlan.of(settings)
    docs = {spec.name: spec.doc for spec in topics.specs()}
    found = admin.topics(topics.topic(""))
    ends = admin.end_offsets([(state.name, partition) for state in found.values() for partition in range(state.num_partitions)])
    rows = [
        [name, state.num_partitions, sum(end for (topic, _), end in ends.items() if topic == name), docs.get(name, "not in the plan")]
        for name, state in sorted(found.items())
    ]
    _show(["topic", "partitions", "records", "what"], rows, output)


@app.command
def lag(config: Path, *overrides: str, output: Output = "table") -> None:
    """Show records behind by role and slot: the older the version of a slot that lags, the staler the work.

    Example: relax topics lag configs/quickstart.toml --output json

    Args:
        config: The run file, TOML.
        overrides: section.key=value, laid over the run file.
        output: A table to read, or JSON for programs.
    """
    from relax_events.control.topics import consumer_lag
    from relax_events.topics import TopicPlan

    settings, admin = _open(config, overrides)
    num_slots = TopicPlan.of(settings).num_slots
    rows = [
        [role, *(slots.get(slot, 0) for slot in range(num_slots)), sum(slots.values())] for role, slots in consumer_lag(settings, admin).items()
    ]
    _show(["role", *(f"slot {slot}" for slot in range(num_slots)), "all"], rows, output)


def _show(columns: list[str], rows: list[list[object]], output: Output) -> None:
    from relax_events.cli.output import print_json, print_table

    if output == "json":
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)
