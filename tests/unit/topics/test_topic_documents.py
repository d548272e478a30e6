"""A run's topics and rights as documents of other tools, checked by these tools' own schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import jsonschema_rs
import pytest

from deploy.schemas import SCHEMAS
from relax_events.cli.app import app
from relax_events.config import RunConfig
from relax_events.events.schemas import schema_fingerprint
from relax_events.kafka.security.acls import Acl
from relax_events.ops.security import build_run_acls
from relax_events.ops.topic_documents import build_asyncapi, build_strimzi
from relax_events.topics import TopicPlan

ASYNCAPI: dict[str, Any] = json.loads((Path(__file__).parent / "asyncapi-3.0.0.json").read_text())
STRIMZI: dict[str, Any] = json.loads(SCHEMAS.read_text())
CLUSTER = {"bootstrap_servers": "kafka-1:9093,kafka-2:9093", "username": "trainer"}
MakeConfig = Callable[..., RunConfig]


def list_errors(schema: dict[str, Any], document: object) -> list[str]:
    return [
        f"{'/'.join(map(str, error.instance_path))}: {error.message[:200]}"
        for error in jsonschema_rs.validator_for(schema).iter_errors(document)
    ]


def resolve(document: dict[str, Any], reference: dict[str, str]) -> Any:
    node: Any = document
    for part in reference["$ref"].removeprefix("#/").split("/"):
        node = node[part]
    return node


@pytest.mark.parametrize("broker", [{}, CLUSTER, {"schema_registry": "http://registry:8081"}])
def test_asyncapi_document_fits_its_schema(
    broker: dict[str, Any], make_run_config: MakeConfig
) -> None:
    document = build_asyncapi(make_run_config(broker=broker))
    assert list_errors(ASYNCAPI, document) == []
    document["channels"]["prompt.groups"]["bindings"]["kafka"]["partitions"] = "many"
    document["operations"]["trainer reads advantage.samples"]["action"] = "publish"
    assert len(list_errors(ASYNCAPI, document)) == 2


def test_asyncapi_document_has_every_topic_with_the_schemas_of_its_records(
    make_run_config: MakeConfig,
) -> None:
    config = make_run_config(broker=CLUSTER)
    document, plan = build_asyncapi(config), TopicPlan.from_config(config)
    addresses = {channel["address"]: channel for channel in document["channels"].values()}
    assert addresses.keys() == {spec.name for spec in plan.specs()}
    samples = document["channels"]["rollout.samples"]
    assert samples["bindings"]["kafka"]["partitions"] == plan.num_sample_partitions
    (message,) = samples["messages"].values()
    payload = resolve(document, message)["payload"]
    assert payload["schemaFormat"] == "application/vnd.apache.avro;version=1.9.0"
    assert payload["schema"]["name"] == "SamplesRolledOut"
    for shown in document["components"]["messages"].values():
        if "schemaFormat" in shown["payload"]:
            schema = shown["payload"]["schema"]
            fastavro.parse_schema(schema, named_schemas={})
            assert shown["x-fingerprint"] == schema_fingerprint(schema).hex()
    assert document["servers"]["kafka-1"]["protocol"] == "kafka-secure"


@pytest.mark.parametrize(
    ("client", "protocol"), [({}, "kafka"), ({"security.protocol": "ssl"}, "kafka-secure")]
)
def test_asyncapi_servers_have_the_protocol_of_the_client(
    client: dict[str, str], protocol: str, make_run_config: MakeConfig
) -> None:
    broker = {"bootstrap_servers": "kafka-1:9093", "client": client}
    servers = build_asyncapi(make_run_config(broker=broker))["servers"]
    assert servers == {"kafka-1": {"host": "kafka-1:9093", "protocol": protocol}}


def test_asyncapi_operations_are_the_roles_rights(make_run_config: MakeConfig) -> None:
    config = make_run_config()
    document = build_asyncapi(config)
    shown = {
        (name.split()[0], operation["action"], resolve(document, operation["channel"])["address"])
        for name, operation in document["operations"].items()
    }
    actions = {"read": "receive", "write": "send"}
    topics = {channel["address"] for channel in document["channels"].values()}
    expected = {
        (acl.username.split(".")[-1], actions[acl.operation], acl.name)
        for acl in build_run_acls(config)
        if acl.resource == "topic" and acl.operation in actions and acl.name in topics
    }
    assert shown == {row for row in expected if row[0] in config.roles()}
    assert ("rollout", "receive", f"relax.{config.run.id}.prompt.groups") in shown


def test_strimzi_resources_fit_their_definitions_and_give_exactly_the_runs_rights(
    make_run_config: MakeConfig,
) -> None:
    config = make_run_config(broker=CLUSTER | {"replication_factor": 3})
    resources = build_strimzi(config, cluster="shared")
    for one in resources:
        kind = STRIMZI["kinds"][f"{one['apiVersion']} {one['kind']}"]
        schema = {"allOf": [kind], "definitions": STRIMZI["definitions"]}
        assert list_errors(schema, one) == [], one["metadata"]["name"]
        assert list_errors(schema, one | {"spec": {"replica": 1}}) != []
        assert one["metadata"]["labels"] == {"strimzi.io/cluster": "shared"}
    topics = {one["metadata"]["name"]: one for one in resources if one["kind"] == "KafkaTopic"}
    specs = {spec.name: spec for spec in TopicPlan.from_config(config).specs()}
    assert topics.keys() == specs.keys()
    for name, spec in specs.items():
        shown = topics[name]["spec"]
        assert (shown["partitions"], shown["replicas"]) == (spec.num_partitions, 3)
        assert shown["config"] == spec.settings
    given = {
        to_acl(one["metadata"]["name"], rule, operation)
        for one in resources
        if one["kind"] == "KafkaUser"
        for rule in one["spec"]["authorization"]["acls"]
        for operation in rule["operations"]
    }
    people = {*config.roles(), "operator", "reader"}
    assert given == {acl for acl in build_run_acls(config) if acl.username.split(".")[-1] in people}


def to_acl(username: str, rule: dict[str, Any], operation: str) -> Acl:
    """Read a rule as Strimzi's user operator does."""
    resource = rule["resource"]
    kinds = {"transactionalId": "transactional_id"}
    names = {"DescribeConfigs": "describe_configs", "AlterConfigs": "alter_configs"}
    return Acl(
        username,
        kinds.get(resource["type"], resource["type"]),
        resource["name"],
        {"prefix": "prefixed"}.get(resource["patternType"], resource["patternType"]),
        names.get(operation, operation.lower()),
    )


@pytest.mark.parametrize("form", ["asyncapi", "strimzi"])
def test_command_prints_a_document_without_a_broker(
    form: str, make_run_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run_config(broker=CLUSTER)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    app(["topics", "apply", str(file), "--output", form])
    document = json.loads(capsys.readouterr().out)
    expected = {
        "asyncapi": build_asyncapi(config),
        "strimzi": {
            "apiVersion": "v1",
            "kind": "List",
            "items": build_strimzi(config, cluster="relax"),
        },
    }
    assert document == expected[form]
