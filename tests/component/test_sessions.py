"""The sessions of a run: which one is running, and their total time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax_events.projections.verdict import Verdict
from relax_events.reports.run_report import format_closing_line
from relax_events.session.records import RunSessions, Session, parse_sessions, session_seconds

SECOND = 1_000_000
HOLD = (
    "import sys; from pathlib import Path; from relax_events.session.records import RunSessions; "
)
HOLD += "held = RunSessions(Path(sys.argv[1])); held.__enter__(); print('in', flush=True); input()"


def test_killed_session_is_timed_up_to_its_last_step() -> None:
    sessions = [
        Session(1, "here", 10 * SECOND, 40 * SECOND),
        Session(2, "here", 100 * SECOND),
        Session(3, "here", 300 * SECOND),
    ]
    commits = [20 * SECOND, 130 * SECOND, 160 * SECOND, 510 * SECOND]
    assert session_seconds(sessions, commits, until=500 * SECOND) == [30.0, 60.0, 0.0]
    assert session_seconds([], commits, until=5 * SECOND) == []


def test_truncated_session_line_is_ignored() -> None:
    content = b'{"pid":1,"host":"here","started_at":5,"ended_at":null}\n{"pid":1,"host":"here","started_at":5,"ended_at":9}\n{"pid":2,"ho'
    assert parse_sessions(content) == [Session(1, "here", 5, 9)]


def test_other_session_is_listed_only_while_its_process_lives(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"in\n"
    with RunSessions(tmp_path) as second:
        assert [session.pid for session in second.others] == [other.pid]
        assert not second.is_alone()
        with RunSessions(tmp_path) as third:
            assert [session.pid for session in third.others] == [os.getpid()]
        other.kill()
        other.communicate()
        assert second.is_alone(), "the other one has ended meanwhile"
    with RunSessions(tmp_path) as last:
        assert last.others == []
        assert last.is_alone()
        assert [session.ended_at is None for session in last.earlier] == [True, False, False]
        assert last.total_seconds(5.0, [last.earlier[0].started_at + 7 * SECOND]) >= 5.0


def test_closing_line_reports_the_whole_run_and_the_resumed_session(tmp_path: Path) -> None:
    verdict = Verdict.build("reward_rises", {"first": 0.1, "newest": 0.5, "count": 3})
    report: dict[str, Any] = {
        "verdict": asdict(verdict),
        "reward_first": 0.1,
        "curves": {"reward_mean": [0.1, 0.3, 0.5], "loss": [2.0, 1.5, 1.0]},
        "steps": 3,
        "total_seconds": 61.2,
    }
    resumed = report | {"steps_of_session": 1, "wall_seconds": 19.0}
    assert format_closing_line(resumed, tmp_path) == (
        "reward 0.100 -> 0.500 in 3 steps, 61 s (1 steps in 19 s since it was resumed); "
        f"report: {tmp_path}/report.json"
    )
    alone = report | {"steps_of_session": 3, "wall_seconds": 61.2, "reward_first": None}
    (tmp_path / "report.html").touch()
    assert (
        format_closing_line(alone, tmp_path)
        == f"loss 2.000 -> 1.000 in 3 steps, 61 s; report: {tmp_path}/report.html"
    )
    stuck = Verdict.build("reward_flat", {"reward": 0.5, "count": 60}, runbook="RelaxRewardFlat")
    lines = format_closing_line(alone | {"verdict": asdict(stuck)}, tmp_path).splitlines()
    assert lines[1] == stuck.line
    assert stuck.line.startswith("stuck: The mean reward is 0.5 and has not risen in 60 steps. ")
