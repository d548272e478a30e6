"""A run's topics and rights as documents for other tools: AsyncAPI, and Strimzi's resources.

Source: AsyncAPI 3.0.0 with Kafka bindings 0.5.0; Strimzi's CustomResourceDefinitions KafkaTopic and
KafkaUser, kafka.strimzi.io/v1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from relax_events import __version__
from relax_events.config import RunConfig
from relax_events.config.addresses import EMBEDDED, list_addresses, split_address
from relax_events.events.sample_columns import get_record_kind
from relax_events.events.schemas import current_schemas, event_schemas, schema_fingerprint
from relax_events.kafka.security.acls import Acl, build_username
from relax_events.ops.security import build_run_acls
from relax_events.topics import TopicPlan
from relax_events.topics.names import SCHEMAS
from relax_events.topics.plan import EVENTS_ON, TopicSpec

PEOPLE = ("operator", "reader")
STRIMZI_VERSION = "kafka.strimzi.io/v1"
BINDING = {"bindingVersion": "0.5.0"}
AVRO = "application/vnd.apache.avro"
WRITER_SCHEMA = "WriterSchema"
_ACTIONS = {"read": ("receive", "reads"), "write": ("send", "writes")}
_STRIMZI_NAMES = {"transactional_id": "transactionalId", "prefixed": "prefix"}


def build_asyncapi(config: RunConfig) -> dict[str, Any]:
    """Return an AsyncAPI 3.0 document of a run: a channel for each topic, a message for each kind
    of record with its Avro schema, and an operation for each role that reads or writes a topic.

    An embedded broker, whose port is not known before its start, leaves out the servers.
    """
    plan = TopicPlan.from_config(config)
    specs = {plan.parse_entity(spec.name): spec for spec in plan.specs()}
    events = {entity: _list_messages(entity) for entity in specs}
    names = {name for of_topic in events.values() for name in of_topic}
    servers = _build_servers(config)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": f"Relax Events, run {config.run.id}",
            "version": __version__,
            "description": "Records of a reinforcement-learning run, by topic.",
        },
        **({"servers": servers} if servers else {}),
        "channels": {
            entity: _build_channel(spec, events[entity]) for entity, spec in specs.items()
        },
        "operations": _build_operations(config, {spec.name: name for name, spec in specs.items()}),
        "components": {"messages": _build_messages(config, names)},
    }


def _list_messages(entity: str) -> list[str]:
    if entity == SCHEMAS:
        return [WRITER_SCHEMA]
    return [get_record_kind(kind).__name__ for kind in EVENTS_ON.get(entity, ())]


def _build_servers(config: RunConfig) -> dict[str, Any]:
    broker = config.broker
    if broker.bootstrap_servers == EMBEDDED:
        return {}
    has_users = bool(broker.username or broker.credentials)
    access: dict[str, Any] = {"protocol": "kafka"}
    if has_users or str(broker.client.get("security.protocol", "PLAINTEXT")).upper() != "PLAINTEXT":
        access["protocol"] = "kafka-secure"
    if has_users:
        access["security"] = [{"type": "scramSha512"}]
    servers = {}
    for address in list_addresses(broker.bootstrap_servers):
        host, port = split_address(address)
        servers[host if host not in servers else f"{host}-{port}"] = {
            "host": f"{host}:{port}",
            **access,
        }
    return servers


def _build_channel(spec: TopicSpec, messages: Iterable[str]) -> dict[str, Any]:
    numbers = ("retention.ms", "retention.bytes", "delete.retention.ms", "max.message.bytes")
    settings: dict[str, Any] = {
        key: int(value) if key in numbers else value for key, value in spec.settings.items()
    }
    settings["cleanup.policy"] = spec.settings["cleanup.policy"].split(",")
    return {
        "address": spec.name,
        "description": spec.doc,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
        "bindings": {
            "kafka": {
                "topic": spec.name,
                "partitions": spec.num_partitions,
                "replicas": spec.replication_factor,
                "topicConfiguration": settings,
                **BINDING,
            }
        },
    }


def _build_operations(config: RunConfig, entities: dict[str, str]) -> dict[str, Any]:
    users = {build_username(config.run.id, role): role for role in config.roles()}
    operations = {}
    for acl in build_run_acls(config):
        if acl.username in users and acl.name in entities and acl.operation in _ACTIONS:
            action, verb = _ACTIONS[acl.operation]
            entity = entities[acl.name]
            operations[f"{users[acl.username]} {verb} {entity}"] = {
                "action": action,
                "channel": {"$ref": f"#/channels/{entity}"},
            }
    return operations


def _build_messages(config: RunConfig, names: set[str]) -> dict[str, Any]:
    """Return the messages of these names. The Avro schemas are complete in themselves, as on
    control.schemas.
    """
    has_registry = bool(config.broker.schema_registry)
    framing = (
        {"schemaIdLocation": "payload", "schemaIdPayloadEncoding": "confluent"}
        if has_registry
        else {}
    )
    key = {"kafka": {"key": {"type": "string"}, **framing, **BINDING}}
    encoding = (
        "00, a schema id of four bytes, big-endian, and the Avro record"
        if has_registry
        else "Avro single-object encoding: C3 01, the fingerprint's eight bytes, and the record"
    )
    messages: dict[str, Any] = {}
    for schema in event_schemas(current_schemas()).values():
        if schema["name"] in names:
            messages[schema["name"]] = {
                "contentType": AVRO,
                "description": f"{schema['doc']}\n\nBytes: {encoding}.",
                "payload": {"schemaFormat": f"{AVRO};version=1.9.0", "schema": schema},
                "bindings": key,
                "x-fingerprint": schema_fingerprint(schema).hex(),
            }
    if WRITER_SCHEMA in names:
        messages[WRITER_SCHEMA] = {
            "contentType": "application/json",
            "description": "A writer's Avro schema; its key is the fingerprint in hexadecimal.",
            "payload": {"type": "object"},
            "bindings": {"kafka": {"key": {"type": "string"}, **BINDING}},
        }
    return messages


def build_strimzi(config: RunConfig, *, cluster: str) -> list[dict[str, Any]]:
    """Return Strimzi's resources of a run: its topics, and a user with its rights for each role of
    the run, the operator and the reader.

    Args:
        config: The run.
        cluster: Name of the Kafka resource of the cluster.
    """
    users = {build_username(config.run.id, name) for name in (*config.roles(), *PEOPLE)}
    rights = group_acls(acl for acl in build_run_acls(config) if acl.username in users)
    topics = [
        _build_resource(
            "KafkaTopic",
            spec.name,
            cluster,
            {
                "partitions": spec.num_partitions,
                "replicas": spec.replication_factor,
                "config": spec.settings,
            },
        )
        for spec in TopicPlan.from_config(config).specs()
    ]
    return topics + [
        _build_resource("KafkaUser", user, cluster, _build_user(rules))
        for user, rules in rights.items()
    ]


def _build_user(rules: list[dict[str, Any]]) -> dict[str, Any]:
    acls = [
        {
            "resource": {
                "type": rule["resource"],
                "name": rule["name"],
                "patternType": rule["pattern"],
            },
            "operations": rule["operations"],
        }
        for rule in rules
    ]
    return {
        "authentication": {"type": "scram-sha-512"},
        "authorization": {"type": "simple", "acls": acls},
    }


def _build_resource(kind: str, name: str, cluster: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": STRIMZI_VERSION,
        "kind": kind,
        "metadata": {"name": name, "labels": {"strimzi.io/cluster": cluster}},
        "spec": spec,
    }


def group_acls(acls: Iterable[Acl]) -> dict[str, list[dict[str, Any]]]:
    """Return ACLs in the words of Strimzi's KafkaUser, by user, with all operations on a resource
    in one rule.
    """
    operations: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for acl in acls:
        operations[acl.username, acl.resource, acl.name, acl.pattern].append(acl.operation)
    rules: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (username, resource, name, pattern), names in sorted(operations.items()):
        rules[username].append(
            {
                "resource": _STRIMZI_NAMES.get(resource, resource),
                "name": name,
                "pattern": _STRIMZI_NAMES.get(pattern, pattern),
                "operations": ["".join(map(str.title, one.split("_"))) for one in names],
            }
        )
    return dict(rules)
