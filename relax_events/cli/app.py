"""The tree of commands: a noun, and a verb where it has several questions (ADR 59).

Each command's own file is loaded when it is called.
"""

from __future__ import annotations

from cyclopts import App

from relax_events import __version__
from relax_events.cli.commands import COMMANDS, EXAMPLE, SUMMARY

app = App(
    name="relax",
    version=__version__,
    help=f"{SUMMARY}\n\n{EXAMPLE}",
    result_action="return_value",
    help_formatter="plain",
    help_format="plaintext",
)
for name, (target, _) in COMMANDS.items():
    app.command(target, name=name)
