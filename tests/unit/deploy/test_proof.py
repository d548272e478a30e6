"""What the proof of the chart reads from pods."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes.release import ended_with_its_run, is_ready


def pod_of(
    *, leaving: bool = False, ready: str = "True", **states: dict[str, Any]
) -> dict[str, Any]:
    metadata = {"name": "run-controller"} | ({"deletionTimestamp": "now"} if leaving else {})
    status = {"conditions": [{"type": "Ready", "status": ready}], "containerStatuses": [states]}
    return {"metadata": metadata, "status": status}


ENDED = {"terminated": {"exitCode": 0}}
FAILED = {"terminated": {"exitCode": 1}}
RUNNING: dict[str, Any] = {"running": {}}


@pytest.mark.parametrize(
    ("pod", "ended"),
    [
        (pod_of(state=RUNNING, lastState={}), False),
        (pod_of(state=RUNNING, lastState=FAILED), False),
        (pod_of(state=ENDED, lastState={}), True),
        (pod_of(state={"waiting": {}}, lastState=ENDED), True),
        (pod_of(state=ENDED, lastState={}, leaving=True), False),
        ({"metadata": {}, "status": {}}, False),
    ],
    ids=["running", "restarted", "ended", "ended and waiting", "drained", "pending"],
)
def test_run_is_over_when_its_controller_ends_in_a_pod_that_stays(
    pod: dict[str, Any], ended: bool
) -> None:
    assert ended_with_its_run(pod) is ended


@pytest.mark.parametrize(
    ("pod", "ready"),
    [
        (pod_of(), True),
        (pod_of(ready="False"), False),
        (pod_of(leaving=True), False),
        ({"metadata": {}, "status": {}}, False),
    ],
    ids=["ready", "starting", "leaving", "pending"],
)
def test_pod_is_ready_while_it_serves_and_stays(pod: dict[str, Any], ready: bool) -> None:
    assert is_ready(pod) is ready
