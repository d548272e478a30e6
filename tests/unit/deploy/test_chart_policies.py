"""Every pod of the chart has minimal rights and limits, and starts, reports and ends as its worker
does."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import yaml

from deploy.render import CHART, find_values
from relax_events.config import load_run_config
from relax_events.controller.scaling_bounds import ELASTIC_ROLES
from relax_events.objects.rights import FOLDERS, ROLE_STORE_RIGHTS
from relax_events.plugins import ROLES
from tests.unit.deploy.manifests import RELEASES, find, find_weaknesses, pods, role_of

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
INSTALLED = {role.name for role in entry_points(group=ROLES) if role.value.startswith("workers.")}
PODS = [pytest.param(manifest, template, id=name) for name, manifest, template in pods()]
WORKERS = [
    pytest.param(manifest, template, id=name)
    for name, manifest, template in pods()
    if role_of(template) in INSTALLED
]


def test_every_values_file_is_rendered() -> None:
    assert RELEASES.keys() == find_values().keys() == {"kind", "cluster", "critic", "existing"}


def test_roles_of_the_chart_are_the_installed_roles() -> None:
    assert VALUES["roles"].keys() - {"prepare"} == INSTALLED
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    (elastic,) = re.findall(r'define "relax.elastic" -}}([a-z -]+)\{\{- end', helpers)
    assert tuple(elastic.split()) == ELASTIC_ROLES


def test_roles_enabled_by_default_are_those_of_the_quickstart() -> None:
    config = load_run_config(CHART.parents[2] / "configs" / "quickstart.toml", environment={})
    enabled = {name for name, role in VALUES["roles"].items() if role.get("enabled")}
    assert enabled == set(config.roles())


@pytest.mark.parametrize(("manifest", "template"), PODS)
def test_pod_has_minimal_rights_and_limits(
    manifest: dict[str, Any], template: dict[str, Any]
) -> None:
    assert find_weaknesses(template["spec"]) == []


def first(change: Callable[[dict[str, Any]], object]) -> list[str]:
    """Return the weaknesses of a worker's pod that was changed."""
    template = next(one for _, _, one in pods() if role_of(one) in INSTALLED)
    spec = copy.deepcopy(template["spec"])
    change(spec)
    return find_weaknesses(spec)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda spec: spec["securityContext"].pop("runAsNonRoot"), "may run as root"),
        (lambda spec: spec["securityContext"].pop("seccompProfile"), "seccomp"),
        (lambda spec: spec.pop("automountServiceAccountToken"), "service account's token"),
        (lambda spec: spec.update(hostNetwork=True), "hostNetwork"),
        (
            lambda spec: spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
            "host path x",
        ),
        (lambda spec: spec["volumes"].append({"name": "x", "emptyDir": {}}), "no size of x"),
        (
            lambda spec: spec["containers"][0].update(image="a/b:latest"),
            "worker has no version",
        ),
        (lambda spec: spec["containers"][0].update(image="a/b"), "worker has no version"),
        (
            lambda spec: spec["containers"][0]["resources"]["limits"].clear(),
            "worker has no limit of memory",
        ),
        (
            lambda spec: spec["containers"][0]["securityContext"].update(privileged=True),
            "worker may gain privileges",
        ),
        (
            lambda spec: spec["containers"][0]["env"].append({"name": "A_TOKEN", "value": "x"}),
            "worker has the secret A_TOKEN",
        ),
    ],
)
def test_check_finds_what_a_change_weakens(
    change: Callable[[dict[str, Any]], object], found: str
) -> None:
    assert first(change) == [found]


@pytest.mark.parametrize(("manifest", "template"), WORKERS)
def test_worker_pod_has_probes_and_time_to_drain(
    manifest: dict[str, Any], template: dict[str, Any]
) -> None:
    spec = template["spec"]
    (worker,) = spec["containers"]
    environment = {one["name"]: one.get("value") for one in worker["env"]}
    (port,) = [one["containerPort"] for one in worker["ports"] if one["name"] == "metrics"]
    assert environment["RELAX_TELEMETRY__METRICS_PORT"] == str(port)
    assert worker["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert worker["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert worker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    drain = float(environment["RELAX_WORKERS__DRAIN_SECONDS"])
    assert spec["terminationGracePeriodSeconds"] > drain + 10
    assert f"relax worker {role_of(template)} configs/run.toml" in " ".join(worker["command"])


@pytest.mark.parametrize("release", RELEASES)
def test_settings_of_the_pods_are_valid(release: str) -> None:
    for name, _, template in pods():
        if name.startswith(f"{release}:") and role_of(template) in INSTALLED:
            worker = template["spec"]["containers"][0]
            given = {one["name"]: one["value"] for one in worker["env"] if "value" in one}
            config = load_run_config(
                CHART.parents[2] / "configs" / "quickstart.toml", environment=given
            )
            assert config.run.id == release
            assert config.telemetry.metrics_port == VALUES["metricsPort"]


def test_workers_that_may_be_added_have_an_index_for_life() -> None:
    for release in RELEASES:
        indexed = {
            role_of(one["spec"]["template"]) for one in find(release, "StatefulSet").values()
        }
        assert indexed - {"kafka", "trainer", "critic"} <= set(ELASTIC_ROLES)
        for one in find(release, "Deployment").values():
            assert role_of(one["spec"]["template"]) not in ELASTIC_ROLES


@pytest.mark.parametrize("role", ["trainer", "critic"])
def test_ranks_find_rank_0_of_their_role(role: str) -> None:
    ranks = find("critic", "StatefulSet")[f"critic-{role}"]["spec"]
    worker = ranks["template"]["spec"]["containers"][0]
    given = {one["name"]: one.get("value") for one in worker["env"]}
    assert ranks["replicas"] == 2
    assert ranks["podManagementPolicy"] == "Parallel"  # no rank is ready before all have met
    assert worker["command"] == ["relax", "worker", role, "configs/run.toml"]
    assert given["MASTER_ADDR"] == f"critic-{role}-0.{ranks['serviceName']}"
    assert given["WORLD_SIZE"] == given["RELAX_CRITIC__RANKS"] == given["RELAX_TRAINER__RANKS"]
    assert given["WORLD_SIZE"] == "2"
    (rank,) = (one for one in worker["env"] if one["name"] == "RANK")
    assert "apps.kubernetes.io/pod-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]


def test_reward_pods_read_the_files_and_reach_the_broker_alone() -> None:
    (spec,) = [
        template["spec"] for name, _, template in pods() if name == "existing:existing-reward"
    ]
    mounts = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "files"]
    assert [(one["mountPath"], one["readOnly"]) for one in mounts] == [("/srv/relax/.relax", True)]
    policies = find("kind", "NetworkPolicy")
    trusted = policies["kind-trusted"]["spec"]["podSelector"]["matchExpressions"]
    assert trusted == [
        {"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["kafka", "reward"]}
    ]
    ports = [
        one["port"] for rule in policies["kind-workers"]["spec"]["egress"] for one in rule["ports"]
    ]
    assert ports == [53, 53, 9092]


def principal_of(template: dict[str, Any]) -> str:
    """Return the role or person as whom the containers of a pod that are no init containers log
    in.
    """
    role = role_of(template)
    return {"prepare": "operator", "dashboard": "reader"}.get(role, role)


CLIENTS = [
    pytest.param(name.partition(":")[0], template, id=name)
    for name, _, template in pods()
    if role_of(template) != "kafka"
]


@pytest.mark.parametrize(("release", "template"), CLIENTS)
def test_each_pod_logs_in_to_kafka_as_its_own_principal(
    release: str, template: dict[str, Any]
) -> None:
    spec, principal = template["spec"], principal_of(template)
    (container,) = spec["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["RELAX_BROKER__USERNAME"] == f"relax.{release}.{principal}"
    assert environment["RELAX_BROKER__PASSWORD_FILE"] == "/run/secrets/broker/password"
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    secrets = {one["name"]: one for one in spec["volumes"]}
    if release in ("kind", "critic"):  # the chart's own broker
        paths = {one.get("subPath") for one in mounts.values() if one["name"] == "security"}
        assert paths == {f"secrets/relax.{release}.{principal}", "ca.pem"}
    elif release == "existing":
        assert secrets["broker"]["secret"]["secretName"] == f"broker-{principal}"
    else:
        (user, _) = secrets["broker"]["projected"]["sources"]
        assert user["secret"]["name"] == f"relax.{release}.{principal}"


def test_all_passwords_are_mounted_by_the_broker_and_the_job_before_the_run_alone() -> None:
    holders = {
        (role_of(template), container["name"])
        for _, _, template in pods()
        for container in [
            *template["spec"].get("initContainers", []),
            *template["spec"]["containers"],
        ]
        for mount in container["volumeMounts"]
        if mount["name"] == "security" and "subPath" not in mount
    }
    assert holders == {("kafka", "secure"), ("prepare", "access")}


def test_own_broker_lets_no_client_in_without_a_login() -> None:
    (broker,) = find("kind", "StatefulSet")["kind-kafka"]["spec"]["template"]["spec"]["containers"]
    settings = {one["name"]: one["value"] for one in broker["env"]}
    protocols = settings["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")
    assert sorted(protocols) == ["CLIENT:SASL_SSL", "CONTROLLER:SSL", "INTERNAL:SSL"]
    for listener in ("INTERNAL", "CONTROLLER"):
        assert settings[f"KAFKA_LISTENER_NAME_{listener}_SSL_CLIENT_AUTH"] == "required"
    assert settings["KAFKA_SASL_ENABLED_MECHANISMS"] == "SCRAM-SHA-512"
    assert settings["KAFKA_ALLOW_EVERYONE_IF_NO_ACL_FOUND"] == "false"
    assert settings["KAFKA_SUPER_USERS"] == "User:CN=relax.broker;User:relax.admin"
    assert not [name for name, value in settings.items() if "PLAINTEXT" in str(value)]
    assert settings["KAFKA_CONTROLLER_QUORUM_VOTERS"] == "1@kind-kafka:9093"


def test_own_broker_is_reached_by_clients_at_their_port_alone() -> None:
    first, second = find("kind", "NetworkPolicy")["kind-kafka"]["spec"]["ingress"]
    assert first["ports"] == [{"port": 9092, "protocol": "TCP"}]
    assert [one["port"] for one in second["ports"]] == [9093, 9094]
    (itself,) = second["from"]
    assert itself["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "kafka"


@pytest.mark.parametrize(("manifest", "template"), WORKERS)
def test_worker_may_change_the_objects_that_its_role_changes_and_no_others(
    manifest: dict[str, Any], template: dict[str, Any]
) -> None:
    release = manifest["metadata"]["name"].removesuffix(f"-{role_of(template)}")
    (worker,) = template["spec"]["containers"]
    mounts = {one["mountPath"]: one for one in worker["volumeMounts"] if one["name"] == "files"}
    run = f"/srv/relax/.relax/runs/{release}"
    writable = {path for path, one in mounts.items() if not one["readOnly"]}
    assert mounts["/srv/relax/.relax"]["readOnly"] is True
    folders = {
        f"{run}/objects/{one.rstrip('/')}" for one in ROLE_STORE_RIGHTS[role_of(template)].changes
    }
    own = set() if role_of(template) == "reward" else {run, "/srv/relax/.relax/media-cache"}
    is_in_bucket = release == "cluster"
    assert writable == own | (set() if is_in_bucket else folders)
    if own and not is_in_bucket:
        assert mounts[f"{run}/objects"]["readOnly"] is True
    for path, one in mounts.items():
        if path != "/srv/relax/.relax":
            assert one["subPath"] == path.removeprefix("/srv/relax/.relax/")


def test_each_role_has_its_own_credential_of_the_bucket() -> None:
    for name, _, template in pods():
        if name.startswith("cluster:"):
            (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == "objects"]
            assert volume["secret"]["secretName"] == f"objects-{principal_of(template)}"
            (container,) = template["spec"]["containers"]
            assert "envFrom" not in container
            environment = {one["name"]: one.get("value") for one in container["env"]}
            assert environment["OBJECTS_CREDENTIALS_FILE"] == "/run/secrets/objects/credentials"


def test_job_makes_the_folders_that_workers_mount() -> None:
    (job,) = find("kind", "Job").values()
    (prepare,) = job["spec"]["template"]["spec"]["containers"]
    made = prepare["command"][-1]
    for folder in FOLDERS:
        assert f"mkdir -p .relax/runs/kind/objects/{folder.rstrip('/')}" in made
    assert ".relax/media-cache .relax/runs/kind" in made


@pytest.mark.parametrize("release", RELEASES)
def test_no_release_has_a_right_on_the_cluster(release: str) -> None:
    assert not find(release, "Role")
    assert not find(release, "RoleBinding")


def test_api_scales_each_elastic_role_by_the_number_that_the_controller_desires() -> None:
    enabled = {name for name, role in VALUES["roles"].items() if role.get("enabled")}
    scaled = find("existing", "ScaledObject")
    assert scaled.keys() == {f"existing-{role}" for role in ELASTIC_ROLES if role in enabled}
    for name, found in scaled.items():
        role, spec = name.removeprefix("existing-"), found["spec"]
        assert spec["scaleTargetRef"] == {"kind": "StatefulSet", "name": name}
        (trigger,) = spec["triggers"]
        assert trigger["metadata"]["query"] == (
            f'max(relax_workers_desired{{run="existing",role="{role}"}})'
        )
        assert (trigger["metadata"]["threshold"], trigger["metadata"]["ignoreNullValues"]) == (
            "1",
            "false",
        ), "a pod for each desired worker, and no change without the metric"
    pod = find("existing", "Deployment")["existing-controller"]["spec"]["template"]["spec"]
    variables = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert variables["RELAX_SCALING__EXTERNAL_AUTOSCALER"] == "true"
    assert variables["RELAX_SCALING__MAX_WORKERS"] == str(spec["maxReplicaCount"])


def test_number_of_workers_is_left_to_what_scales_them() -> None:
    assert "replicas" not in find("cluster", "StatefulSet")["cluster-rollout"]["spec"]
    assert find("cluster", "StatefulSet")["cluster-reward"]["spec"]["replicas"] == 1
    sets = find("existing", "StatefulSet")
    assert {name for name, found in sets.items() if "replicas" in found["spec"]} == {
        "existing-trainer"
    }


@pytest.mark.parametrize("release", RELEASES)
def test_dashboard_is_reached_through_its_pod_alone(release: str) -> None:
    deployment = find(release, "Deployment")[f"{release}-dashboard"]
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["command"][:2] == ["relax", "dashboard"]
    assert "ports" not in container, "it listens on the loopback address of its pod"
    for probe in ("startupProbe", "livenessProbe"):
        assert "/dev/tcp/127.0.0.1/8321" in " ".join(container[probe]["exec"]["command"])
    labels = template["metadata"]["labels"].items()
    selecting = [
        name
        for name, service in find(release, "Service").items()
        if service["spec"]["selector"].items() <= labels
    ]
    assert selecting == []


@pytest.mark.parametrize("release", RELEASES)
def test_dashboard_reads_and_changes_nothing(release: str) -> None:
    spec = find(release, "Deployment")[f"{release}-dashboard"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounts = {
        one["mountPath"]: one["readOnly"]
        for one in container["volumeMounts"]
        if one["name"] != "tmp"
    }
    assert set(mounts.values()) == {True}
    assert not {"/run/secrets/scaling"} & mounts.keys()
    assert all(not one["name"].startswith("RELAX_SCALING") for one in container["env"])
    assert not [name for name in mounts if name.startswith("/security")]


def test_notes_warn_where_roles_share_a_user_or_a_credential() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    warned = re.findall(r"\{\{- (?:else )?if (.*) \}\}\n\nWARNING: (\w+ \w+)", notes)
    assert warned == [
        (".Values.kafka.secret", "all roles"),
        ('not (include "relax.hasLogin" .)', "no role"),
        (".Values.objects.secret", "all roles"),
    ]
