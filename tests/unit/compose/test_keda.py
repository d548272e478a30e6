"""The KEDA manifests name existing metrics, topics and groups, and the default settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_settings import small_run

from compose.grafana.generate import catalogue
from relax_events.topics import TopicPlan

FOLDER = Path(__file__).parents[3] / "compose"
OBJECTS: dict[str, dict[str, Any]] = {
    path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("keda*.yml"))
}
CONFIG = small_run(
    {"run": {"id": "run"}, "model": {"path": "model"}, "data": {"source": "jsonl:rows"}}
)
PLAN = TopicPlan.from_config(CONFIG)


def trigger_of(name: str, kind: str) -> dict[str, str]:
    (trigger,) = OBJECTS[name]["spec"]["triggers"]
    assert trigger["type"] == kind
    return dict(trigger["metadata"])


@pytest.mark.parametrize("found", OBJECTS.values(), ids=OBJECTS)
def test_scaled_object_scales_rollout_workers_within_bounds(found: dict[str, Any]) -> None:
    assert (found["apiVersion"], found["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = found["spec"]
    assert spec["scaleTargetRef"] == {"kind": "Deployment", "name": "relax-rollout"}
    assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert all(
        isinstance(value, str)
        for trigger in spec["triggers"]
        for value in trigger["metadata"].values()
    ), "KEDA takes text alone"


def test_scaling_query_uses_exported_metrics() -> None:
    trigger = trigger_of("keda.yml", "prometheus")
    asked = set(re.findall(r"\brelax_\w+", trigger["query"]))
    assert asked == {"relax_prompt_groups_queued", "relax_run_inactive"}
    assert asked <= catalogue().keys()
    assert int(trigger["threshold"]) == CONFIG.num_lanes


def test_lag_trigger_names_the_group_and_topic_of_rollout_workers() -> None:
    trigger = trigger_of("keda-consumer-group.yml", "apache-kafka")
    assert trigger["consumerGroup"] == PLAN.consumer_group("rollout").replace(".run.", ".RUN.")
    assert trigger["topic"] == PLAN.topic("prompt.groups").replace(".run.", ".RUN.")
    assert int(trigger["lagThreshold"]) == CONFIG.num_lanes
