"""The supervisor's plan, and what a worker's way of ending means for the run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relax_events.config import RunConfig
from relax_events.control.supervisor import RESTART_WINDOW_SECONDS, Fencing, Supervisor
from relax_events.errors import ConfigError, Fenced, RelaxError, RunFailed, SchemaError
from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerBeat

MakeRunConfig = Callable[..., RunConfig]
MakeEnded = Callable[[RunConfig, int], Supervisor]
NO_RESTART = {"max_restarts": 0}


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[MakeEnded]:
    """Give a maker of supervisors whose workers have all said why they can't go on, and ended with a code."""
    made: list[Supervisor] = []

    def make(config: RunConfig, code: int) -> Supervisor:
        supervisor = Supervisor(config, tmp_path / "run.json")
        made.append(supervisor)
        for managed in supervisor._processes.values():
            managed.order = replace(managed.order, module="tests.unit.stand_in", imports=[], arguments=["end", str(code)])
        supervisor.start()
        for managed in supervisor._processes.values():
            assert managed.process is not None
            managed.process.wait(30)
        return supervisor

    yield make
    for supervisor in made:
        supervisor.stop(timeout_seconds=0)


def test_every_worker_has_a_port_of_its_own_and_the_trainer_is_last(make_run_config: MakeRunConfig, tmp_path: Path) -> None:
    config = make_run_config(telemetry={"metrics_port": 9100}, workers={"rollout": 2}, trainer={"ranks": 2})
    ports = {name: managed.metrics_port for name, managed in Supervisor(config, tmp_path / "run.json")._processes.items()}
    assert sorted(ports.values()) == list(range(9100, 9108))
    assert ports["trainer-0"] == 9107  # its second rank takes 9108


def test_ports_are_free_ones_by_default(make_run_config: MakeRunConfig, tmp_path: Path) -> None:
    supervisor = Supervisor(make_run_config(), tmp_path / "run.json")
    assert {managed.metrics_port for managed in supervisor._processes.values()} == {0}


def test_trainer_of_several_ranks_is_started_by_torchrun(make_run_config: MakeRunConfig, tmp_path: Path) -> None:
    supervisor = Supervisor(make_run_config(trainer={"ranks": 2}), tmp_path / "run.json")
    commands = {name: [managed.order.module, *managed.order.arguments] for name, managed in supervisor._processes.items()}
    assert commands["trainer-0"][:4] == ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert commands["trainer-0"][4:] == ["-m", "relax_events.cli", "worker", "trainer", str(tmp_path / "run.json"), "--index", "0"]
    assert commands["reward-0"] == ["relax_events.cli", "worker", "reward", str(tmp_path / "run.json"), "--index", "0"]


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (5, SchemaError), (1, RunFailed)])
def test_run_ends_as_its_worker_did_where_a_restart_would_not_help(
    make_run_config: MakeRunConfig, ended: MakeEnded, code: int, error: type[RelaxError]
) -> None:
    supervisor = ended(make_run_config(workers=NO_RESTART), code)
    with pytest.raises(error, match=rf"controller-0 ended with exit code {code}; the end of .*controller-0.log:\nerror: the reason"):
        supervisor.tend()


def test_worker_that_died_is_started_again(make_run_config: MakeRunConfig, ended: MakeEnded) -> None:
    supervisor = ended(make_run_config(), 1)
    supervisor.tend()
    assert supervisor.num_restarts == len(supervisor._processes)
    assert {managed.process for managed in supervisor._processes.values()} == {None}
    assert supervisor.fenced == {}


def test_reason_is_told_although_the_folder_of_the_run_was_deleted(make_run_config: MakeRunConfig, ended: MakeEnded) -> None:
    supervisor = ended(make_run_config(workers={"max_restarts": 1}), 2)
    for managed in supervisor._processes.values():
        shutil.rmtree(managed.log_path.parent, ignore_errors=True)
        managed.process = None
    supervisor.tend()
    for managed in supervisor._processes.values():
        assert managed.process is not None
        managed.process.wait(30)
    with pytest.raises(ConfigError, match=r"controller-0 ended with exit code 2; the end of .*:\nerror: the reason"):
        supervisor.tend()


def test_worker_that_lived_for_long_is_started_again_at_once(make_run_config: MakeRunConfig, ended: MakeEnded) -> None:
    supervisor = ended(make_run_config(), 1)
    for managed in supervisor._processes.values():
        managed.starts = [time.monotonic() - 2 * RESTART_WINDOW_SECONDS]
    supervisor.tend()
    now = time.monotonic()
    assert [managed.worker_id for managed in supervisor._processes.values() if managed.start_after > now] == []


def test_worker_that_drained_is_started_again_a_moment_later_and_without_alarm(make_run_config: MakeRunConfig, ended: MakeEnded) -> None:
    supervisor = ended(make_run_config(), 0)
    supervisor.tend()
    supervisor.tend()
    assert {managed.process for managed in supervisor._processes.values()} == {None}, "the run may be ending: its command reaches workers first"
    assert supervisor.num_restarts == 0


def test_fenced_worker_stays_down_until_it_is_revived(make_run_config: MakeRunConfig, ended: MakeEnded) -> None:
    supervisor = ended(make_run_config(), Fenced.exit_code)
    trainer = supervisor._processes["trainer-0"]
    assert trainer.process is not None
    pid = trainer.process.pid
    supervisor.tend()
    supervisor.tend()
    assert (trainer.process, supervisor.fenced["trainer-0"].pid) == (None, pid)
    supervisor.revive("trainer-0")
    supervisor.tend()
    assert trainer.process is not None
    trainer.process.wait(30)
    assert "trainer-0" not in supervisor.fenced


SECOND = 1_000_000
FENCED_AT = 100 * SECOND
OURS, OTHERS = 7, 8


def beat(pid: int, *, beat_at: int, state: WorkerState = WorkerState.WORKING) -> WorkerBeat:
    """Make a beat of one of two trainers."""
    return WorkerBeat(
        worker_id="trainer-0",
        role="trainer",
        host="here",
        pid=pid,
        state=state,
        num_processed=0,
        num_in_flight=0,
        last_progress_at=beat_at,
        beat_at=beat_at,
    )


@pytest.mark.parametrize(
    ("newest", "over_after_seconds"),
    [
        (None, 60),
        (beat(OURS, beat_at=FENCED_AT), 60),  # ours spoke last, woken up and not yet aware that it was fenced
        (beat(OTHERS, beat_at=FENCED_AT - SECOND), 60),
        (beat(OTHERS, beat_at=FENCED_AT + 30 * SECOND), 90),
        (beat(OTHERS, beat_at=FENCED_AT + 30 * SECOND, state=WorkerState.STOPPED), 35),
        (beat(OURS, beat_at=FENCED_AT, state=WorkerState.STOPPED), 60),
    ],
)
def test_fencing_is_over_when_the_other_has_been_silent_for_long_or_said_goodbye(newest: WorkerBeat | None, over_after_seconds: int) -> None:
    fencing = Fencing(OURS, FENCED_AT)
    over = [fencing.is_over(newest, now=FENCED_AT + after * SECOND, hung_seconds=60.0) for after in (over_after_seconds, over_after_seconds + 1)]
    assert over == [False, True]
