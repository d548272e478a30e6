"""Decodes files from strangers in a process of its own: one that hangs, grows or crashes costs its file, and never the worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict
from typing import Any

import orjson

from relax_events.broker.credentials import CREDENTIAL_VARIABLES
from relax_events.config import MediaConfig
from relax_events.errors import EnvironmentProblem, MediaError
from relax_events.events.parts import Modality
from relax_events.media.facts import MediaFacts, require_bytes
from relax_events.models.showing import Plan

START_SECONDS = 60.0
"""On top of the limit for the first file, for the process to start."""


class Decoder:
    """A child process that is started when the first file comes, and again when a file has cost it. It ends with us. Used by one thread."""

    def __init__(self, limits: MediaConfig) -> None:
        """Start nothing yet.

        Args:
            limits: Bounds of all that is decoded.
        """
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def inspect(self, data: bytes, modality: Modality, *, place: str) -> MediaFacts:
        """Check a file, and say what it holds.

        Args:
            data: The file.
            modality: What it must be.
            place: Names it in errors.
        Raises:
            MediaError: It is too large, too long, of no known kind, cut off or broken, or decoding it takes too long or too much.
            EnvironmentProblem: A library is not installed.
        """
        answer, _ = self._asked(data, modality, None, place)
        return MediaFacts(**answer["facts"])

    def decode(self, data: bytes, modality: Modality, plan: Plan, *, place: str) -> bytes:
        """Decode a file by a plan; errors as for `inspect`.

        Returns:
            The bytes of the plan's array; behind it, of a clip that is heard, those of its sound.
        """
        return self._asked(data, modality, plan, place)[1]

    def _asked(self, data: bytes, modality: Modality, plan: Plan | None, place: str) -> tuple[dict[str, Any], bytes]:
        require_bytes(data, self._limits, place)
        request = {"modality": modality, "place": place, "plan": None if plan is None else asdict(plan), "num_bytes": len(data)}
        seconds = self._limits.decode_seconds + (START_SECONDS if self._process is None else 0)
        process = self._process = self._process or self._started()
        late = threading.Event()
        watch = threading.Timer(seconds, _give_up, [process, late])
        watch.start()
        try:
            answer = _exchanged(process, orjson.dumps(request) + b"\n" + data)
        finally:
            watch.cancel()
        if answer is None:
            raise self._lost(process, place, is_late=late.is_set())
        head, content = answer
        if "error" in head:
            raise MediaError(**head["error"])
        if "problem" in head:
            raise EnvironmentProblem(head["problem"]["text"])
        return head, content

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name not in CREDENTIAL_VARIABLES}
        process = subprocess.Popen(
            [sys.executable, "-m", "relax_events.media.decoder_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **environment},
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(orjson.dumps(self._limits.model_dump(mode="json")) + b"\n")
        return process

    def _lost(self, process: subprocess.Popen[bytes], place: str, *, is_late: bool) -> MediaError:
        self._process = None
        code = _end(process)
        if is_late:
            rule = f"model.media.decode_seconds = {self._limits.decode_seconds:g}"
            return MediaError(f"{place} must be decoded within {rule}, and was not", reason="too_slow")
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return MediaError(f"{place} ended the process that decoded it ({ended})", reason="crashed_decoder")


def _exchanged(process: subprocess.Popen[bytes], request: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Send a request and read its answer; None where the child is gone before it is whole."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    if not (line := process.stdout.readline()).endswith(b"\n"):
        return None
    head: dict[str, Any] = orjson.loads(line)
    content = process.stdout.read(wanted := sum(head["num_bytes"]))
    return (head, content) if len(content) == wanted else None


def _give_up(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _end(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except BrokenPipeError:  # what it was still to be told
            continue
    return process.wait()
