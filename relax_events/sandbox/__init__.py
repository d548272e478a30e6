"""Runs untrusted programs in isolation that was tested on this machine, or refuses to run them.

`isolation` finds the isolation that this machine offers. `sandbox` runs a program in it and ends
all processes that the program started. `inside` is the code that runs inside. A solution and its
tests are two programs in separate sandboxes; they exchange plain values over two pipes.
"""

from relax_events.sandbox.isolation import Isolation, find_isolation, require_isolation
from relax_events.sandbox.sandbox import Limits, Sandbox, Verdict

__all__ = ["Isolation", "Limits", "Sandbox", "Verdict", "find_isolation", "require_isolation"]
