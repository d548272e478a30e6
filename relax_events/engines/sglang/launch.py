"""Runs an SGLang server for as long as the one who started it lives. Started by `process` alone, by
its path, in an interpreter that has SGLang.

    serve.py FOLDER TEMPORARY ARGUMENTS...

Its stdin is a pipe that nobody writes to: when it ends, the parent has closed it or died, and the
server ends at once with all its processes and leaves behind neither FOLDER nor TEMPORARY, where its
temporary files are, nor shared memory. ARGUMENTS are SGLang's; those that a CPU needs are added
where there is no accelerator.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from getpass import getuser
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

CPU_ARGUMENTS = (
    "--device",
    "cpu",
    "--mem-fraction-static",
    "0.2",
    "--mm-attention-backend",
    "sdpa",
    "--sleep-on-idle",
)
"""An idle scheduler that polls takes the cores from whoever works: two engines on the same cores
fell to 2 tokens/s without the last."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 where the kernel keeps it
SHARED_PREFIX = "sglang_"
"""Of shared memory that SGLang makes without multiprocessing: it stays when a server is killed."""
TRACKER = b"multiprocessing.resource_tracker"
"""In the command line of the process that deletes what multiprocessing shares, once the processes
that share it have ended."""
END_SECONDS = 10.0
PAUSE_SECONDS = 0.02


def main(folder: str, temporary: str, arguments: list[str]) -> None:
    """Become the server."""
    threading.Thread(target=_end_with_parent, args=(folder, temporary), daemon=True).start()
    # the usual folder: what is compiled once serves the next server too
    kept = f"{tempfile.gettempdir()}/torchinductor_{getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kept)
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    try:
        version("sglang")
    except PackageNotFoundError:
        sys.exit(
            f"{sys.executable} has no sglang; install relax-events[sglang] there, or name an "
            "interpreter that has it in engine.sglang.python"
        )
    import torch

    if not torch.accelerator.is_available():
        if not entry_points(group="sglang.srt.platforms", name="relax_cpu"):
            sys.exit(
                f"{sys.executable} has no relax-events, whose plugin SGLang needs on a CPU; "
                "install it there with pip install --no-deps"
            )
        arguments = [*CPU_ARGUMENTS, *arguments]
    sys.argv = ["sglang", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def shared_memory_of(process_group: int) -> set[Path]:
    """Return the files of shared memory that SGLang has made and that processes of a group have
    mapped.
    """
    lines = (
        line
        for process in _members(process_group)
        for line in _read(process / "maps").decode(errors="replace").splitlines()
    )
    mapped = {
        Path(line.split(maxsplit=5)[5].removesuffix(" (deleted)"))
        for line in lines
        if f" {SHARED_MEMORY}/{SHARED_PREFIX}" in line
    }
    return {path for path in mapped if path.parent == SHARED_MEMORY}


def end_processes(process_group: int) -> None:
    """Kill the processes of a group but this one, and wait for those that delete what
    multiprocessing shares as far as they can end by now.
    """
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        others = [
            process for process in _members(process_group) if int(process.name) != os.getpid()
        ]
        doomed = [process for process in others if TRACKER not in _read(process / "cmdline")]
        for process in others:
            with contextlib.suppress(
                ProcessLookupError
            ):  # a tracker may have been stopped with the rest
                os.kill(int(process.name), signal.SIGKILL if process in doomed else signal.SIGCONT)
        if not doomed and (
            not others or process_group == os.getpgrp()
        ):  # a tracker of ours ends behind us
            break
        time.sleep(PAUSE_SECONDS)


def _members(process_group: int) -> list[Path]:
    """Return the processes of a group that have not ended, as folders of /proc."""
    members = []
    for process in Path("/proc").glob("[0-9]*"):
        state, _, found = _read(process / "stat").rpartition(b")")[2].split()[:3] or (
            b"X",
            b"",
            b"0",
        )
        if int(found) == process_group and state not in (b"X", b"Z"):
            members.append(process)
    return members


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # its process has ended, or belongs to another user
        return b""


def _end_with_parent(folder: str, temporary: str) -> None:
    os.read(0, 1)
    shared = shared_memory_of(os.getpgrp())
    end_processes(os.getpgrp())
    for path in shared:
        path.unlink(missing_ok=True)
    for left in (folder, temporary):
        shutil.rmtree(left, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
