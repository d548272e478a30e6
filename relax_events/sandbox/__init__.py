"""Runs programs that nobody has looked at: behind walls that are tried before they are trusted, or
not at all.

`walls` finds out what this machine offers, `box` runs a program behind it and ends all that the
program has started, `inside` is what runs in there. A solution and its tests are two programs in
two boxes; they exchange plain values by two pipes.
"""

from relax_events.sandbox.box import Limits, Sandbox, Verdict
from relax_events.sandbox.walls import Isolation, find_isolation, require_isolation

__all__ = ["Limits", "Sandbox", "Verdict", "Isolation", "find_isolation", "require_isolation"]
