"""Run a foreign program for one episode: its own folder and variables, limits, and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_events.api.errors import EpisodeFailed
from relax_events.api.events import format_json
from relax_events.confinement.variables import build_child_environment
from relax_events.packages.gateway.program_guard import FOLDER_PREFIX

GUARD = Path(__file__).with_name("program_guard.py")
TASK_FILE = "task.json"
MAX_OUTPUT_BYTES = 64 * 1024
"""Kept of what a program prints: its end."""
MAX_ERROR_CHARACTERS = 400
YOUNG_SECONDS = 60.0
"""A folder of this age may not be locked yet."""
END_SECONDS = 10.0
"""For a killed program to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """The limits of one episode's program.

    Attributes:
        start_seconds: From its start to its first call of the model.
        episode_seconds: From its start to its end.
        memory_bytes: Address space of each of its processes.
    """

    start_seconds: float
    episode_seconds: float
    memory_bytes: int


async def run_program(
    command: Sequence[str],
    *,
    task: Mapping[str, Any],
    variables: Mapping[str, str],
    limits: ProgramLimits,
    first_call: asyncio.Event,
    accepts_failure: Callable[[], bool],
) -> None:
    """Run a program until it ends by itself; nothing of it is left after the call.

    Args:
        command: Program and arguments.
        task: Written as JSON to the file that `RELAX_TASK_FILE` names.
        variables: Environment variables of the program, in addition to the harmless variables of
            this process.
        limits: Deadlines and memory.
        first_call: Set when the program calls the model.
        accepts_failure: Whether an exit code other than 0 counts as an end: the program met a bound
            of the sample.
    Raises:
        EpisodeFailed: It can't be started, is late, or fails; the text has the end of its output.
    """
    with locked_folder() as folder:
        name = str(folder)
        (folder / TASK_FILE).write_bytes(format_json(task).encode())
        environment = build_child_environment() | {
            "HOME": name,
            "TMPDIR": name,
            "RELAX_TASK_FILE": str(folder / TASK_FILE),
            **variables,
        }
        output = folder / "output.txt"
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(GUARD),
                str(limits.memory_bytes),
                name,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=file,
                stderr=file,
                cwd=name,
                env=environment,
                start_new_session=True,
            )
        ended = asyncio.ensure_future(process.wait())
        try:
            await wait_for_end(ended, limits, first_call, who="it")
        finally:
            ended.cancel()
            await _end(process)
        if process.returncode and not accepts_failure():
            raise EpisodeFailed(f"exited with {process.returncode}: {_tail(output)}")


@contextlib.contextmanager
def locked_folder() -> Iterator[Path]:
    """Make a folder for an episode, delete it afterwards, and hold a lock on it meanwhile."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as name:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield Path(name)
        finally:
            os.close(handle)


def delete_abandoned_folders() -> int:
    """Delete the folders of episodes whose worker was killed just before or after their program
    ran, when no guard was there to do it: no process has a lock on them. Return their number.
    """
    num_deleted = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or gone meanwhile
            facts = folder.lstat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < YOUNG_SECONDS:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                num_deleted += 1
            finally:
                os.close(handle)
    return num_deleted


async def wait_for_end(
    ended: asyncio.Future[Any], limits: ProgramLimits, first_call: asyncio.Event, *, who: str
) -> None:
    """Wait for the end of a program.

    Args:
        ended: Done when the program has ended.
        limits: Its deadlines, which begin now.
        first_call: Set when it calls the model.
        who: The program, for errors.
    Raises:
        EpisodeFailed: It is late.
    """
    called = asyncio.ensure_future(first_call.wait())
    try:
        done, _ = await asyncio.wait(
            [ended, called],
            timeout=limits.start_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done:
            raise EpisodeFailed(
                f"{who} did not call the model within {limits.start_seconds:g} s "
                "(environment.start_seconds)"
            )
        if not (await asyncio.wait([ended], timeout=limits.episode_seconds))[0]:
            raise EpisodeFailed(
                f"{who} took longer than {limits.episode_seconds:g} s (environment.episode_seconds)"
            )
    finally:
        called.cancel()
        await asyncio.gather(called, return_exceptions=True)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the guard's pipe, which ends the program, and wait for it."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _tail(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_OUTPUT_BYTES))
        text = file.read().decode(errors="replace").strip()
    return text[-MAX_ERROR_CHARACTERS:] or "it printed nothing"
