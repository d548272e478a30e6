"""Programs that attack the process of their tests, its messages and its files."""

from __future__ import annotations

TESTS = "assert f(1) == 2\nassert f(5) == 6\n"
RIGHT = "def f(x):\n    return x + 1\n"
"""Tests of a program that adds one, and such a program."""
FORGED_VERDICTS = {
    "another runpy": """
import runpy
runpy.run_path = lambda *a, **k: {}
""",
    "another json": """
import json
l = json.loads
def loads(*a, **k):
    d = l(*a, **k)
    return {**d, 'tests': ''} if isinstance(d, dict) else d
json.loads = loads
""",
    "leaving": """
import os
os._exit(0)
""",
    "leaving politely": """
import sys
sys.exit(0)
""",
    "leaving when asked": """
import os
def f(x): os._exit(0)
""",
    "leaving politely when asked": """
import sys
def f(x): sys.exit(0)
""",
    "a word on every descriptor": """
import os
for n in range(64):
    try: os.write(n, b'1')
    except OSError: pass
os._exit(0)
""",
    "a message that says nothing": """
import os
for n in range(1, 64):
    try: os.write(n, b'{}\\n')
    except OSError: pass
""",
    "a forged message": """
import os
for n in range(1, 64):
    try: os.write(n, b'{"defined": {"f": ["builtin", "bool"]}}\\n')
    except OSError: pass
""",
    "a forged message of exec": """
import os
for n in range(1, 64):
    try: os.write(n, b'{"defined": {"f": ["builtin", "exec"]}}\\n')
    except OSError: pass
""",
    "a forged call": """
import os
for n in range(1, 64):
    message = b'{"do": "get", "with": 0, "arguments": ["tuple", ["__init__"]], '
    message += b'"named": ["dict", []]}\\n'
    try: os.write(n, message)
    except OSError: pass
""",
    "another assertion error": """
import builtins
builtins.AssertionError = type('A', (Exception,), {})
def f(x): return 0
""",
    "raising what passes": """
def f(x): raise StopIteration
""",
    "raising system exit": """
def f(x): raise SystemExit(0)
""",
    "a tracer": """
import sys
sys.settrace(lambda *a: None)
sys.setprofile(lambda *a: None)
def f(x): return 0
""",
    "an exit handler": """
import atexit, os
atexit.register(lambda: os._exit(0))
def f(x): return 0
""",
    "other tests": """
open('tests.py', 'w').write('')
import os
for p in ('../tests/tests.py', '../../tests/tests.py'):
    try: open(p, 'w').write('')
    except OSError: pass
def f(x): return 0
""",
    "ending the judge": """
import os, signal
for p in range(2, 2000):
    try: os.kill(p, signal.SIGTERM) if p not in (os.getpid(), os.getppid()) else None
    except OSError: pass
def f(x): return 0
""",
    "an argument that is what is due": """
def f(x):
    import gc
    return next((o for o in gc.get_objects() if isinstance(o, tuple) and 2 in o), 0) and 0
""",
}
