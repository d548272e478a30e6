"""Two ranks of a trainer under the supervisor end together, with the error of the rank that failed
first, and with their supervisor.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, RunFailed
from relax_events.launcher import worker_processes as ranks_module
from relax_events.launcher.managed_process import Progress
from relax_events.launcher.supervisor import Supervisor

pytestmark = pytest.mark.integration
SECONDS = 120.0
MakeRunConfig = Callable[..., RunConfig]
MakeSupervisor = Callable[..., Supervisor]
NAMES = ("trainer-0", "trainer-1")


def supervisor_of(config: RunConfig, *, failing: int, deed: str) -> Supervisor:
    """Return a supervisor of two ranks that do something."""
    supervisor = Supervisor(config, Path("run.json"))
    supervisor._processes = {"trainer-0": supervisor._processes["trainer-0"]}
    trainer = supervisor._processes["trainer-0"]
    arguments = [str(failing), deed]
    trainer.requests = {
        name: replace(
            order, module="tests.integration.failing_ranks", imports=[], arguments=arguments
        )
        for name, order in trainer.requests.items()
    }
    return supervisor


@pytest.fixture
def two_ranks(make_run_config: MakeRunConfig) -> RunConfig:
    """Return a run whose trainer has two ranks, and that is aborted at the first death."""
    return make_run_config(trainer={"ranks": 2}, workers={"max_restarts": 0})


@pytest.fixture
def started(two_ranks: RunConfig) -> Iterator[MakeSupervisor]:
    """Yield a maker of supervisors whose ranks run."""
    made: list[Supervisor] = []

    def make(*, failing: int, deed: str) -> Supervisor:
        made.append(supervisor_of(two_ranks, failing=failing, deed=deed))
        made[-1].start()
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.stop(timeout_seconds=0)


def until_ended(supervisor: Supervisor) -> None:
    """Tend the ranks until they have ended."""
    deadline = time.monotonic() + SECONDS
    while supervisor._processes["trainer-0"].process is not None:
        assert time.monotonic() < deadline
        supervisor.poll(Progress())


def joined(config: RunConfig) -> dict[str, int]:
    """Return the processes of the ranks once they have found each other."""
    deadline, pids = time.monotonic() + SECONDS, {}
    while len(pids) < len(NAMES):
        assert time.monotonic() < deadline
        for name in NAMES:
            path = config.run_directory / "logs" / f"{name}.log"
            lines = path.read_text().splitlines() if path.exists() else []
            for line in lines:
                if line.startswith("joined ") and len(words := line.split()) == 2:
                    pids[name] = int(words[1])
    return pids


def test_trainer_counts_as_fenced_when_one_of_its_ranks_was_fenced(started: MakeSupervisor) -> None:
    supervisor = started(failing=0, deed="fenced")
    until_ended(supervisor)
    assert set(supervisor.fenced) == {"trainer-0"}
    assert supervisor.pids == {}


@pytest.mark.parametrize(
    ("deed", "kind", "text"),
    [
        (
            "wrong",
            ConfigError,
            r"trainer-1 can't continue: ConfigError: trainer.learning_rate is wrong; log: .*trainer-1.log",
        ),
        (
            "killed",
            RunFailed,
            r"trainer-1 died 1 times in a row without a committed step: ended by SIGKILL; log: .*trainer-1.log",
        ),
    ],
)
def test_trainer_raises_the_error_of_the_rank_that_failed(
    started: MakeSupervisor, deed: str, kind: type[Exception], text: str
) -> None:
    supervisor = started(failing=1, deed=deed)
    with pytest.raises(kind, match=text):
        until_ended(supervisor)
    assert supervisor.pids == {}


def test_rank_that_hangs_is_killed_when_another_one_has_failed(
    started: MakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "OTHERS_SECONDS", 0.5)
    supervisor = started(failing=1, deed="hang")
    with pytest.raises(
        RunFailed, match=r"trainer-1 died 1 times .*: MemoryError: no room; log: .*trainer-1.log"
    ):
        until_ended(supervisor)
    assert supervisor.pids == {}


def test_killing_one_rank_ends_all_ranks(started: MakeSupervisor, two_ranks: RunConfig) -> None:
    supervisor = started(failing=-1, deed="hang")
    assert joined(two_ranks) == supervisor.pids
    supervisor.kill("trainer-1")
    until_ended(supervisor)
    assert supervisor.pids == {}


def test_all_ranks_exit_when_the_supervisor_is_killed(two_ranks: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(two_ranks.model_dump_json())
    words = [sys.executable, "-m", "tests.integration.rank_supervisor", str(path)]
    supervisor = subprocess.Popen(words, cwd=Path(__file__).parents[2])
    ranks = [psutil.Process(pid) for pid in joined(two_ranks).values()]
    supervisor.kill()
    supervisor.wait(SECONDS)
    _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
    for process in alive:
        process.kill()
    assert alive == []
