"""The endurance benchmark: processes are told apart, growth is what grows, and the page follows
from what was seen."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from benchmarks import endurance
from benchmarks.curve_plot import Curve, small_multiples
from benchmarks.processes import DECODER, RUN, is_as_forked, memory_of, roles_below
from benchmarks.watched_run import Look, blocks_of, port_of

WAIT = "import sys; sys.stdin.read()"


def look(step: int) -> Look:
    """Look at a run whose controller takes 2 KiB more each step, and whose control log takes 1
    KiB."""
    memory = {
        "controller": 50 * 2**20 + 2048 * step,
        RUN: 2**20,
        "broker": 3 * 2**20,
        "trainer": 2**20,
    }
    return Look(
        10.0 * step,
        step,
        memory,
        {"log, control": 1024 * step, "logs": 0, "figures": 0, "media": 2**20},
        {"reward": step % 3},
    )


def test_growth_is_the_slope_over_the_settled_part() -> None:
    looks = [look(step) for step in range(1, 400, 20)]
    assert endurance.growth(looks, lambda one: one.memory_bytes["controller"]) == pytest.approx(
        2048
    )
    assert endurance.growth(looks, lambda one: one.disk_bytes["media"]) == pytest.approx(
        0, abs=1e-6
    )
    jump = [look(1), *(look(step) for step in range(200, 400, 20))]
    assert endurance.growth(jump, lambda one: 0 if one.train_step < 200 else 5) == pytest.approx(
        0, abs=1e-9
    )


def test_page_says_what_grows(tmp_path: Path) -> None:
    (tmp_path / "runs" / endurance.RUN_ID).mkdir(parents=True)
    steps = list(range(400))
    curves = {
        "train_step": steps,
        "reward_mean": [0.25] * 3 + [1.0] * 397,
        "step_seconds": [0.5] * 400,
    }
    found = {"curves": curves, "samples_lost": 0, "ledger_problems": [], "wall_seconds": 200.0}
    (tmp_path / "runs" / endurance.RUN_ID / "report.json").write_text(json.dumps(found))
    (tmp_path / "looks.json").write_text(
        json.dumps([asdict(look(step)) for step in range(0, 400, 10)])
    )
    endurance.publish(tmp_path, to=tmp_path)
    page = (tmp_path / "media-endurance.md").read_text()
    assert "| controller | 50.4 |" in page
    assert "Mean reward 0.25 in the first three steps, 1.000 from step 200 on" in page
    assert (
        "controller and `relax run` keep the figures of each step and the end of each prompt "
        "group, 2.0 and 0.0 KiB a step"
    ) in page
    assert "its control log, logs and figures, by 1.0 KiB." in page
    assert (tmp_path / "media-endurance.svg").read_text().count('class="name"') == 9


def test_panels_have_their_own_axes_where_they_show_different_things() -> None:
    panels = {"a": [Curve([0, 1], [0.0, 1.0])], "b": [Curve([0, 1], [0.0, 500.0])]}
    assert small_multiples(panels, title="both").count(">400<") == 2
    assert small_multiples(panels, title="each", own_axes=True).count(">400<") == 1


def test_processes_are_told_apart_and_children_count_to_their_parents_role() -> None:
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAIT!r}, {{}}])"
    workers = [
        subprocess.Popen([sys.executable, "-c", script.format(name), *words], stdin=subprocess.PIPE)
        for name, words in (
            ("''", ["worker", "reward"]),
            ("'relax_events.media.decoder_child'", ["worker", "trainer"]),
        )
    ]
    try:
        known: dict[psutil.Process, str] = {}
        for worker in workers:
            while all(is_as_forked(child) for child in psutil.Process(worker.pid).children()):
                worker.poll()
        roles = roles_below(psutil.Process(), known)
        assert {
            psutil.Process(worker.pid): role
            for worker, role in zip(workers, ("reward", "trainer"), strict=True)
        }.items() <= roles.items()
        assert [roles[psutil.Process(worker.pid).children()[0]] for worker in workers] == [
            "reward",
            DECODER,
        ]
        assert memory_of(roles)["reward"] > 2**20
    finally:
        for worker in workers:
            worker.communicate(timeout=60)
    left = roles_below(psutil.Process(), known)
    assert left[psutil.Process()] == RUN
    assert not {process.pid for process in left} & {worker.pid for worker in workers}


def test_the_role_of_a_process_that_was_just_forked_is_asked_again() -> None:
    program = f"[sys.executable, '-c', {WAIT!r}, 'relax_events.media.decoder_child']"
    script = (
        "import os, sys; child = os.fork(); child and os.waitpid(child, 0); child or "
        f"(os.read(0, 1), os.execv(sys.executable, {program}))"
    )
    known: dict[psutil.Process, str] = {}
    with subprocess.Popen(
        [sys.executable, "-c", script, "worker", "trainer"], stdin=subprocess.PIPE, bufsize=0
    ) as worker:
        assert worker.stdin is not None
        while not (children := psutil.Process(worker.pid).children()):
            worker.poll()
        assert roles_below(psutil.Process(), known)[children[0]] == "trainer"
        worker.stdin.write(b"!")
        while is_as_forked(children[0]):
            worker.poll()
        assert roles_below(psutil.Process(), known)[children[0]] == known[children[0]] == DECODER


def test_disk_and_ports_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(100_000))
    assert 100_000 <= blocks_of(tmp_path) < 110_000
    assert blocks_of(tmp_path / "none") == 0
    log = tmp_path / "reward-0.log"
    log.write_text(
        '{"event":"x"}\n{"metrics_port":1,"event":"worker.started"}\n{"metrics_port":2,"event":"worker.started"}\n'
    )
    assert port_of(log) == 2
