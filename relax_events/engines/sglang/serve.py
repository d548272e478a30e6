"""Runs an SGLang server for as long as the one who started it lives. Started by `process` alone, by its path, in an interpreter that has SGLang.

    serve.py FOLDER ARGUMENTS...

Its stdin is a pipe that nobody writes to: when it ends, the parent has closed it or died, and the server ends at once with all its
processes and leaves no FOLDER behind. ARGUMENTS are SGLang's; those that a CPU needs are added where there is no accelerator.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import threading
from importlib.metadata import PackageNotFoundError, entry_points, version

CPU_ARGUMENTS = ("--device", "cpu", "--mem-fraction-static", "0.2", "--mm-attention-backend", "sdpa", "--sleep-on-idle")
"""An idle scheduler that polls takes the cores from whoever works: two engines on the same cores fell to 2 tokens/s without the last."""


def main(folder: str, arguments: list[str]) -> None:
    """Become the server."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        version("sglang")
    except PackageNotFoundError:
        sys.exit(f"{sys.executable} has no sglang; install relax-events[sglang] there, or name an interpreter that has it in engine.sglang.python")
    import torch

    if not torch.accelerator.is_available():
        if not entry_points(group="sglang.srt.platforms", name="relax_cpu"):
            sys.exit(f"{sys.executable} has no relax-events, whose plugin SGLang needs on a CPU; install it there with pip install --no-deps")
        arguments = [*CPU_ARGUMENTS, *arguments]
    sys.argv = ["sglang", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _end_with_parent(folder: str) -> None:
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
