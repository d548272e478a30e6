"""The dashboards equal their definitions, and query metrics that exist."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import yaml

from compose.grafana.generate import DASHBOARDS, FOLDER, catalogue, files

PANELS = [panel for panels in DASHBOARDS.values() for panel in panels]


def test_generated_dashboard_files_are_up_to_date() -> None:
    assert {path.name: path.read_text() for path in FOLDER.glob("*.json")} == files(), (
        "run: python -m compose.grafana.generate"
    )


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_panel_queries_only_exported_metrics_of_the_chosen_run(panel) -> None:
    assert panel.metrics
    assert set(panel.metrics) - catalogue().keys() == set()
    assert panel.query.count('run="$run"') == panel.query.count("relax_")


@pytest.mark.parametrize("name", files())
def test_dashboard_panels_have_distinct_positions(name: str) -> None:
    tree = json.loads(files()[name])
    positions = Counter((panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in tree["panels"])
    assert set(positions.values()) == {1}
    assert [variable["name"] for variable in tree["templating"]["list"]] == ["run"]
    datasource = yaml.safe_load(
        (FOLDER.parent / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in tree["panels"]} == {datasource["uid"]}
