"""Which deaths of a worker count, and the restart delay or abort that follows."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.launcher import memory_kills
from relax_events.launcher.managed_process import DeathCount, Progress
from relax_events.launcher.memory_kills import MemoryKills
from relax_events.launcher.worker_processes import CLIENT_ABORT_TEXT, WorkerExit
from tests.unit.run_events import make_heartbeat

PID = 7


def of(worker_id: str, *, num_steps: int = 0, num_processed: int = 0, pid: int = PID) -> Progress:
    """Return what a run has achieved, and what one worker's process has."""
    return Progress(
        num_steps,
        {
            worker_id: replace(
                make_heartbeat(worker_id, at_seconds=1), pid=pid, num_processed=num_processed
            )
        },
    )


def counted(worker_id: str, *seen: Progress) -> list[tuple[int, int]]:
    """Return the counts after each death of a worker."""
    deaths, counts = DeathCount(), []
    for progress in seen:
        deaths = deaths.count_death(
            progress, worker_id=worker_id, role=worker_id.rpartition("-")[0], pid=PID
        )
        counts.append((deaths.num_idle, deaths.num_stalled))
    return counts


def test_deaths_are_counted_regardless_of_process_lifetime() -> None:
    assert counted("reward-0", *[Progress()] * 12) == [(count, count) for count in range(1, 13)]


def test_only_committed_steps_count_as_trainer_progress() -> None:
    trained = of("trainer-0", num_processed=640)
    assert counted(
        "trainer-0", trained, trained, replace(trained, num_steps=1), replace(trained, num_steps=1)
    ) == [(1, 1), (2, 2), (1, 1), (2, 2)]


def test_only_records_finished_by_its_own_process_count_as_worker_progress() -> None:
    finished, others = of("reward-0", num_processed=1), of("reward-0", num_processed=1, pid=PID + 1)
    assert counted("reward-0", Progress(), finished, others, finished) == [
        (1, 1),
        (1, 1),
        (2, 2),
        (1, 1),
    ]


def test_run_steps_reset_the_run_death_count_but_not_an_idle_workers_backoff() -> None:
    assert counted("reward-0", *(Progress(num_steps) for num_steps in (1, 2, 3))) == [
        (1, 1),
        (2, 1),
        (3, 1),
    ]


@pytest.mark.parametrize(
    ("is_elastic", "expected"), [(False, [False, False, False]), (True, [False, False, True])]
)
def test_elastic_worker_exceeds_its_death_limit_while_the_run_progresses(
    is_elastic: bool, expected: list[bool]
) -> None:
    deaths, found = DeathCount(), []
    for num_steps in (1, 2, 3):
        deaths = deaths.count_death(
            Progress(num_steps), worker_id="rollout-1", role="rollout", pid=PID
        )
        found.append(deaths.exceeds(2, is_elastic=is_elastic))
    assert found == expected


def test_restart_backoff_grows_up_to_thirty_seconds() -> None:
    assert [DeathCount(num_idle=count).backoff_seconds for count in range(6)] == [
        0.0,
        0.0,
        2.0,
        10.0,
        30.0,
        30.0,
    ]


def test_broker_client_abort_is_recognized_by_its_log_output(
    tmp_path: Path,
) -> None:
    log = tmp_path / "reward-0.log"
    abort = WorkerExit("reward-0", -signal.SIGABRT, log, None)
    assert abort.text == "ended by SIGABRT", "there is no log"
    log.write_text("free(): invalid pointer\n")
    assert abort.text == "ended by SIGABRT"
    log.write_text(
        "x" * 40_000
        + (
            '\npython3: rdbuf.c:1115: rd_slice_narrow_copy: Assertion `!*"BUG: ""total_offset '
            "wraparound\"' failed.\n"
        )
    )
    assert abort.text == CLIENT_ABORT_TEXT
    assert replace(abort, code=-signal.SIGKILL).text == "ended by SIGKILL"


def write_kills(folder: Path, *, of_machine: int, of_cgroup: int | None = None) -> None:
    """Write what the kernel counts; without a count of a cgroup there is no such file."""
    (folder / "vmstat").write_text(f"pgfault 12\noom_kill {of_machine}\nnuma_hit 3\n")
    (folder / "cgroup").write_text("4:memory:/older\n0::/some/container\n")
    events = folder / "sys/some/container/memory.events"
    if of_cgroup is not None:
        events.parent.mkdir(parents=True, exist_ok=True)
        events.write_text(f"low 0\nhigh 0\nmax 7\noom {of_cgroup}\noom_kill {of_cgroup}\n")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"of_machine": 3}, {"of_machine": 3}, ""),
        ({"of_machine": 3}, {"of_machine": 4}, "probably because memory ran out"),
        ({"of_machine": 3, "of_cgroup": 0}, {"of_machine": 4, "of_cgroup": 0}, ""),
        (
            {"of_machine": 3, "of_cgroup": 0},
            {"of_machine": 4, "of_cgroup": 1},
            "because memory ran out",
        ),
    ],
)
def test_death_by_sigkill_names_memory_when_the_kernel_has_killed_for_it(
    before: dict[str, int],
    after: dict[str, int],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_kills, "OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory_kills, "CGROUPS", tmp_path / "sys")
    monkeypatch.setattr(memory_kills, "VMSTAT", tmp_path / "vmstat")
    write_kills(tmp_path, **before)
    at_spawn = MemoryKills.read()
    write_kills(tmp_path, **after)
    killed = WorkerExit(
        "rollout-0", -signal.SIGKILL, tmp_path / "log", None, memory=at_spawn.explain()
    )
    if not expected:
        assert killed.text == "ended by SIGKILL"
        return
    assert killed.text.startswith(f"ended by SIGKILL, {expected}: ")
    assert "engine.max_running_samples" in killed.text
    assert "memory" not in replace(killed, code=-signal.SIGTERM).text


def test_kernel_without_counts_of_kills_explains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_kills, "OWN_CGROUP", tmp_path / "none")
    monkeypatch.setattr(memory_kills, "VMSTAT", tmp_path / "none")
    assert MemoryKills.read().explain() == ""


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.booleans()), min_size=1, max_size=8),
    st.booleans(),
)
def test_the_first_cause_of_a_loop_is_kept(seen: list[tuple[str, bool]], is_elastic: bool) -> None:
    """A committed step ends the loop of a worker that the run needs, not that of an elastic one."""
    deaths, num_steps, causes = DeathCount(), 0, list[str]()
    for cause, has_stepped in seen:
        num_steps += has_stepped
        causes = [*([] if has_stepped and not is_elastic else causes), cause]
        deaths = deaths.count_death(
            Progress(num_steps), worker_id="rollout-1", role="rollout", pid=PID, cause=cause
        )
    expected = causes[0] if causes[0] == cause else f"first of {causes[0]}; now of {cause}"
    assert deaths.describe_causes(cause, is_elastic=is_elastic) == expected
