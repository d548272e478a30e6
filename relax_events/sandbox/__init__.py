"""Runs untrusted programs in isolation that was tested on this machine, or refuses to run them.

`walls` finds the isolation that this machine offers, `box` runs a program in it and ends all
processes that the program started, and `inside` is the code that runs inside. A solution and its
tests are two programs in separate sandboxes; they exchange plain values over two pipes.
"""

from relax_events.sandbox.box import Limits, Sandbox, Verdict
from relax_events.sandbox.walls import Isolation, find_isolation, require_isolation

__all__ = ["Isolation", "Limits", "Sandbox", "Verdict", "find_isolation", "require_isolation"]
