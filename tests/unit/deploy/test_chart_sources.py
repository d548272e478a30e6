"""The chart's manifests fit the schemas of Kubernetes and of the operators, and what it copies is
what it was copied from."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
import yaml
from small_settings import small_run

from deploy.generate import CHART, COMPOSE, build_files, build_variable_name
from deploy.schemas import SCHEMAS
from deploy.topics import build_values
from relax_events.kafka.security.acls import build_acls
from relax_events.topics import TopicPlan
from tests.unit.deploy.manifests import RELEASES, find

FOUND: dict[str, Any] = json.loads(SCHEMAS.read_text())


def problems_of(manifest: dict[str, Any]) -> list[str]:
    """Return where a manifest differs from the schema of its kind."""
    kind = FOUND["kinds"][f"{manifest['apiVersion']} {manifest['kind']}"]
    schema = {"allOf": [kind], "definitions": FOUND["definitions"]}
    return [
        f"{'/'.join(map(str, error.instance_path))}: {error.message}"
        for error in jsonschema_rs.validator_for(schema).iter_errors(manifest)
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_manifests_fit_their_schemas(release: str) -> None:
    found = {
        f"{one['kind']} {one['metadata']['name']}": problems_of(one) for one in RELEASES[release]
    }
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_schema_check_finds_a_misspelt_key_and_a_wrong_type() -> None:
    (trainer,) = [
        found for name, found in find("kind", "StatefulSet").items() if name == "kind-trainer"
    ]
    changed = {**trainer, "spec": {**trainer["spec"], "replica": 1, "serviceName": 2}}
    assert len(problems_of(changed)) == 2


def test_every_schema_is_of_a_kind_that_the_chart_can_make() -> None:
    used = {f"{one['apiVersion']} {one['kind']}" for found in RELEASES.values() for one in found}
    topics = "kafka.strimzi.io/v1 KafkaTopic"  # of a run file: see deploy/topics.py
    assert used | {topics} == FOUND["kinds"].keys()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (
            "listener.name.client.scram-sha-512.sasl.jaas.config",
            "KAFKA_LISTENER_NAME_CLIENT_SCRAM___SHA___512_SASL_JAAS_CONFIG",
        ),
        ("ssl.keystore.type", "KAFKA_SSL_KEYSTORE_TYPE"),
        ("a_b", "KAFKA_A__B"),
    ],
)
def test_property_maps_to_the_environment_variable_of_the_kafka_image(key: str, name: str) -> None:
    assert build_variable_name(key) == name


@pytest.mark.parametrize("name", build_files())
def test_copied_file_is_up_to_date(name: str) -> None:
    text = (CHART / "files" / name).read_text()
    assert text == build_files()[name], "run python -m deploy.generate, then make charts"


def test_prometheus_rule_is_our_alerts() -> None:
    (rule,) = find("existing", "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((COMPOSE / "prometheus" / "alerts.yml").read_text())


def test_users_of_strimzi_have_exactly_our_rights() -> None:
    words = {"transactionalId": "transactional_id", "prefix": "prefixed"}
    operations = {"DescribeConfigs": "describe_configs"}
    granted = {
        (name, words.get(one["resource"]["type"], one["resource"]["type"]), one["resource"]["name"],
         words.get(one["resource"]["patternType"], "literal"), operations.get(word, word.lower()))
        for name, user in find("cluster", "KafkaUser").items()
        for one in user["spec"]["authorization"]["acls"]
        for word in one["operations"]
    }  # fmt: skip
    users = set(find("cluster", "KafkaUser"))
    wanted = {
        (acl.username, acl.resource, acl.name, acl.pattern, acl.operation)
        for acl in build_acls("cluster")
        if acl.username in users
    }
    assert granted == wanted
    assert {"relax.cluster.operator", "relax.cluster.trainer"} <= users


def test_topics_for_strimzi_are_those_of_the_plan() -> None:
    config = small_run(
        {"run": {"id": "run"}, "model": {"path": "model"}, "data": {"source": "jsonl:rows"}}
    )
    topics = build_values(config)["kafka"]["strimzi"]["topics"]
    planned = TopicPlan.from_config(config).specs()
    assert [(f"relax.run.{one['entity']}", one["partitions"], one["config"]) for one in topics] == [
        (one.name, one.num_partitions, one.settings) for one in planned
    ]


def test_scaled_object_uses_the_query_of_our_keda_manifest() -> None:
    (found,) = find("cluster", "ScaledObject").values()
    ours = yaml.safe_load((COMPOSE / "keda.yml").read_text())["spec"]
    (trigger,), (own,) = found["spec"]["triggers"], ours["triggers"]
    assert trigger["metadata"]["query"] == own["metadata"]["query"].replace("RUN", "cluster")
    assert trigger["metadata"]["threshold"] == own["metadata"]["threshold"]
    assert found["spec"]["advanced"] == ours["advanced"]
