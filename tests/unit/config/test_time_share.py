"""Devices that trainer and engines hold in turn: where they can't, the run file is refused."""

from __future__ import annotations

from typing import Any

import pytest
from small_settings import small_run

from relax_events.config import RunConfig

pytestmark = pytest.mark.unit
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"run": {"mode": "async", "max_staleness": 1}, "engine": {"name": "sglang"}},
        r"run\.mode = 'async' takes the device from requests that run",
    ),
    (
        {
            "run": {"mode": "async", "max_staleness": 1},
            "workers": {"hybrid": True},
        },
        r"each sample that is scored; set workers\.hybrid = false",
    ),
    (
        {"engine": {"name": "sglang", "sglang": {"urls": ["http://127.0.0.1:1"]}}},
        r"servers that rollout workers start, and engine\.sglang\.urls names running ones",
    ),
    ({"weights": {"transport": "nccl"}}, r"weights\.transport = 'nccl' sends"),
    ({"algorithm": {"name": "sft"}}, "is 'dataset'"),
    ({"parent": {"run": "other"}}, "a replay has none; leave it out"),
]


def run_with(**sections: dict[str, Any]) -> RunConfig:
    settings: dict[str, dict[str, Any]] = {
        "run": {"id": "test", "mode": "sync", "max_staleness": 0},
        "model": {"path": "unused"},
        "data": {"source": "jsonl:unused"},
        "devices": {"time_share": True, "trainer": [0], "rollout": [0]},
    }
    names = settings | sections
    return small_run({name: settings.get(name, {}) | sections.get(name, {}) for name in names})


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_turns_without_a_worker_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_with(**sections)


def test_asynchronous_trainer_may_lend_its_device() -> None:
    assert run_with(run={"mode": "async", "max_staleness": 1}).devices.time_share


def test_turns_do_not_count_as_a_role() -> None:
    assert run_with().devices.by_role() == {"trainer": (0,), "rollout": (0,)}
