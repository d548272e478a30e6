"""Runs targets in turn, each in a child process with bounded time and memory, and keeps the inputs
that broke one.

The child writes each input into a file that the parent reads after the child's death. So an input
that kills or hangs the process is known too.
"""

from __future__ import annotations

import gc
import hashlib
import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import HypothesisWarning

from tests.fuzz.target import Target

ROOT = Path(__file__).parents[2]
EXAMPLES = Path(__file__).parent / "examples"
HEAD_BYTES, MAX_INPUT_BYTES = 16, 1024**2
BATCH = 300
WARM = 500
"""Executions after which memory is measured first: what is loaded on demand is loaded by then."""
HANG_SECONDS = 20.0
"""Processor time of one execution after which it counts as one that never ends."""
SLOW_SECONDS = 2.0
MORE_MEMORY_BYTES = 1536 * 1024**2


@dataclass
class Report:
    """What became of a target."""

    target: str
    executions: int = 0
    seconds: float = 0.0
    crashes: dict[str, str] = field(default_factory=dict)
    """File of the smallest input by what was raised and where."""
    slowest_seconds: float = 0.0
    slowest_bytes: int = 0
    grown_bytes: int = 0


class Blackboard:
    """A small file in memory, shared by child and parent: how many executions began, and the input
    of the last one."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), HEAD_BYTES + MAX_INPUT_BYTES)

    @classmethod
    def fresh(cls, file: Path) -> Blackboard:
        """Make the file."""
        file.write_bytes(bytes(HEAD_BYTES + MAX_INPUT_BYTES))
        return cls(file)

    def begin(self, number: int, data: bytes) -> None:
        """Note the input of an execution."""
        data = data[:MAX_INPUT_BYTES]
        self._memory[HEAD_BYTES : HEAD_BYTES + len(data)] = data
        self._memory[:HEAD_BYTES] = number.to_bytes(8, "big") + len(data).to_bytes(8, "big")

    @property
    def executions(self) -> int:
        """How many began."""
        return int.from_bytes(self._memory[:8], "big")

    @property
    def data(self) -> bytes:
        """Of the last one."""
        return self._memory[
            HEAD_BYTES : HEAD_BYTES + int.from_bytes(self._memory[8:HEAD_BYTES], "big")
        ]


def keep(target: str, data: bytes) -> Path:
    """Keep an input, and return its file."""
    file = EXAMPLES / target / f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


class Child:
    """One target's executions, within the time given."""

    def __init__(self, target: Target, *, seconds: float, board: Blackboard) -> None:
        self.report = Report(target.name)
        self._target, self._board = target, board
        self._until = time.monotonic() + seconds
        self._smallest: dict[str, bytes] = {}
        self._raised = ""

    def run(self, seed: int) -> Report:
        """Fuzz until the time is up."""
        process, warm_bytes = psutil.Process(), 0
        while time.monotonic() < self._until:
            self._batch(seed := seed + 1)
            _bound_memory(process)
            if self.report.executions >= WARM and not warm_bytes:
                warm_bytes = process.memory_info().rss
        if warm_bytes:
            self.report.grown_bytes = max(0, process.memory_info().rss - warm_bytes)
        self.report.crashes = {
            what: str(keep(self._target.name, data)) for what, data in self._smallest.items()
        }
        return self.report

    def _batch(self, seed: int) -> None:
        self._raised = ""
        checked = given(self._target.inputs)(self._execute)
        phases = (Phase.generate, Phase.shrink)
        quiet = settings(
            max_examples=BATCH,
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HypothesisWarning)
                seeded(seed)(quiet(checked))()
        # the error is recorded already; hypothesis's own report adds nothing
        # here
        except BaseException:
            if not self._raised and time.monotonic() < self._until:
                raise
            gc.collect()  # what it keeps for its report

    def _execute(self, data: bytes) -> None:
        if time.monotonic() > self._until:
            return
        self.report.executions += 1
        self._board.begin(self.report.executions, data)
        began = time.thread_time()
        try:
            self._target.check(data)
        except Exception as error:
            if self._is_new(what_of(error), data):
                raise
        finally:
            took = (
                time.thread_time() - began if self.report.executions > 1 else 0.0
            )  # what the first one takes is what it loads
            if took > self.report.slowest_seconds:
                self.report.slowest_seconds, self.report.slowest_bytes = took, len(data)
        if took > SLOW_SECONDS and self._is_new("slow", data):
            raise TimeoutError(f"took {took:.1f} s")

    def _is_new(self, what: str, data: bytes) -> bool:
        """Note an input that broke the target; only the first kind of a batch is raised, so that it
        alone is made smaller."""
        known = self._smallest.get(what)
        if known is None or (len(data), data) < (len(known), known):
            self._smallest[what] = data
        if known is None and not self._raised:
            self._raised = what
        return self._raised == what


def what_of(error: BaseException) -> str:
    """Name an error by its type and by where our code met it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if "/relax_events/" in frame.filename or "/workers/" in frame.filename
    ]
    frame = (ours or frames)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno} {frame.name}"


def _bound_memory(process: psutil.Process) -> None:
    """Bound it once: what a target loads when it is first executed does not count."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return
    bound = process.memory_info().vms + MORE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_target(target: Target, *, seconds: float, seed: int) -> Report:
    """Fuzz one target in a child, and return its report, or the cause of its death."""
    with tempfile.TemporaryDirectory() as folder:
        board, said = Blackboard.fresh(Path(folder) / "input"), Path(folder) / "report.json"
        began = time.monotonic()
        if not (child := os.fork()):
            _be_child(target, seconds, seed, board, said)
        ending = _watched(child, board)
        report = (
            Report(**json.loads(said.read_text()))
            if said.exists()
            else Report(target.name, executions=board.executions)
        )
        if not said.exists():
            report.crashes[ending] = str(keep(target.name, board.data))
        report.seconds = time.monotonic() - began
        return report


def _be_child(target: Target, seconds: float, seed: int, board: Blackboard, said: Path) -> NoReturn:
    """Fuzz and end: with 0 when a report was written."""
    try:
        said.write_text(json.dumps(asdict(Child(target, seconds=seconds, board=board).run(seed))))
    except BaseException as error:
        print(f"{target.name}: {type(error).__name__}: {str(error)[:2000]}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def _watched(child: int, board: Blackboard) -> str:
    """Wait for the end of a child, and name it; one that does not get on with an input is
    killed."""
    process, seen, since = psutil.Process(child), -1, 0.0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f"ended with {os.waitstatus_to_exitcode(status)}"
        used = sum(process.cpu_times()[:2])
        if board.executions != seen:
            seen, since = board.executions, used
        elif seen and used - since > HANG_SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end within {HANG_SECONDS:g} s of processor time"
        time.sleep(0.5)
