"""Whole runs that sample on an SGLang server: they learn what engine `transformers` learns."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import call_relax, log_of, report_of

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


TURNS = ("run.mode=sync", "run.max_staleness=0", "devices.time_share=true")


@pytest.mark.parametrize(
    ("name", "settings"),
    [("quickstart", ()), ("colours", ()), ("quickstart", TURNS)],
    ids=["quickstart", "colours", "quickstart-in-turns"],
)
def test_run_learns_on_sglang(
    name: str,
    settings: tuple[str, ...],
    sglang_python: str,
    bootstrap_servers: str,
    run_id: str,
    tmp_path: Path,
) -> None:
    own = (
        f"run.id={run_id}",
        f"run.directory={tmp_path / '.relax'}",
        f"model.path={tmp_path / 'model'}",
    )
    servers = (
        f"broker.bootstrap_servers={bootstrap_servers}",
        f"engine.sglang.python={sglang_python}",
    )
    ended = call_relax(
        "run",
        f"configs/{name}-sglang.toml",
        *own,
        *servers,
        *settings,
        cwd=ROOT,
        timeout_seconds=2300,
    )
    assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    assert (
        report["steps"],
        report["samples_lost"],
        report["samples_trained_twice"],
        report["ledger_problems"],
    ) == (60, 0, 0, [])
    rewards = report["curves"]["reward_mean"]
    assert rewards[0] < 0.4
    assert sum(rewards[-10:]) / 10 > 0.9
    if settings == TURNS:
        events = [event["event"] for event in log_of(tmp_path, run_id, "rollout-0")]
        assert events.count("engine.memory_released") >= 59
        assert events.count("engine.memory_resumed") >= 59
