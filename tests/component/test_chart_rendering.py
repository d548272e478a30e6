"""helm accepts the chart, renders what is committed, and refuses wrong values by their name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

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
        ("kafka.secretPrefix=broker", "/kafka/secretPrefix"),
        ("kafka.own.clusterId=short", "/kafka/own/clusterId"),
        ("objects.secretPrefix=a,objects.secret=b", "/objects/secret"),
        ("roles.nurse.enabled=true", "'nurse' not allowed"),
        ("roles.controller.replicas=2", "/roles/controller/replicas"),
        ("drainSeconds=0", "/drainSeconds"),
        ("trainer.queue=gpus", "/trainer/queue"),
        ("run.environment.PATH=/", "'PATH' does not match"),
        ("run.environment.RELAX_RUN__ID=x", "RELAX_RUN__ID"),
        ("roles.rollout.environment.RELAX_TRAINER__RANKS=2", "RELAX_TRAINER__RANKS"),
        ("run.file=", "run.file must hold the run file's text"),
    ],
)
def test_wrong_value_is_refused_by_its_name(value: str, named: str) -> None:
    done = render("run", "--set", value)
    assert done.returncode == 1
    assert named in done.stderr


@pytest.mark.parametrize("name", ["2nd", "a.b", "a" * 39])
def test_release_whose_name_fits_no_service_or_pod_is_refused(name: str) -> None:
    done = render(name)
    assert done.returncode == 1
    assert "the release's name" in done.stderr


def test_large_number_of_a_values_file_stays_an_integer(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "run: {environment: {RELAX_RUN__NUM_STEPS: 1000000}}\ndrainSeconds: 1000000\n"
    )
    done = render("run", "--values", str(values))
    assert '{name: RELAX_RUN__NUM_STEPS, value: "1000000"}' in done.stdout, done.stderr
    assert '{name: RELAX_WORKERS__DRAIN_SECONDS, value: "1000000"}' in done.stdout


def test_environment_of_a_role_replaces_that_of_the_run() -> None:
    given = [
        f"{where}.environment.RELAX_HEALTH__START_SECONDS={value}"
        for where, value in (("run", 1), ("roles.rollout", 2))
    ]
    found = yaml.safe_load_all(render("run", "--set", ",".join(given)).stdout)
    values = {
        one["metadata"]["name"]: [
            variable["value"]
            for variable in one["spec"]["template"]["spec"]["containers"][0]["env"]
            if variable["name"] == "RELAX_HEALTH__START_SECONDS"
        ]
        for one in found
        if one and one["kind"] == "StatefulSet"
    }
    assert values["run-rollout"] == ["2"]
    assert values["run-reward"] == ["1"]


def find_job(*words: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the pod of the job that prepares a run."""
    found = yaml.safe_load_all(render("run", *words).stdout)
    (job,) = [one for one in found if one and one["kind"] == "Job"]
    return job["metadata"]["name"], job["spec"]["template"]


@pytest.mark.parametrize(
    "changed",
    [
        "drainSeconds=30",
        "roles.rollout.replicas=2",
        "run.environment.RELAX_RUN__NUM_STEPS=7",
        "roles.prepare.resources.limits.memory=4Gi",
        "images.model=relax-events:2",
    ],
)
def test_upgrade_changes_no_pod_of_an_existing_job(changed: str) -> None:
    name, pod = find_job()
    assert (name, pod) == find_job()
    new_name, new_pod = find_job("--set", changed)
    assert new_pod != pod
    assert new_name != name, "the API server refuses to change a Job's pod"


def test_user_and_credential_for_all_roles_are_taken_where_they_are_given() -> None:
    given = (
        "kafka.kind=existing,kafka.bootstrapServers=a:9092,kafka.username=relax,kafka.secret=broker,"
        "objects.uri=s3://bucket/runs,objects.secret=objects"
    )
    _, pod = find_job("--set", given)
    (prepare,) = pod["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in prepare["env"]}
    assert environment["RELAX_BROKER__USERNAME"] == "relax"
    assert prepare["envFrom"] == [{"secretRef": {"name": "objects"}}]
    assert "OBJECTS_CREDENTIALS_FILE" not in environment
    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "broker"]
    assert volume["secret"]["secretName"] == "broker"


def test_cluster_without_a_login_gets_none() -> None:
    _, pod = find_job("--set", "kafka.kind=existing,kafka.bootstrapServers=a:9092")
    (prepare,) = pod["spec"]["containers"]
    assert not [one for one in prepare["env"] if one["name"].startswith("RELAX_BROKER__USER")]
    assert not [one for one in pod["spec"]["volumes"] if one["name"] in ("broker", "security")]
