"""The handle to a run that was trained from Python, without a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from relax_events.launcher.run_handle import Run

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.toml"


def test_wait_ends_at_its_timeout_and_shows_the_output_while_the_run_has_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Run, "_find_log", lambda _: None)
    run = Run(QUICKSTART, on_step=lambda _: None)
    run._output = tmp_path / "relax-run.log"
    run._output.write_text("fetching the model\nfetched 1")
    with subprocess.Popen(["sleep", "600"]) as run._process:
        with pytest.raises(TimeoutError, match=r"run quickstart has not ended after 0.1 s"):
            run.wait(timeout=0.1)
        assert run.is_alive
        run._process.kill()
    assert capsys.readouterr().err == "fetching the model\n"
