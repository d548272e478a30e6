"""Calls a child process, one request at a time: if the child hangs, grows or crashes, only the
request fails, not the worker.

Requests and responses have the same format: a line of JSON, followed by bytes whose lengths are in
the line. The child exits when its stdin is closed. A child that runs untrusted code or reads
untrusted files gets only the environment variables that are listed here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

import orjson

ALLOWED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM"),
        *(
            "PYTHONPATH",
            "PYTHONHOME",
            "PYTHONHASHSEED",
            "PYTHONUNBUFFERED",
            "PYTHONDONTWRITEBYTECODE",
            "PYTHONPYCACHEPREFIX",
            "PYTHONWARNINGS",
        ),
        *(
            "VIRTUAL_ENV",
            "LD_LIBRARY_PATH",
            "XDG_CACHE_HOME",
            "SSL_CERT_FILE",
            "SSL_CERT_DIR",
            "REQUESTS_CA_BUNDLE",
        ),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *(
            "HF_HOME",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HF_DATASETS_OFFLINE",
            "TRANSFORMERS_OFFLINE",
            "TOKENIZERS_PARALLELISM",
        ),
        *("CUDA_VISIBLE_DEVICES", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
    }
)
"""Paths of programs, packages and caches, and settings of computation: none is a secret."""
ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_")


def build_child_environment(
    also: Iterable[str] = (), *, prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the variables for a child process: the allowed ones, and those that the caller names.

    `OMP_NUM_THREADS` is 1 unless it is set.

    Args:
        also: Names of further variables.
        prefixes: Prefixes of the names of further variables.
    """
    named, begin = ALLOWED.union(also), (*ALLOWED_PREFIXES, *prefixes)
    return {
        "OMP_NUM_THREADS": "1",
        **{
            name: value
            for name, value in os.environ.items()
            if name in named or name.startswith(begin)
        },
    }


LENGTHS = "num_bytes"
"""Key of the lengths in a line."""
FAILURE = "failure"
"""Key of an unexpected error in a child's last response."""
EXIT_SECONDS = 1.0
"""Seconds in which a failing child exits by itself, so that its own exit code is known."""


@dataclass(frozen=True, slots=True)
class ChildProcessLost(Exception):
    """The child was killed at its deadline, or exited by itself."""

    is_late: bool
    ending: str


class SubprocessRpc:
    """The parent's side. The child ends with this process and with its owner. Used by one thread
    at a time.
    """

    def __init__(self, module: str, *, setup: Mapping[str, Any], is_confined: bool = False) -> None:
        """Start the process, without the worker's credentials and other secrets.

        Args:
            module: Module that the child runs; it uses `read_requests` and `respond`.
            setup: The first message to the child.
            is_confined: Whether to deny the child access to files, network and other processes.
        """
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                *(["relax_events.sandbox.confined"] if is_confined else []),
                module,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=build_child_environment(),
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(setup) + b"\n")

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def request(
        self, message: Mapping[str, Any], contents: Sequence[bytes] = (), *, seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request, and wait for the response.

        Args:
            message: JSON of the request.
            contents: Bytes that follow it.
            seconds: Time limit of the whole call.
        Returns:
            The response, and the bytes that follow it.
        Raises:
            ChildProcessLost: No response came in time, or the child exited; it can't be used again.
        """
        late = threading.Event()
        watch = threading.Timer(seconds, _give_up, [self._process, late])
        watch.start()
        try:
            response = self._exchange(b"".join(_message(message, contents)))
        finally:
            watch.cancel()
        if response is None or FAILURE in response[0]:
            failure = "" if response is None else f"{response[0][FAILURE]}; "
            raise ChildProcessLost(late.is_set(), failure + self.close(exit_seconds=EXIT_SECONDS))
        return response

    def close(self, *, exit_seconds: float = 0.0) -> str:
        """Kill the process; return its exit code or signal, readable.

        Args:
            exit_seconds: Time to exit by itself before it is killed, so that its own exit code or
                signal is returned.
        """
        self._finalizer.detach()
        if exit_seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(exit_seconds)
        code = _end(self._process)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _exchange(self, message: bytes) -> tuple[dict[str, Any], bytes] | None:
        """Send a request and read its response; None if the child exits before the end of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(message)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the pipe was closed by `close`
            return None
        return _read(self._process.stdout)


def begin_child(*, buffering: int = -1) -> tuple[BinaryIO, BinaryIO, dict[str, Any]]:
    """Begin a child process: take its stdout for answers and its stdin for requests, read the first
    line of JSON, its setup, and limit the memory to the setup's `memory_bytes`. What foreign code
    prints goes to stderr, and it reads nothing.

    Args:
        buffering: Of the answers, as for `open`.
    Returns:
        The stream of answers, the stream of requests, and the setup.
    """
    answers, requests = os.fdopen(os.dup(1), "wb", buffering), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    setup: dict[str, Any] = orjson.loads(requests.readline())
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return answers, requests, setup


def read_requests(requests: IO[bytes]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the requests to a child until its stdin is closed; for the child's side."""
    while (request := _read(requests)) is not None:
        yield request


@contextlib.contextmanager
def raise_failures(answers: IO[bytes]) -> Iterator[None]:
    """Send an unexpected error's name and text as the last response; for the child's side."""
    try:
        yield
    except Exception as error:
        respond(answers, {FAILURE: f"{type(error).__name__}: {error}"})
        raise


def respond(
    answers: IO[bytes], said: Mapping[str, Any], contents: Sequence[bytes | memoryview] = ()
) -> None:
    """Send the response to a request; for the child's side."""
    answers.writelines(_message(said, contents))
    answers.flush()


def _message(
    line: Mapping[str, Any], contents: Sequence[bytes | memoryview]
) -> Iterable[bytes | memoryview]:
    yield (
        orjson.dumps(
            {
                **line,
                LENGTHS: [
                    len(content) if isinstance(content, bytes) else content.nbytes
                    for content in contents
                ],
            }
        )
        + b"\n"
    )
    yield from contents


def _read(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Read a message; None if the stream ends before it is complete."""
    try:
        if not (line := stream.readline()).endswith(b"\n"):
            return None
        head: dict[str, Any] = orjson.loads(line)
        content = stream.read(wanted := sum(head[LENGTHS]))
    except ValueError:  # the pipe was closed by `close`
        return None
    return (head, content) if len(content) == wanted else None


def _give_up(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the child's process group; its process id stays reserved until it is waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> int:
    _kill(process)
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except BrokenPipeError:  # bytes that were not sent yet
            continue
    return process.wait()
