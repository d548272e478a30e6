"""A run file is edited between two sessions of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Relax, report_of

pytestmark = pytest.mark.timeout(300)
RUN_SECONDS = 200.0


@pytest.mark.long
def test_changed_run_file_is_accepted_only_if_the_run_can_continue_with_it(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    broker = f"broker.bootstrap_servers={bootstrap_servers}"
    first = relax("run", run_file, broker, timeout_seconds=RUN_SECONDS)
    assert first.code == 0, first.err

    further = ("run", run_file, broker, "run.num_steps=5")
    refused = relax(
        *further, "run.prompts_per_step=2", "--accept-changes", timeout_seconds=RUN_SECONDS
    )
    assert refused.code == 2
    assert "run.prompts_per_step: 4 -> 2" in refused.err
    assert f"relax runs fork {run_id} NEW_ID run.prompts_per_step=2" in refused.err

    asked = relax(*further, "trainer.learning_rate=1e-4", timeout_seconds=RUN_SECONDS)
    assert asked.code == 2
    assert "--accept-changes" in asked.err
    assert "trainer.learning_rate:" in asked.err
    assert "run.num_steps" not in asked.err

    taken = relax(
        *further, "trainer.learning_rate=1e-4", "--accept-changes", timeout_seconds=RUN_SECONDS
    )
    assert taken.code == 0, taken.err
    assert "trainer.learning_rate:" in taken.err
    (change,) = report_of(tmp_path, run_id)["config_changes"]
    assert change["from_version"] == 3
    assert any(text.startswith("trainer.learning_rate: ") for text in change["changes"])
    shown = relax("runs", "show", run_id, "--bootstrap-servers", bootstrap_servers)
    assert "from version 3" in shown.out
