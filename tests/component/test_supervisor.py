"""The supervisor's plan, and what a worker's exit means for the run."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.errors import (
    BrokerRefused,
    ConfigError,
    EnvironmentProblem,
    Fenced,
    RelaxError,
    RunFailed,
    SchemaError,
)
from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat
from relax_events.kafka.workarounds.altered_batches import VARIABLE as SINGLE_BATCHES
from relax_events.launcher.managed_process import Fencing, Progress
from relax_events.launcher.supervisor import Supervisor
from relax_events.launcher.worker_processes import CLIENT_ABORT_TEXT
from relax_events.runtime.control_view import RESTART_CODE

MakeRunConfig = Callable[..., RunConfig]
MakeEnded = Callable[[RunConfig, int | str], Supervisor]
NO_RESTART = {"max_restarts": 0}


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[MakeEnded]:
    """Yield a maker of supervisors whose workers have all reported their error, and ended with an
    exit code or an error."""
    made: list[Supervisor] = []

    def make(config: RunConfig, how: int | str) -> Supervisor:
        supervisor = Supervisor(config, tmp_path / "run.json")
        made.append(supervisor)
        for managed in supervisor._processes.values():
            managed.requests = {
                name: replace(
                    order, module="tests.unit.stand_in", imports=[], arguments=["end", str(how)]
                )
                for name, order in managed.requests.items()
            }
        supervisor.start()
        for managed in supervisor._processes.values():
            assert managed.process is not None
            managed.process.wait(100)
        return supervisor

    yield make
    for supervisor in made:
        supervisor.stop(timeout_seconds=0)


def test_every_worker_has_its_own_metrics_port_and_the_trainer_is_last(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    config = make_run_config(
        telemetry={"metrics_port": 9100}, workers={"rollout": 2}, trainer={"ranks": 2}
    )
    ports = {
        name: managed.metrics_port
        for name, managed in Supervisor(config, tmp_path / "run.json")._processes.items()
    }
    assert sorted(ports.values()) == list(range(9100, 9108))
    assert ports["trainer-0"] == 9107  # its second rank takes 9108


def test_free_metrics_ports_are_chosen_by_default(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    supervisor = Supervisor(make_run_config(), tmp_path / "run.json")
    assert {managed.metrics_port for managed in supervisor._processes.values()} == {0}


def test_each_rank_of_a_trainer_gets_its_rank_as_argument(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    supervisor = Supervisor(make_run_config(trainer={"ranks": 2}), tmp_path / "run.json")
    orders = supervisor._processes["trainer-0"].requests
    assert [*orders] == ["trainer-0", "trainer-1"]
    for rank, order in enumerate(orders.values()):
        assert [order.module, *order.arguments] == [
            "relax_events.cli",
            "worker",
            "trainer",
            str(tmp_path / "run.json"),
            "--index",
            str(rank),
        ]
        assert (
            order.environment["RANK"],
            order.environment["LOCAL_RANK"],
            order.environment["WORLD_SIZE"],
        ) == (str(rank), str(rank), "2")
    ((_, alone),) = supervisor._processes["reward-0"].requests.items()
    assert alone.arguments == ["worker", "reward", str(tmp_path / "run.json"), "--index", "0"]
    assert "RANK" not in alone.environment


def test_each_host_starts_its_share_and_ranks_meet_at_rank_0s_host(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    config = make_run_config(
        trainer={"ranks": 4},
        workers={"rollout": 2},
        broker={"partitions_per_version": 4, "bootstrap_servers": "10.0.0.9:9092"},
        hosts={"addresses": ["10.0.0.1", "10.0.0.2"], "rendezvous_port": 31000},
    )
    first, second = (
        Supervisor(config, tmp_path / "run.json", host=host)._processes for host in range(2)
    )
    assert [*first["trainer-0"].requests] == ["trainer-0", "trainer-1"]
    assert [*second["trainer-2"].requests] == ["trainer-2", "trainer-3"]
    for at, order in enumerate(second["trainer-2"].requests.values()):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = [str(2 + at), str(at), "4", "10.0.0.1", "31000"]
        assert [order.environment[name] for name in names] == values
        assert order.arguments[-2:] == ["--index", str(2 + at)]
    assert "prompter-0" in first
    assert not {"prompter-0", "reward-0", "controller-0"} & set(second)
    engines = [sum("rollout" in name for name in host) for host in (first, second)]
    assert engines == [1, 1]
    alone = Supervisor(make_run_config(workers={"rollout": 2}), tmp_path / "run.json")._processes
    assert set(first) | set(second) == set(alone) | {"trainer-2"}


@pytest.mark.parametrize(
    ("code", "error"), [(2, ConfigError), (5, SchemaError), (1, RunFailed), (4, BrokerRefused)]
)
def test_run_ends_with_the_worker_error_that_a_restart_cannot_fix(
    make_run_config: MakeRunConfig, ended: MakeEnded, code: int, error: type[RelaxError]
) -> None:
    supervisor = ended(make_run_config(workers=NO_RESTART), code)
    with pytest.raises(
        error,
        match=rf"controller-0 .*: ended with exit code {code}; log: .*controller-0.log, which ends in:\nerror: the reason",
    ):
        supervisor.poll(Progress())


def test_dead_worker_is_restarted_and_reported_with_its_error_and_log(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    supervisor = ended(make_run_config(), "OutOfMemoryError")
    notes = supervisor.poll(Progress())
    assert len(notes) == len(supervisor._processes)
    assert notes[0].startswith(
        "controller-0 died: OutOfMemoryError: no room for 7.42 GiB; it is restarted; log: "
    )
    assert notes[0].endswith("logs/controller-0.log")
    assert {managed.process for managed in supervisor._processes.values()} == {None}
    assert supervisor.fenced == {}


def test_all_workers_fetch_single_batches_after_a_client_misread_the_log(
    make_run_config: MakeRunConfig, ended: MakeEnded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SINGLE_BATCHES, "")
    supervisor = ended(make_run_config(), "misread")
    assert (
        f"controller-0 died: {CLIENT_ABORT_TEXT}; it is restarted; log: "
        in supervisor.poll(Progress())[0]
    )
    orders = [
        order for managed in supervisor._processes.values() for order in managed.requests.values()
    ]
    assert {
        os.environ[SINGLE_BATCHES],
        *(order.environment[SINGLE_BATCHES] for order in orders),
    } == {"1"}


def died_again(supervisor: Supervisor, progress: Progress) -> list[str]:
    """Have all workers started again and die once more, however long the run would wait before."""
    for managed in supervisor._processes.values():
        if managed.process is None and not managed.abandoned_reason:
            supervisor._spawn(managed)
        assert managed.process is not None
        managed.process.wait(100)
    return supervisor.poll(progress)


def test_run_ends_with_the_error_of_a_worker_that_always_dies(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    supervisor = ended(make_run_config(workers={"max_restarts": 2}), "OutOfMemoryError")
    for managed in list(supervisor._processes.values())[1:]:
        supervisor._processes.pop(managed.worker_id)
    assert len(supervisor.poll(Progress(num_steps=7))) == 1
    assert len(died_again(supervisor, Progress(num_steps=7))) == 1
    expected = r"controller-0 died 3 times in a row without a committed step: OutOfMemoryError: no room for 7.42 GiB; log: .*controller-0.log$"
    with pytest.raises(RunFailed, match=expected):
        died_again(supervisor, Progress(num_steps=7))


def test_a_loop_ends_with_its_first_cause_and_with_that_of_another_worker(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    """The trainer dies first, once; then the reward worker, of one error and then of another."""
    supervisor = ended(make_run_config(workers={"max_restarts": 2}), "the fifth cause")
    reward, trainer = (supervisor._processes[name] for name in ("reward-0", "trainer-0"))
    supervisor._processes = {"trainer-0": trainer}
    assert len(supervisor.poll(Progress())) == 1
    supervisor._processes = {"reward-0": reward}
    for cause in ("the sixth cause", "the seventh cause"):
        assert "reward-0 died" in supervisor.poll(Progress())[0]
        reward.requests = {
            name: replace(order, arguments=["end", cause])
            for name, order in reward.requests.items()
        }
        reward.start_after = 0.0
        supervisor.poll(Progress())
        assert reward.process is not None
        reward.process.wait(100)
    with pytest.raises(RunFailed) as caught:
        supervisor.poll(Progress())
    text = str(caught.value)
    causes = [f"the {number} cause: no room for 7.42 GiB" for number in ("fifth", "seventh")]
    assert f": first of {causes[0]}; now of {causes[1]} (" in text
    assert f"(the first death since the last committed step: trainer-0: {causes[0]}); log: " in text


def test_run_continues_while_steps_are_committed_or_broker_or_store_is_down(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    for error, has_steps in (
        ("OutOfMemoryError", True),
        ("BrokerUnavailable", False),
        ("StoreUnavailable", False),
    ):
        supervisor = ended(make_run_config(workers={"max_restarts": 1}), error)
        for managed in list(supervisor._processes.values())[1:]:
            supervisor._processes.pop(managed.worker_id)
        supervisor.poll(Progress())
        for num_steps in range(1, 4):
            assert len(died_again(supervisor, Progress(num_steps=num_steps * has_steps))) == 1


OTHER_HOSTS: dict[str, Any] = {
    "broker": {"partitions_per_version": 2, "bootstrap_servers": "10.0.0.9:9092"},
    "hosts": {"addresses": ["10.0.0.1", "10.0.0.2"]},
}


def keep_first(supervisor: Supervisor) -> None:
    for managed in list(supervisor._processes.values())[1:]:
        supervisor._processes.pop(managed.worker_id)


def test_ranks_that_never_meet_end_the_run_with_what_to_check(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    supervisor = ended(make_run_config(workers={"max_restarts": 1}, **OTHER_HOSTS), "RankLost")
    keep_first(supervisor)
    supervisor._started_at_step = 7
    supervisor.poll(Progress(num_steps=7))
    assert len(died_again(supervisor, Progress(num_steps=7))) == 1, (
        "one more than of others: where another host's rank fails, its error ends the run"
    )
    with pytest.raises(RunFailed, match=r"hosts\.rendezvous_port .* GLOO_SOCKET_IFNAME"):
        died_again(supervisor, Progress(num_steps=7))


def test_ranks_that_have_met_wait_for_a_lost_host(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    supervisor = ended(make_run_config(workers={"max_restarts": 1}, **OTHER_HOSTS), "RankLost")
    keep_first(supervisor)
    supervisor._started_at_step = 7
    supervisor.poll(Progress(num_steps=8))
    for _ in range(4):
        assert len(died_again(supervisor, Progress(num_steps=8))) == 1


@pytest.mark.parametrize("addresses", [[], ["10.0.0.1"]])
def test_lost_ranks_of_one_host_are_deaths(
    make_run_config: MakeRunConfig, ended: MakeEnded, addresses: list[str]
) -> None:
    settings = OTHER_HOSTS | {"hosts": {"addresses": addresses}}
    supervisor = ended(make_run_config(workers=NO_RESTART, **settings), "RankLost")
    with pytest.raises(RunFailed, match=r"no room for 7.42 GiB; log"):
        supervisor.poll(Progress(num_steps=1))


def test_rank_0_waits_for_the_port_of_an_earlier_process(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    with socket.create_server(("", 0)) as earlier:
        hosts = OTHER_HOSTS["hosts"] | {"rendezvous_port": earlier.getsockname()[1]}
        config = make_run_config(trainer={"ranks": 2}, **OTHER_HOSTS | {"hosts": hosts})
        supervisor = Supervisor(config, tmp_path / "run.json")
        trainer = supervisor._processes["trainer-0"]
        supervisor._processes = {"trainer-0": trainer}
        trainer.requests = {
            name: replace(order, module="tests.unit.stand_in", imports=[], arguments=["drain"])
            for name, order in trainer.requests.items()
        }
        supervisor.start()
        deadline, trainer.start_after = trainer.port_deadline, 0.0
        assert deadline is not None
        supervisor.poll(Progress())
        assert trainer.port_deadline == deadline
        assert not trainer.is_running
        trainer.start_after = trainer.port_deadline = 0.0
        with pytest.raises(EnvironmentProblem, match=r"set hosts\.rendezvous_port"):
            supervisor.poll(Progress())
    trainer.port_deadline, trainer.start_after = deadline, 0.0
    supervisor.poll(Progress())
    assert [*trainer.pids] == ["trainer-0"]
    supervisor.stop(timeout_seconds=100)


def test_supervisor_does_not_count_workers_killed_by_the_health_manager(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    supervisor = ended(make_run_config(workers=NO_RESTART), RESTART_CODE)
    assert supervisor.poll(Progress())[0].startswith(
        "controller-0 was killed by the health manager"
    )


def test_worker_error_is_reported_even_if_the_run_folder_was_deleted(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    supervisor = ended(make_run_config(workers={"max_restarts": 1}), 2)
    for managed in supervisor._processes.values():
        shutil.rmtree(managed.logs, ignore_errors=True)
        managed.process = None
    supervisor.poll(Progress())
    for managed in supervisor._processes.values():
        assert managed.process is not None
        managed.process.wait(100)
    with pytest.raises(
        ConfigError,
        match=r"controller-0 can't continue: ended with exit code 2; log: .*:\nerror: the reason",
    ):
        supervisor.poll(Progress())


def test_drained_worker_is_restarted_after_a_delay_without_a_warning(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    supervisor = ended(make_run_config(), 0)
    assert supervisor.poll(Progress()) == supervisor.poll(Progress()) == []
    assert {managed.process for managed in supervisor._processes.values()} == {None}, (
        "the run may be ending: its command reaches workers first"
    )


def test_fenced_worker_stays_down_until_it_is_revived(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    supervisor = ended(make_run_config(), Fenced.exit_code)
    trainer = supervisor._processes["trainer-0"]
    assert trainer.process is not None
    pid = trainer.process.pid
    supervisor.poll(Progress())
    supervisor.poll(Progress())
    assert (trainer.process, supervisor.fenced["trainer-0"].pid) == (None, pid)
    supervisor.restart_fenced("trainer-0")
    supervisor.poll(Progress())
    assert trainer.process is not None
    trainer.process.wait(100)
    assert "trainer-0" not in supervisor.fenced


@pytest.mark.parametrize(
    ("how", "is_owed"),
    [
        (1, True),
        ("OutOfMemoryError", True),
        (RESTART_CODE, True),
        (0, False),
        (Fenced.exit_code, False),
    ],
)
def test_worker_that_died_without_a_final_heartbeat_is_detected(
    make_run_config: MakeRunConfig, ended: MakeEnded, how: int | str, is_owed: bool
) -> None:
    supervisor = ended(make_run_config(), how)
    process = supervisor._processes["trainer-0"].process
    assert process is not None
    newest = replace(make_heartbeat(process.pid, sent_at=FENCED_AT), host=socket.gethostname())
    assert supervisor.lacks_final_heartbeat(newest) is is_owed
    supervisor.poll(Progress())
    assert supervisor._processes["trainer-0"].process is None, "it is to be started again later"
    assert supervisor.lacks_final_heartbeat(newest) is is_owed
    for different in (
        {"state": WorkerState.STOPPED},
        {"pid": 1},
        {"host": "elsewhere"},
        {"worker_id": "other-0"},
    ):
        assert not supervisor.lacks_final_heartbeat(replace(newest, **different))


def test_missing_final_heartbeat_is_detected_for_an_earlier_dead_process(
    make_run_config: MakeRunConfig, ended: MakeEnded
) -> None:
    supervisor = ended(make_run_config(), 1)
    trainer = supervisor._processes["trainer-0"]
    assert trainer.process is not None
    first = replace(
        make_heartbeat(trainer.process.pid, sent_at=FENCED_AT), host=socket.gethostname()
    )
    supervisor.poll(Progress())
    died_again(supervisor, Progress(num_steps=1))
    assert supervisor.lacks_final_heartbeat(first), "the second one died before it said anything"


SECOND = 1_000_000
FENCED_AT = 100 * SECOND
OURS, OTHERS = 7, 8


def make_heartbeat(
    pid: int, *, sent_at: int, state: WorkerState = WorkerState.WORKING
) -> WorkerHeartbeat:
    """Make a heartbeat of one of two trainers."""
    return WorkerHeartbeat(
        worker_id="trainer-0",
        role="trainer",
        host="here",
        pid=pid,
        state=state,
        num_processed=0,
        num_in_flight=0,
        last_progress_at=sent_at,
        sent_at=sent_at,
    )


@pytest.mark.parametrize(
    ("newest", "over_after_seconds"),
    [
        (None, 60),
        (
            make_heartbeat(OURS, sent_at=FENCED_AT),
            60,
        ),  # ours spoke last, woken up and not yet aware that it was fenced
        (make_heartbeat(OTHERS, sent_at=FENCED_AT - SECOND), 60),
        (make_heartbeat(OTHERS, sent_at=FENCED_AT + 30 * SECOND), 90),
        (make_heartbeat(OTHERS, sent_at=FENCED_AT + 30 * SECOND, state=WorkerState.STOPPED), 35),
        (make_heartbeat(OURS, sent_at=FENCED_AT, state=WorkerState.STOPPED), 60),
    ],
)
def test_fencing_ends_when_the_other_worker_is_silent_or_has_stopped(
    newest: WorkerHeartbeat | None, over_after_seconds: int
) -> None:
    fencing = Fencing(OURS, FENCED_AT)
    over = [
        fencing.is_over(newest, now=FENCED_AT + after * SECOND, heartbeat_timeout_seconds=60.0)
        for after in (over_after_seconds, over_after_seconds + 1)
    ]
    assert over == [False, True]
