"""The wheel holds every file of the package, and its `relax` works without a checkout."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.installed_wheel import ROOT, Installed, install_wheel

ELSEWHERE = {
    "schemas": "relax_events/schemas",
    "configs": "relax_events/launcher/run_file/configs",
}
"""Folders of the checkout that the wheel has within the package."""
ALERTS = "relax_events/packages/dashboard/alerts.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install_wheel(tmp_path_factory.mktemp("wheel"))


def files_of(folder: str) -> set[str]:
    """Return the files of a folder of the checkout, by their path in it."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {
        str(path.relative_to(ROOT / folder)) for path in found if "__pycache__" not in path.parts
    }


def test_wheel_holds_every_file_of_the_package(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as opened:
        names = set(opened.namelist())
    wanted = {
        f"{inside}/{name}"
        for folder, inside in (
            ELSEWHERE | {"relax_events": "relax_events", "workers": "workers"}
        ).items()
        for name in files_of(folder)
    }
    assert len(wanted) > 500
    assert sorted({*wanted, ALERTS} - names) == []
    top = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"relax_events", "workers"}


def test_installed_relax_writes_its_run_files_and_lists_rewards(
    installed: Installed, tmp_path: Path
) -> None:
    written = installed.call("init", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert "configs/quickstart.toml" in written.stdout.splitlines()
    for name in files_of("configs"):
        assert (tmp_path / "configs" / name).read_bytes() == (ROOT / "configs" / name).read_bytes()
    known = installed.call("rewards", cwd=tmp_path)
    assert known.returncode == 0, known.stderr
    assert "gsm8k" in known.stdout


def test_run_files_that_differ_are_not_overwritten(installed: Installed, tmp_path: Path) -> None:
    changed = tmp_path / "configs" / "quickstart.toml"
    changed.parent.mkdir()
    changed.write_text("[run]\n")
    refused = installed.call("init", cwd=tmp_path)
    assert (refused.returncode, list(changed.parent.iterdir())) == (2, [changed])
    assert "configs/quickstart.toml differ from the run files of this release" in refused.stderr
    assert installed.call("init", "--force", cwd=tmp_path).returncode == 0
    assert "string_insertion" in changed.read_text()
