"""The quickstart learns its task from the shipped run file, with every role, and its ledger
balances.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Relax, report_of

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


@pytest.mark.timeout(600)
def test_quickstart_learns_its_task(
    relax: Relax, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    given = (
        f"run.id={run_id}",
        f"broker.bootstrap_servers={bootstrap_servers}",
        f"model.path={tmp_path / 'model'}",
    )
    ended = relax("run", QUICKSTART, *given, timeout_seconds=580)
    assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    assert (report["succeeded"], report["steps"], report["ledger_problems"]) == (True, 60, [])
    assert report["reward_first"] < 0.5
    assert report["reward_last_10"] > 0.8
    assert report["staleness_max"] <= 2
