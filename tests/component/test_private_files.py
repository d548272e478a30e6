"""Files of a run are readable by its user alone, whatever the umask is."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson

from relax_events.config import RunConfig

MakeConfig = Callable[..., RunConfig]
PROGRAM = """
import sys
from pathlib import Path
from relax_events.config import load_run_config
from relax_events.runtime.private_files import keep_private
from relax_events.secret_handling import write_private
config = load_run_config(Path(sys.argv[1]), environment={})
keep_private(config)
write_private(config.run_directory / "report.html", b"page")
(config.run_directory / "logs").mkdir()
(config.run_directory / "logs" / "a.log").write_text("line")
"""


def modes_after(config: RunConfig, tmp_path: Path) -> dict[str, int]:
    """Return the modes of what a process leaves in a run's folder that begins with the usual
    mask."""
    run_file = tmp_path / "run.json"
    run_file.write_bytes(orjson.dumps(config.model_dump(mode="json")))
    subprocess.run([sys.executable, "-c", PROGRAM, run_file], check=True, umask=0o022)
    folder = config.run_directory
    return {
        str(path.relative_to(folder.parent)): stat.S_IMODE(path.stat().st_mode)
        for path in [folder, *folder.rglob("*")]
    }


def test_run_folder_and_its_contents_are_private(
    make_run_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_run_config(run={"id": "mine"})
    config.run_directory.mkdir(parents=True)
    config.run_directory.chmod(0o755)  # of an earlier release
    assert modes_after(config, tmp_path) == {
        "mine": 0o700,
        "mine/report.html": 0o600,
        "mine/logs": 0o700,
        "mine/logs/a.log": 0o600,
    }


def test_store_outside_the_run_folder_keeps_its_permissions(
    make_run_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_run_config(run={"id": "mine"}, objects={"uri": (tmp_path / "shared").as_uri()})
    assert modes_after(config, tmp_path) == {
        "mine": 0o700,
        "mine/report.html": 0o600,
        "mine/logs": 0o755,
        "mine/logs/a.log": 0o644,
    }
