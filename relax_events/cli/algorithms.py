"""`relax algorithms`: what a run can be trained by, with formula, source and settings."""

from __future__ import annotations

from cyclopts import App

from relax_events.cli.parameters import Output

app = App(
    name="algorithms",
    help=(
        "Show what a run can be trained by, with formula, source and settings.\n\nExample: relax "
        "algorithms list"
    ),
)


@app.command(name="list")
def list_(*, output: Output = "table") -> None:
    """List the algorithms that are installed.

    Example: relax algorithms list
    """
    from relax_events.algorithms.description import installed_algorithms
    from relax_events.cli.output import print_rows

    specs = installed_algorithms()
    data = [{"name": spec.name, "summary": spec.summary, "source": spec.source} for spec in specs]
    rows = [[spec.name, spec.summary] for spec in specs]
    print_rows(["name", "what it is"], rows, output, data=data)


@app.command
def show(name: str, *, output: Output = "table") -> None:
    """Print an algorithm's formula, source and settings.

    Example: relax algorithms show gspo

    Args:
        name: As in `algorithm.name`: installed, or path/to/file.py:NAME.
    """
    from relax_events.algorithms.description import describe_algorithm
    from relax_events.cli.output import print_fields, print_json

    described = describe_algorithm(name)
    if output == "json":
        print_json(described)
        return
    formula = described.pop("formula")
    print_fields(described)
    print(f"formula\n{formula}")
