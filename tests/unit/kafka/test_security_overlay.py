"""The overlay that secures the container stack: each service gets only its own secrets, and Kafka's
image accepts its settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_events.config import RunConfig
from relax_events.kafka.security.folder import SecurityFolder
from relax_events.ops.compose_overlay import environment_variable
from relax_events.ops.security import create_folder

STACK = yaml.safe_load((Path(__file__).parents[3] / "compose" / "docker-compose.yml").read_text())[
    "services"
]


Overlay = Callable[..., dict[str, Any]]


@pytest.fixture
def overlay(make_run_config: Callable[..., RunConfig]) -> Overlay:
    def make(path: Path, *hosts: str) -> dict[str, Any]:
        config = make_run_config()
        create_folder(config, path, hosts=hosts, lifetime=timedelta(days=1))
        written: dict[str, Any] = json.loads(
            SecurityFolder(path).overlay_file(config.run.id).read_text()
        )
        return written

    return make


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
    assert environment_variable(key) == name


def test_each_project_service_uses_its_own_broker_principal(
    tmp_path: Path, overlay: Overlay
) -> None:
    made = overlay(tmp_path, "kafka")
    clients = {name: service for name, service in made["services"].items() if "secrets" in service}
    assert clients.keys() == {name for name, service in STACK.items() if "build" in service} - {
        "model"
    }
    for name, service in clients.items():
        (own,) = [secret["source"] for secret in service["secrets"] if isinstance(secret, dict)]
        assert own == (
            name
            if name in STACK and STACK[name].get("command", [""])[0] == "worker"
            else "operator"
        )
        assert (
            Path(made["secrets"][own]["file"]).name
            == service["environment"]["RELAX_BROKER__USERNAME"]
        )


def test_overlay_contains_no_password_and_few_services_mount_all_secrets(
    tmp_path: Path, overlay: Overlay
) -> None:
    made = overlay(tmp_path, "kafka")
    text = json.dumps(made)
    assert not [file.name for file in (tmp_path / "secrets").iterdir() if file.read_text() in text]
    seeing = {
        name
        for name, service in made["services"].items()
        if f"{tmp_path}:{tmp_path}:ro" in service.get("volumes", [])
    }
    assert seeing == {"access", "format-kafka"}


def test_overlay_configures_the_stack_listeners_for_one_and_three_brokers(
    tmp_path: Path, overlay: Overlay
) -> None:
    alone = overlay(tmp_path / "one", "kafka")["services"]["kafka"]["environment"]
    assert alone["KAFKA_ADVERTISED_LISTENERS"] == "CLIENT://kafka:9092,INTERNAL://kafka:9094"
    assert (
        alone["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"]
        == "CONTROLLER:SSL,INTERNAL:SSL,CLIENT:SASL_SSL"
    )
    assert alone["KAFKA_CONTROLLER_QUORUM_VOTERS"] == "1@kafka:9093"
    hosts = ("kafka", "kafka-2", "kafka-3")
    three = overlay(tmp_path / "three", *hosts)["services"]
    assert [three[f"format-{host}"]["command"][-1] for host in hosts] == ["1", "2", "3"]
    assert [three[f"format-{host}"]["volumes"][0].partition(":")[0] for host in hosts] == [
        "log",
        "log-2",
        "log-3",
    ]
    assert all("KAFKA_CONTROLLER_QUORUM_VOTERS" not in three[host]["environment"] for host in hosts)
    assert three["access"]["depends_on"].keys() == set(hosts)
