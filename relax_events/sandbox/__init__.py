"""Runs untrusted programs in isolation that was tested on this machine, or refuses to run them.

`isolation` describes isolations, and `probing` finds the one that this machine offers. `runner`
runs programs in it and ends all processes that they started. `sandbox` runs a solution, with inputs
or with tests. `inside` is the code that runs inside. A solution and its tests are two programs in
separate sandboxes; they exchange plain values over two pipes.
"""

from relax_events.sandbox.isolation import Isolation
from relax_events.sandbox.probing import find_isolation, require_isolation
from relax_events.sandbox.runner import Limits, Verdict
from relax_events.sandbox.sandbox import Sandbox

__all__ = ["Isolation", "Limits", "Sandbox", "Verdict", "find_isolation", "require_isolation"]
