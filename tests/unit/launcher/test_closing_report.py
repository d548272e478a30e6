"""The closing check of a run meets an outage of the broker."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_events.cli.run import run
from relax_events.config import RunConfig
from relax_events.errors import BrokerRefused, BrokerUnavailable, CheckFailed, RelaxError
from relax_events.events.parts import Command
from relax_events.events.types import RunCommanded
from relax_events.launcher import closing_report, preparation
from relax_events.launcher.closing_report import NUM_TRIES, ClosingReport
from relax_events.launcher.run import RunSession
from relax_events.reports.terminal import ProgressDisplay
from relax_events.runtime.drain import Drain
from relax_events.session.records import RunSessions

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
REACHED = RunCommanded(command=Command.STOP, reason="all 60 train steps are done", succeeded=True)
OUTAGE = BrokerUnavailable("listing topics: _TRANSPORT")
REPORT = {"steps": 60}


class FakeLedger:
    """A ledger with these broken promises."""

    def __init__(self, *problems: str) -> None:
        self._problems = list(problems)

    def problems(self) -> list[str]:
        return self._problems


@pytest.fixture
def finish(
    make_run_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Any] | None, str, int]]:
    """Return a function that finishes a run whose log is read with these results, and returns the
    report, what was printed, and how often the broker was tended."""
    monkeypatch.setattr(closing_report, "PAUSE_SECONDS", 0.0)

    def finish(
        ended: RunCommanded | None, *results: RelaxError | FakeLedger
    ) -> tuple[dict[str, Any] | None, str, int]:
        left, num_tended, lines = list(results), [0], io.StringIO()

        def write_final_report(*_: object, **__: object) -> tuple[dict[str, Any], FakeLedger]:
            if isinstance(result := left.pop(0), RelaxError):
                raise result
            return REPORT, result

        def tend() -> None:
            num_tended[0] += 1

        monkeypatch.setattr(closing_report, "write_final_report", write_final_report)
        config = make_run_config(run={"directory": tmp_path})
        with ProgressDisplay(config, stream=lines) as display:
            report = ClosingReport(
                config, RunSessions(tmp_path), Drain(seconds=1.0), display, tend_broker=tend
            ).finish(ended, 1.0)
        assert left == []
        return report, lines.getvalue(), num_tended[0]

    return finish


Finish = Callable[..., tuple[dict[str, Any] | None, str, int]]


def test_run_that_reached_its_goal_succeeds_when_its_log_can_not_be_checked(
    finish: Finish,
) -> None:
    report, text, num_tended = finish(REACHED, *[OUTAGE] * NUM_TRIES)
    assert report is None
    assert "reached its goal, but its log was not checked and it has no report" in text
    assert "listing topics: _TRANSPORT" in text
    assert "`relax report` with the run file" in text
    assert num_tended == NUM_TRIES - 1


def test_check_that_met_an_outage_is_repeated(finish: Finish) -> None:
    report, text, _ = finish(REACHED, OUTAGE, FakeLedger())
    assert report == REPORT
    assert "not checked" not in text


def test_broken_promise_is_never_excused_by_an_outage(finish: Finish) -> None:
    with pytest.raises(CheckFailed, match="sample trained twice"):
        finish(REACHED, OUTAGE, FakeLedger("sample trained twice"))


def test_refusal_is_no_outage(finish: Finish) -> None:
    with pytest.raises(BrokerRefused, match="no right to read"):
        finish(REACHED, BrokerRefused("no right to read"))


@pytest.mark.parametrize("ended", [None, RunCommanded(command=Command.STOP, reason="asked")])
def test_outage_after_a_run_that_missed_its_goal_is_its_error(
    ended: RunCommanded | None, finish: Finish
) -> None:
    with pytest.raises(BrokerUnavailable, match="_TRANSPORT"):
        finish(ended, OUTAGE)


def test_command_of_a_run_that_could_not_be_checked_names_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preparation, "prepare_run", lambda _: None)
    monkeypatch.setattr(RunSession, "run", lambda _: None)
    run(QUICKSTART, f"run.directory={tmp_path}", "run.id=one")
    assert capsys.readouterr().out == (
        f"export the model: relax models export one --to one-model --directory {tmp_path}\n"
    )
