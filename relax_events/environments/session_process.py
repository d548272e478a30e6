"""The worker's side of one child process with sessions; see `session_child`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import orjson

from relax_events.errors import ConfigError, EpisodeFailed, PoisonSample
from relax_events.runtime.subprocess_rpc import LENGTHS, build_child_environment

MODULE = "relax_events.environments.session_child"
START_SECONDS = 120.0
SILENT_SECONDS = 30.0
"""A child that ticks each second and is silent for so long hangs."""
EXIT_SECONDS = 1.0
MAX_LINE_BYTES = 64 * 1024**2


class SessionProcess:
    """A child process, started again when it is gone. Used in one event loop."""

    def __init__(self, setup: Mapping[str, Any], *, name: str) -> None:
        """Prepare the process; `start` starts it.

        Args:
            setup: The section `environment`, with `max_item_bytes`.
            name: Of the environment, for errors.
        """
        self._setup, self._name = setup, name
        self._process: asyncio.subprocess.Process | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._launching: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._was_started = False
        self._lost_sessions: set[int] = set()
        self._open_sessions: set[int] = set()
        self.takes_files = False
        self.num_sessions = 0

    async def start(self) -> None:
        """Start the process unless it runs, and wait until the environment is loaded.

        Raises:
            ConfigError: It can't be loaded.
            EpisodeFailed: It could be loaded before.
        """
        if self._process is not None:
            return
        if self._launching is None or self._launching.done():
            self._launching = asyncio.get_running_loop().create_task(self._launch())
        try:
            await asyncio.shield(self._launching)  # another session may wait for it
        except ConfigError as error:
            if self._was_started:
                raise EpisodeFailed(str(error)) from None
            raise
        self._was_started = True

    async def request(
        self, question: Mapping[str, Any], contents: Sequence[bytes] = (), *, where: str
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request of a session, and wait for the answer; the child keeps the deadlines.

        Raises:
            EpisodeFailed: The environment failed or is late, or its process is gone.
            PoisonSample: Its reply is invalid.
        """
        session = question["session"]
        if session in self._lost_sessions or self._process is None:
            raise EpisodeFailed(f"{where}: its process is gone, and with it the session")
        if question["op"] == "open":
            self._open_sessions.add(session)
        elif question["op"] == "close":
            self._open_sessions.discard(session)
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            # who reads the answers notices too that the process is gone, and says how it ended:
            # before that, the next attempt would meet the same process
            with contextlib.suppress(ConnectionError):
                await self._send({**question, "number": number}, contents)
            response, content = await answer
        except _ProcessGone as error:
            raise EpisodeFailed(f"{where}: its process ended ({error})") from None
        finally:
            self._waiting.pop(number, None)
        if "failed" in response:
            raise EpisodeFailed(f"{where}: {response['failed']}")
        if "invalid" in response:
            raise PoisonSample(f"{where}: {response['invalid']}")
        return response, content

    def forget(self, session: int) -> bool:
        """Return whether a session was lost with its process; it is then forgotten."""
        was_lost = session in self._lost_sessions
        self._lost_sessions.discard(session)
        return was_lost

    async def stop(self) -> None:
        """Let the child close its sessions, then kill it."""
        if self._launching is not None and not self._launching.done():
            await asyncio.gather(self._launching, return_exceptions=True)
        if (process := self._process) is not None:
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.wait(self._readers, timeout=float(self._setup["finish_seconds"]) + 1.0)
            kill(process)
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _launch(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=build_child_environment(),
            limit=MAX_LINE_BYTES,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(orjson.dumps(self._setup) + b"\n")
            await process.stdin.drain()
            response, _ = await asyncio.wait_for(_read(process), START_SECONDS)
        except (TimeoutError, _ProcessGone, ConnectionError) as error:
            ending = await self._end(process)
            late = isinstance(error, TimeoutError)
            reason = f"took longer than {START_SECONDS:g} s" if late else f"died ({ending})"
            raise ConfigError(
                f"{self._name}: its process {reason} before it was loaded; see "
                "environment.memory_bytes"
            ) from None
        if "load_error" in response:
            await self._end(process)
            raise ConfigError(response["load_error"])
        self.takes_files = response["takes_files"]
        self._process = process
        reader = asyncio.get_running_loop().create_task(self._read_answers(process))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def _send(self, question: Mapping[str, Any], contents: Sequence[bytes]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        line = orjson.dumps({**question, LENGTHS: [len(content) for content in contents]})
        self._process.stdin.write(b"".join((line, b"\n", *contents)))
        await self._process.stdin.drain()

    async def _read_answers(self, process: asyncio.subprocess.Process) -> None:
        """Pass answers on until the process is gone or silent, or says that it ends; then its
        sessions are lost.
        """
        reason = ""
        try:
            while await self._pass_answer_on(process):
                continue
        except TimeoutError:
            reason = f"it was silent for {SILENT_SECONDS:g} s"
        except _ProcessGone:
            reason = ""
        self._process = None
        self._lost_sessions |= self._open_sessions
        self._open_sessions.clear()
        lost = list(self._waiting.values())  # a new process may start from here on
        ending = await self._end(process)
        for waiting in lost:
            if not waiting.done():
                waiting.set_exception(_ProcessGone(reason or ending))

    async def _pass_answer_on(self, process: asyncio.subprocess.Process) -> bool:
        """Wait for an answer; return whether the process keeps running."""
        response, content = await asyncio.wait_for(_read(process), SILENT_SECONDS)
        waiting = self._waiting.get(response.get("number", 0))
        if waiting is not None and not waiting.done():
            waiting.set_result((response, content))
        return not response.get("ends")

    async def _end(self, process: asyncio.subprocess.Process) -> str:
        """Kill the process group, which is given a moment to end by itself; return the exit code or
        signal, readable.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), EXIT_SECONDS)
        kill(process)
        code = await process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(EXIT_SECONDS):
                await process.stdout.read()
                await process.stdin.wait_closed()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process and its process group, unless it has ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


class _ProcessGone(Exception):
    """The process closed its answers."""


async def _read(process: asyncio.subprocess.Process) -> tuple[dict[str, Any], bytes]:
    """Read a message.

    Raises:
        _ProcessGone: The stream ended.
    """
    assert process.stdout is not None
    try:
        line = await process.stdout.readuntil(b"\n")
        head: dict[str, Any] = orjson.loads(line)
        return head, await process.stdout.readexactly(sum(head[LENGTHS]))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise _ProcessGone("the stream ended") from None
