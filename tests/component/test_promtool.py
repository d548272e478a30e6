"""Prometheus parses the alerts and the dashboards' queries, and the alerts' own test cases pass."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from compose.grafana.generate import DASHBOARDS, plain_query

ALERTS = Path(__file__).parents[2] / "compose" / "prometheus"
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed; it comes with Debian's package prometheus"
)


def promtool(*words: str) -> None:
    """Run promtool, and show its output when it fails."""
    done = subprocess.run(
        [str(PROMTOOL), *words],
        cwd=ALERTS,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alert_rules_pass_their_promtool_unit_tests() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_prometheus_reads_every_query(tmp_path: Path) -> None:
    panels = [panel for panels in DASHBOARDS.values() for panel in panels]
    rules = [
        {"record": f"panel:{number}", "expr": plain_query(panel, run="r")}
        for number, panel in enumerate(panels)
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(path))
