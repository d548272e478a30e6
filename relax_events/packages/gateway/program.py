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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from relax_events.api.errors import EpisodeFailed, EpisodeLate, RelaxError
from relax_events.api.events import format_json
from relax_events.confinement.variables import build_child_environment
from relax_events.packages.gateway.chat_session import ChatSession
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
        episode_seconds: From then to its end, without the time in which it waits for the policy.
        idle_seconds: Between two of its calls; 0 for none.
        gone_seconds: From a call during which it closed its connection to its next call; 0 for
            none.
        memory_bytes: Address space of each of its processes.
    """

    start_seconds: float
    episode_seconds: float
    idle_seconds: float
    gone_seconds: float
    memory_bytes: int


async def run_program(
    command: Sequence[str],
    *,
    task: Mapping[str, Any],
    variables: Mapping[str, str],
    limits: ProgramLimits,
    session: ChatSession,
) -> None:
    """Run a program until it ends by itself; nothing of it is left after the call.

    Args:
        command: Program and arguments.
        task: Written as JSON to the file that `RELAX_TASK_FILE` names.
        variables: Environment variables of the program, in addition to the harmless variables of
            this process.
        limits: Deadlines and memory.
        session: Of its calls. If they met a bound of the sample, any exit code is an end.
    Raises:
        EpisodeFailed: It can't be started, fails, or is late before a turn of the policy; the text
            has the end of its output.
        EpisodeLate: It is late after a turn of the policy.
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
            await wait_for_end(ended, limits, session, who="it")
        finally:
            ended.cancel()
            await _end(process)
        if process.returncode and session.limit is None:
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
    ended: asyncio.Future[Any], limits: ProgramLimits, session: ChatSession, *, who: str
) -> None:
    """Wait for the end of a program.

    Args:
        ended: Done when the program has ended.
        limits: Its deadlines, which begin now.
        session: Of its calls.
        who: The program, for errors.
    Raises:
        EpisodeFailed: It is late or silent, and the policy had no turn; or its connection closed.
        EpisodeLate: It is late or silent after a turn of the policy.
    """
    if not await _wait(ended, session.first_call, seconds=limits.start_seconds):
        raise EpisodeFailed(
            f"{who} did not call the model within {limits.start_seconds:g} s "
            "(environment.start_seconds)"
        )
    clock = session.clock
    end = clock.seconds + limits.episode_seconds
    while not ended.done():
        if clock.runs.is_set():
            left, error = _find_deadline(limits, session, end=end, who=who)
            if left <= 0:
                raise error
            await _wait(ended, clock.stops, seconds=left)
        else:
            await _wait(ended, clock.runs)


def _find_deadline(
    limits: ProgramLimits, session: ChatSession, *, end: float, who: str
) -> tuple[float, RelaxError]:
    """Return the seconds that a program may be without a call from now on, and the error then.

    Args:
        limits: Its deadlines.
        session: Of its calls, none of which waits.
        end: Of its own time, in seconds.
        who: The program.
    """
    clock = session.clock
    late = EpisodeLate if session.graph.nodes else EpisodeFailed
    idle, gone = limits.idle_seconds, limits.gone_seconds
    text = f"{who} took longer than {limits.episode_seconds:g} s (environment.episode_seconds)"
    deadlines: list[tuple[float, RelaxError]] = [(end - clock.seconds, late(text))]
    if idle:
        text = f"{who} made no call for {idle:g} s (environment.idle_seconds)"
        deadlines.append((idle - clock.idle_seconds, late(text)))
    if gone and clock.is_cut_off:
        text = f"{who} closed its connection during a call, and did not call again for {gone:g} s"
        deadlines.append((gone - clock.idle_seconds, EpisodeFailed(text)))
    return min(deadlines, key=itemgetter(0))


async def _wait(
    ended: asyncio.Future[Any], event: asyncio.Event, *, seconds: float | None = None
) -> bool:
    """Wait for the end of a program, or an event; return whether one came within a time."""
    came = asyncio.ensure_future(event.wait())
    try:
        one_of = asyncio.FIRST_COMPLETED
        return bool((await asyncio.wait([ended, came], timeout=seconds, return_when=one_of))[0])
    finally:
        came.cancel()
        await asyncio.gather(came, return_exceptions=True)


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
