"""Forked workers equal workers started by a shell, and the loss of the fork server
harms no worker.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from relax_events.config import RunConfig
from relax_events.errors import RunFailed
from relax_events.launcher import fork_client
from relax_events.launcher import worker_processes as imports
from relax_events.launcher.fork_client import ForkedWorker, ForkServer, StartInterrupted
from relax_events.launcher.fork_protocol import SpawnRequest
from relax_events.launcher.worker_processes import run_modules, worker_modules
from relax_events.session.records import RunSessions, find_active

pytestmark = pytest.mark.unit
STAND_IN = "tests.unit.stand_in"
SECONDS = 60.0


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[ForkServer]:
    """Yield a fork server that ends with its test."""
    made = ForkServer(os.environ, tmp_path / "starter.log")
    yield made
    made.close()


def ordered(
    *words: str, environment: dict[str, str] | None = None, needs: list[str] | None = None
) -> SpawnRequest:
    """Return a spawn request for the stand-in program."""
    return SpawnRequest(
        STAND_IN, list(words), dict(os.environ) if environment is None else environment, needs or []
    )


def started(starter: ForkServer, log: Path, *words: str) -> ForkedWorker:
    """Start the stand-in program, and wait for its first output."""
    worker, deadline = starter.spawn(ordered(*words), log_path=log), time.monotonic() + SECONDS
    while not log.read_text():
        assert worker.poll() is None
        assert time.monotonic() < deadline
    return worker


def process_of(starter: ForkServer) -> psutil.Process:
    """Return the starter's process."""
    assert starter.pid is not None
    return psutil.Process(starter.pid)


def test_forked_worker_equals_a_process_started_by_a_shell(
    starter: ForkServer, tmp_path: Path
) -> None:
    order = ordered(
        "show",
        "colorsys",
        "this",
        environment={"PATH": "/bin", "RELAX_MINE": "1"},
        needs=["colorsys"],
    )
    worker = starter.spawn(order, log_path=tmp_path / "logs" / "worker.log")
    assert worker.wait(SECONDS) == worker.poll() == 0
    assert json.loads((tmp_path / "logs" / "worker.log").read_text()) == {
        "arguments": ["show", "colorsys", "this"],
        "environment": {"PATH": "/bin", "RELAX_MINE": "1"},
        "group": worker.pid,
        "session": worker.pid,
        "modules": {"colorsys": True, "this": False},
        "input": "",
    }


def test_forked_worker_has_its_own_command_line_and_no_inherited_open_files(
    starter: ForkServer, tmp_path: Path
) -> None:
    words = ["reward", "runs/a-run-of-some-name/run.json", "--index", "0"]
    first, second = (
        started(starter, tmp_path / f"{name}.log", "drain", name, *words)
        for name in ("first", "second")
    )
    assert psutil.Process(second.pid).cmdline()[1:] == ["-m", STAND_IN, "drain", "second", *words]
    assert psutil.Process(second.pid).num_fds() == 3
    assert {process.pid for process in process_of(starter).children()} == {first.pid, second.pid}
    for worker in (first, second):
        worker.kill_group()
        worker.wait(SECONDS)


@pytest.mark.parametrize(
    ("deed", "end", "code"),
    [("drain", ForkedWorker.terminate, 0), ("ignore", ForkedWorker.kill_group, -9)],
)
def test_fork_server_reports_the_exit_code_of_a_worker(
    starter: ForkServer, tmp_path: Path, deed: str, end: Callable[[ForkedWorker], None], code: int
) -> None:
    worker = started(starter, tmp_path / "worker.log", deed)
    end(worker)
    assert worker.wait(SECONDS) == worker.poll() == code
    end(worker)  # whose process id may be another's by now
    assert starter.spawn(ordered("end", "5"), log_path=tmp_path / "next.log").wait(SECONDS) == 5


def test_fork_server_ignores_a_module_that_cannot_be_imported(
    starter: ForkServer, tmp_path: Path
) -> None:
    assert (
        starter.spawn(
            ordered("end", "0", needs=["nowhere.at_all", "colorsys"]),
            log_path=tmp_path / "worker.log",
        ).wait(SECONDS)
        == 0
    )


def test_imports_that_take_too_long_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fork_client, "START_SECONDS", 0.2)
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    starter = ForkServer(os.environ | {"PYTHONPATH": str(tmp_path)}, tmp_path / "starter.log")
    with pytest.raises(RunFailed, match=r"needed more than 0\.2 s to import .* twice; see .*log"):
        starter.spawn(ordered("end", "0", needs=["endless"]), log_path=tmp_path / "worker.log")
    assert starter.pid is None
    starter.close()


def test_interrupt_ends_the_wait_for_imports(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    starter = ForkServer(os.environ | {"PYTHONPATH": str(tmp_path)}, tmp_path / "starter.log")
    timer = threading.Timer(0.5, starter.interrupt)
    timer.start()
    for _ in range(2):  # the worker that waits, and the next one
        with pytest.raises(StartInterrupted):
            starter.spawn(ordered("end", "0", needs=["endless"]), log_path=tmp_path / "worker.log")
    timer.join()
    starter.close()
    starter.interrupt()
    assert starter.pid is None


def test_workers_outlive_the_fork_server_and_a_new_one_replaces_it(
    starter: ForkServer, tmp_path: Path
) -> None:
    worker = started(starter, tmp_path / "worker.log", "drain")
    lost = process_of(starter)
    lost.kill()
    lost.wait(SECONDS)
    assert worker.poll() is None
    assert starter.spawn(ordered("end", "3"), log_path=tmp_path / "next.log").wait(SECONDS) == 3
    worker.terminate()
    assert worker.wait(SECONDS) == -signal.SIGKILL, (
        "it drained, but no process is left that could report it"
    )


def test_fork_server_exits_when_its_channel_closes_and_leaves_workers_running(
    tmp_path: Path,
) -> None:
    starter = ForkServer(os.environ, tmp_path / "starter.log")
    worker = started(starter, tmp_path / "worker.log", "drain")
    assert starter._process is not None
    starter._process._channel.close()
    assert starter._process._process.wait(SECONDS) == 0
    assert worker.poll() is None
    starter.close()
    worker.kill_group()
    assert worker.wait(SECONDS) == -signal.SIGKILL
    assert (tmp_path / "starter.log").read_text() == ""


def test_session_counts_as_active_until_the_last_worker_of_a_killed_one_has_ended(
    tmp_path: Path,
) -> None:
    sessions = RunSessions(tmp_path).__enter__()
    starter = ForkServer(os.environ, tmp_path / "starter.log", held=sessions.lock)
    worker = started(starter, tmp_path / "worker.log", "drain")
    assert sessions._file is not None
    sessions._file.close()  # as a kill does, which writes no end
    starter.close()
    assert find_active(tmp_path) is not None
    worker.kill_group()
    assert worker.wait(SECONDS) == -signal.SIGKILL
    deadline = time.monotonic() + SECONDS
    while find_active(tmp_path) is not None:
        assert time.monotonic() < deadline


def test_error_names_the_log_of_a_fork_server_that_cannot_start(tmp_path: Path) -> None:
    starter = ForkServer({"PYTHONHOME": str(tmp_path)}, tmp_path / "starter.log")
    with pytest.raises(
        RunFailed,
        match=r"no worker can be started: the fork server ended twice; see .*starter\.log",
    ):
        starter.spawn(ordered("end", "0"), log_path=tmp_path / "worker.log")
    assert "PYTHONHOME" in (tmp_path / "starter.log").read_text()


def test_fork_server_has_no_threads_or_open_files_after_imports(
    make_run_config: Callable[..., RunConfig], starter: ForkServer, tmp_path: Path
) -> None:
    starter._environment |= {"OMP_NUM_THREADS": "1"}
    starter.prepare(
        run_modules(
            make_run_config(
                model={"device": "cpu"}, judge={"device": "cpu"}, teacher={"device": "cpu"}
            )
        )
    )
    order = ordered("show", "torch", "transformers", "workers.trainer", environment={})
    assert starter.spawn(order, log_path=tmp_path / "worker.log").wait(SECONDS) == 0
    assert set(json.loads((tmp_path / "worker.log").read_text())["modules"].values()) == {True}
    process = process_of(starter)
    assert process.num_threads() == 1
    assert [
        file.path for file in process.open_files() if not file.path.endswith("starter.log")
    ] == []


def test_preloaded_modules_match_the_role_and_omit_torch_on_gpu_hosts(
    make_run_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_run_config(engine={"name": "transformers"})
    monkeypatch.setattr(imports, "ACCELERATORS", (tmp_path / "none",))
    found = {
        role: worker_modules(config, role)[1:]
        for role in ("reward", "rollout", "trainer", "absent")
    }
    assert found == {
        "reward": ["workers.reward"],
        "rollout": ["workers.rollout", "relax_events.engines.transformers.engine"],
        "trainer": ["workers.trainer", "relax_events.training.backend.torch_backend"],
        "absent": [],
    }
    assert worker_modules(make_run_config(model={"device": "xpu"}), "rollout")[1:] == [
        "workers.rollout"
    ]
    monkeypatch.setattr(imports, "ACCELERATORS", (tmp_path,))
    assert worker_modules(config, "rollout")[1:] == ["workers.rollout"]


def test_modules_imported_before_a_fork_do_not_load_torch_for_gpu_runs(
    make_run_config: Callable[..., RunConfig],
) -> None:
    config = make_run_config(model={"device": "cuda:0"}, algorithm={"name": "ppo"})
    assert {"trainer", "critic"} <= config.roles().keys()
    code = (
        "import importlib, sys; [importlib.import_module(name) for name in "
        f"{run_modules(config)}]; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout == "False\n"
