"""The quickstart runs from the wheel in a fresh environment: the package, its workers, schemas, run
files and page come from there, and the checkout is out of reach.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import report_of, snapshot_of

from tests.installed_wheel import install_wheel


@pytest.mark.long
@pytest.mark.timeout(900)
def test_quickstart_runs_from_the_wheel(tmp_path: Path) -> None:
    installed = install_wheel(tmp_path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert installed.call("init", cwd=folder).returncode == 0
    ended = installed.call(
        "run", "configs/quickstart.toml", "run.num_steps=4", cwd=folder, timeout_seconds=700
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "http://127.0.0.1:" in ended.stdout + ended.stderr, "the page's address"
    report = report_of(folder, "quickstart")
    assert (report["succeeded"], report["steps"], report["ledger_problems"]) == (True, 4, [])
    assert snapshot_of(folder / ".relax" / "runs" / "quickstart")
    checked = installed.call("ledger", "check", "configs/quickstart.toml", cwd=folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    where = installed.call("--version", cwd=folder)
    assert where.returncode == 0
    assert (installed.site_packages / "workers" / "trainer.py").is_file()
