"""helm accepts the chart, renders what is committed, and refuses wrong values by their name."""

from __future__ import annotations

import os
import shutil

import pytest

from deploy.generate import CHART
from deploy.render import RENDERED, find_values, render, run_helm

HELM = shutil.which(os.environ.get("HELM", "helm"))
pytestmark = pytest.mark.skipif(
    HELM is None, reason="helm is not installed; put it on PATH, or name it by HELM"
)


def test_helm_lint_has_no_complaint() -> None:
    done = run_helm("lint", str(CHART), "--strict", "--set", "run.file=x")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "values"), find_values().items())
def test_rendered_chart_is_the_committed_one(name: str, values: object) -> None:
    done = render(name, "--values", str(values))
    assert done.stdout == (RENDERED / f"{name}.yaml").read_text(), done.stderr or "run make charts"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("scaling.by=api", "/scaling/tokenSecret"),
        ("images.light=relax-events:latest", "/images/light"),
        ("images.model=relax-events", "/images/model"),
        ("kafka.kind=existing", "/kafka/bootstrapServers"),
        ("kafka.replicationFactor=3", "/kafka/replicationFactor"),
        ("roles.nurse.enabled=true", "'nurse' not allowed"),
        ("roles.controller.replicas=2", "/roles/controller/replicas"),
        ("drainSeconds=0", "/drainSeconds"),
        ("trainer.queue=gpus", "/trainer/queue"),
        ("run.environment.PATH=/", "'PATH' does not match"),
        ("run.file=", "run.file must hold the run file's text"),
    ],
)
def test_wrong_value_is_refused_by_its_name(value: str, named: str) -> None:
    done = render("run", "--set", value)
    assert done.returncode == 1
    assert named in done.stderr
