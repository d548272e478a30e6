"""The alerts of compose/prometheus: every alert has test cases, its metrics exist, and it links to
what to do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_events.config import RunConfig
from relax_events.controller.metrics import HealthMetrics, RunMetrics
from relax_events.packages.dashboard.registry import find_runbook
from relax_events.projections.health import HealthState
from relax_events.projections.run_state import RunState
from relax_events.telemetry.metrics import ErrorMetrics, WorkerMetrics

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "compose" / "prometheus"
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0][
    "rules"
]
ALERTS = [rule for rule in RULES if "alert" in rule]


def test_every_alert_has_a_firing_and_a_non_firing_test_case() -> None:
    cases: Counter[tuple[str, bool]] = Counter()
    for test in yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]:
        for case in test["alert_rule_test"]:
            cases[case["alertname"], bool(case["exp_alerts"])] += 1
    assert set(cases) == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_links_to_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch("(Relax)([A-Z][a-z]+)+", rule["alert"])
    severity = rule["labels"]["severity"]
    assert severity in ("info", "warning", "critical")
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    page = (ROOT / path).read_text()
    assert anchor == rule["alert"].lower()
    assert f"\n## {rule['alert']}\n" in page
    assert f"| [{rule['alert']}](#{anchor}) | {severity} |" in page
    assert find_runbook(rule["alert"]).startswith(f"# {rule['alert']}\n\n")


def test_alerts_query_only_exported_metrics(make_run_config: Callable[..., RunConfig]) -> None:
    config = make_run_config()
    families = [
        *WorkerMetrics("trainer").registry.collect(),
        *RunMetrics(config, RunState()).collect(),
    ]
    families += ErrorMetrics("trainer", broker={}, objects={}, away_seconds=float).collect()
    families += HealthMetrics(
        HealthState.from_config(config, own_id="controller-0"), config
    ).collect()
    served = {f"{family.name}{'_total' if family.type == 'counter' else ''}" for family in families}
    asked = {name for rule in RULES for name in re.findall(r"\brelax_\w+", rule["expr"])}
    assert asked - served == set()
