"""Confines a process, then runs one of our modules in it.

Started as `python -m relax_events.confinement.launch CONFINEMENT MODULE`. The confinement begins
before the module is imported, so that it covers all threads of libraries.
"""

from __future__ import annotations

import runpy
import sys

from relax_events.confinement.profiles import Confinement

if __name__ == "__main__":
    Confinement.from_json(sys.argv.pop(1)).apply()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
