"""Run an SGLang server until its parent process ends. Started only by `process`, by path, in an
interpreter with SGLang.

    launch.py FOLDER TEMPORARY ARGUMENTS...

Its stdin is a pipe without data, which closes when the parent closes it or dies. Then the server
kills all its processes and deletes FOLDER, TEMPORARY (its temporary files) and its shared memory.
ARGUMENTS are SGLang's; without an accelerator, `CPU_ARGUMENTS` are added and `GPU_ARGUMENTS` are
left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
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
"""An idle scheduler that polls takes CPU time from other processes: without the last argument two
engines on the same cores fell to 2 tokens/s.
"""
GPU_ARGUMENTS = ("--enable-memory-saver", "--enable-weights-cpu-backup")
"""A server whose memory saver finds no CUDA driver does not start."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 the kernel's mount point
SHARED_PREFIX = "sglang_"
"""Prefix of shared memory that SGLang creates without multiprocessing; it is not deleted when a
server is killed.
"""
TRACKER = b"multiprocessing.resource_tracker"
"""Part of the command line of the process that deletes multiprocessing's shared memory after the
processes that share it have ended.
"""
END_SECONDS = 10.0
PAUSE_SECONDS = 0.02


def main(folder: str, temporary: str, arguments: list[str]) -> None:
    """Run the server in this process."""
    threading.Thread(target=_end_with_parent, args=(folder, temporary), daemon=True).start()
    # torch's default folder, so that the next server reuses the compiled code
    cache = f"{tempfile.gettempdir()}/torchinductor_{getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    try:
        version("sglang")
    except PackageNotFoundError:
        sys.exit(
            f"{sys.executable} has no sglang; install relax-events[sglang] there, or set "
            "engine.sglang.python to an interpreter that has it"
        )
    import torch

    if not torch.accelerator.is_available():
        if not entry_points(group="sglang.srt.platforms", name="relax_cpu"):
            sys.exit(
                f"{sys.executable} has no relax-events, whose plugin SGLang needs on a CPU; "
                "install it there with pip install --no-deps"
            )
        arguments = [*CPU_ARGUMENTS, *leave_out_gpus(arguments)]
    sys.argv = ["sglang", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def leave_out_gpus(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without `GPU_ARGUMENTS` and `--base-gpu-id` with its number."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--base-gpu-id")
    for name in GPU_ARGUMENTS:
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(arguments)[1]


def find_shared_memory(process_group: int) -> set[Path]:
    """Return the shared-memory files of SGLang that processes of a group have mapped."""
    lines = (
        line
        for process in _list_group_processes(process_group)
        for line in _read(process / "maps").decode(errors="replace").splitlines()
    )
    mapped = {
        Path(line.split(maxsplit=5)[5].removesuffix(" (deleted)"))
        for line in lines
        if f" {SHARED_MEMORY}/{SHARED_PREFIX}" in line
    }
    return {path for path in mapped if path.parent == SHARED_MEMORY}


def kill_processes(process_group: int) -> None:
    """Kill the other processes of a group, and wait for multiprocessing's resource trackers among
    them.
    """
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        others = [
            process
            for process in _list_group_processes(process_group)
            if int(process.name) != os.getpid()
        ]
        killed = [process for process in others if TRACKER not in _read(process / "cmdline")]
        for process in others:
            with contextlib.suppress(
                ProcessLookupError
            ):  # a tracker may have been stopped together with the others
                os.kill(int(process.name), signal.SIGKILL if process in killed else signal.SIGCONT)
        if not killed and (
            not others or process_group == os.getpgrp()
        ):  # our own tracker ends after this process
            break
        time.sleep(PAUSE_SECONDS)


def _list_group_processes(process_group: int) -> list[Path]:
    """Return the running processes of a group, as folders of /proc."""
    members = []
    for process in Path("/proc").glob("[0-9]*"):
        state, _, group = _read(process / "stat").rpartition(b")")[2].split()[:3] or (
            b"X",
            b"",
            b"0",
        )
        if int(group) == process_group and state not in (b"X", b"Z"):
            members.append(process)
    return members


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # its process has ended, or belongs to another user
        return b""


def _end_with_parent(folder: str, temporary: str) -> None:
    os.read(0, 1)
    shared = find_shared_memory(os.getpgrp())
    kill_processes(os.getpgrp())
    for file in shared:
        file.unlink(missing_ok=True)
    for path in (folder, temporary):
        shutil.rmtree(path, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
