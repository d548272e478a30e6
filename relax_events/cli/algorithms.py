"""`relax algorithms`: what a run can be trained by, with formula, source and settings."""

from __future__ import annotations

from relax_events.cli.parameters import Output


def algorithms(name: str = "", *, output: Output = "table") -> None:
    """List the installed algorithms; with a name, show its formula, source and settings.

    Example: relax algorithms gspo

    Args:
        name: As in `algorithm.name`: installed, or path/to/file.py:NAME.
    """
    from relax_events.algorithms.description import describe_algorithm, installed_algorithms
    from relax_events.cli.output import print_fields, print_rows

    if not name:
        specs = installed_algorithms()
        data = [
            {"name": spec.name, "summary": spec.summary, "source": spec.source} for spec in specs
        ]
        rows = [[spec.name, spec.summary] for spec in specs]
        print_rows(["name", "what it is"], rows, output, data=data)
        return
    description = describe_algorithm(name)
    fields = {part: value for part, value in description.items() if part != "formula"}
    print_fields(fields, output, data=description)
    if output == "table":
        print(f"formula\n{description['formula']}")
