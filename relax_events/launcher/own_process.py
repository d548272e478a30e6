"""Starts processes: a module of ours that lives on by itself, and a command that we talk with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Process = subprocess.Popen[bytes]


def start_module(
    module: str,
    arguments: Sequence[str],
    *,
    output: Path,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> Process:
    """Start a module as `python -m` does, in a session of its own: a signal to this process's
    group, such as Ctrl-C on its terminal, does not reach it.

    Args:
        module: Its name.
        arguments: Its command-line arguments.
        output: The file that stdout and stderr are appended to.
        environment: Its whole environment; this process's by default.
        descriptors: Open files that it inherits.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=environment,
            pass_fds=descriptors,
        )


def start_command(command: Sequence[str]) -> Process:
    """Start a command whose stdin and stdout, with stderr, are pipes of this process, in a session
    of its own.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
