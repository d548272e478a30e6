"""The dashboards are what their definitions say, ask for metrics that are served, and Prometheus can read every query."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from stack.dashboards import DASHBOARDS, FOLDER, catalogue, files, plain_query

PROMTOOL = shutil.which("promtool")
PANELS = [panel for panels in DASHBOARDS.values() for panel in panels]


def test_files_are_up_to_date() -> None:
    assert {path.name: path.read_text() for path in FOLDER.glob("*.json")} == files(), "run: python -m stack.dashboards"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_panel_asks_for_metrics_that_are_served_of_the_chosen_run_alone(panel) -> None:
    assert panel.metrics
    assert set(panel.metrics) - catalogue().keys() == set()
    assert panel.query.count('run="$run"') == panel.query.count("relax_")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; it comes with Debian's package prometheus")
def test_prometheus_reads_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": plain_query(panel, run="r")} for number, panel in enumerate(PANELS)]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(path)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", files())
def test_dashboard_places_each_panel_on_its_own(name: str) -> None:
    tree = json.loads(files()[name])
    places = Counter((panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in tree["panels"])
    assert set(places.values()) == {1}
    assert [variable["name"] for variable in tree["templating"]["list"]] == ["run"]
    datasource = yaml.safe_load((FOLDER.parent / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in tree["panels"]} == {datasource["uid"]}
