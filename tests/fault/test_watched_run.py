"""A run is monitored, queried and stopped from another shell, by its control log alone."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import orjson
from harness import FaultRun, command, environment

SECONDS = 120


class Terminal:
    """Runs a command in its own terminal and records what it renders."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.shown, self._changed = "", threading.Condition()
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            words,
            env=environment() | {"TERM": "xterm"},
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        os.close(self._ours)

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed once its processes have exited
            while data := os.read(self._ours, 65_536):
                with self._changed:
                    self.shown += data.decode(errors="replace")
                    self._changed.notify_all()

    def wait_until_shown(self, text: str) -> None:
        """Wait until a text was sampled."""
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.shown, SECONDS), self.shown


def called(run: FaultRun, *words: str | Path) -> tuple[int, str]:
    """Call `relax` in another process, and return its exit code and what it printed."""
    ended = subprocess.run(
        command(*words),
        env=environment(),
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return ended.returncode, ended.stdout or ended.stderr


def test_run_is_inspected_and_stopped_from_another_shell_and_resumed(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 100_000})
    run_id, where = run.config.run.id, ("--directory", run.config.run.directory)
    first = run.start()
    run.wait_until_steps(2)
    for worker_id in run.worker_ids:
        run.wait_until(lambda worker_id=worker_id: run.is_ready(worker_id), f"{worker_id} is ready")  # type: ignore[misc]

    code, shown = called(run, "status", run_id, *where, "--output", "json")
    status = orjson.loads(shown)
    assert (code, status["run_id"], status["status"], status["reason"]) == (
        0,
        run_id,
        "running",
        "",
    )
    assert status["step"] >= 2
    assert {worker["worker_id"] for worker in status["workers"] if worker["is_healthy"]} == set(
        run.worker_ids
    )
    code, shown = called(run, "status", run.run_file)
    assert code == 0
    assert f"\nrun {run_id} running\nstep " in shown

    code, shown = called(run, "health", run_id, *where, "--output", "json")
    assert (code, {row["worker"]: row["pid"] for row in orjson.loads(shown)}) == (
        0,
        {name: run.pid(name) for name in run.worker_ids},
    )
    code, shown = called(run, "logs", run.run_file, "trainer-0", "--lines", "1")
    assert (code, "trainer-0" in shown, len(shown.splitlines())) == (0, True, 1)

    with Terminal(command("status", run.run_file), run.folder) as live:
        live.wait_until_shown(f"relax run {run_id}")
        code, shown = called(run, "runs", "stop", run_id, *where, "--output", "json")
        assert live.process.wait(SECONDS) == 0
    assert f"run {run_id} ended: stopped by relax runs stop" in live.shown
    stopped = orjson.loads(shown)
    assert (code, stopped["not_drained"], set(stopped["drained"])) == (0, [], set(run.worker_ids))
    assert run.wait_until_ended(first) == 1
    assert (
        f"run {run_id} ended before its goal: stopped by relax runs stop; the same relax "
        "run resumes it"
    ) in run.output.read_text()
    assert called(run, "runs", "stop", run_id, *where)[1].startswith(
        f"run {run_id} has ended already, at step "
    )
    assert called(run, "health", run_id, *where)[0] == 6
    assert (
        f"\nrun {run_id} ended: stopped by relax runs stop"
        in called(run, "status", run_id, *where)[1]
    )

    second = run.start(
        "run", run.run_file, f"run.num_steps={run.state.num_steps + 2}", "--accept-changes"
    )
    assert run.wait_until_ended(second) == 0
    assert run.ledger()["samples_lost"] == 0
