"""Workers of two roles in one process: which are paired, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_settings import small_run

from relax_events.config import RunConfig
from relax_events.launcher.supervisor import Supervisor

pytestmark = pytest.mark.unit
BOTH = {"algorithm": {"kl_coefficient": 0.001, "old_logprobs": "actor"}}


def run_with(**sections: dict[str, Any]) -> RunConfig:
    """Return a hybrid run with further settings."""
    settings: dict[str, dict[str, Any]] = {
        "run": {"id": "test"},
        "model": {"path": "unused"},
        "data": {"source": "jsonl:unused"},
        "workers": {"hybrid": True},
    }
    names = settings | sections
    return small_run({name: settings.get(name, {}) | sections.get(name, {}) for name in names})


def test_pairs_are_of_the_roles_that_the_run_has() -> None:
    assert run_with(**BOTH).hosted_pairs() == (
        ("reference", "actor-forward"),
        ("reward", "advantage"),
    )
    plain = {"algorithm": {"kl_coefficient": 0.0, "old_logprobs": "rollout"}}
    assert run_with(**plain).hosted_pairs() == (("reward", "advantage"),)
    assert run_with(**BOTH, workers={"hybrid": False}).hosted_pairs() == ()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"workers": {"reference": 2}},
            r"workers\.reference = 2 is not workers\.actor_forward = 1; set both",
        ),
        ({"workers": {"advantage": 2}}, r"workers\.reward = 1 is not workers\.advantage = 2"),
        ({"broker": {"credentials": "folder"}}, r"broker\.credentials gives each role a user"),
    ],
)
def test_workers_that_can_not_be_paired_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_with(**BOTH | sections)


def test_supervisor_starts_one_process_for_a_pair(tmp_path: Path) -> None:
    config = run_with(
        **BOTH,
        run={"directory": tmp_path},
        telemetry={"metrics_port": 9000},
        workers={"reward": 2, "advantage": 2},
    )
    processes = Supervisor(config, tmp_path / "run.toml")._processes
    assert "actor-forward-0" not in processes
    assert "advantage-1" not in processes
    pair = processes["reward-1"]
    assert pair.hosted == "advantage-1"
    assert pair.holds("reward-1")
    assert pair.holds("advantage-1")
    assert not pair.holds("advantage-0")
    (order,) = pair.requests.values()
    assert order.arguments[:2] == ["worker", "reward+advantage"]
    assert order.arguments[-2:] == ["--index", "1"]
    ports = {name: one.metrics_port for name, one in processes.items()}
    assert ports["reward-1"] == ports["reward-0"] + 2, "the other worker has the port between"
    assert len(ports) == len(set(ports.values()))
