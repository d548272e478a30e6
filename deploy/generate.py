"""Write the files of the Helm chart that have their source elsewhere: the alerts, the settings of
the single broker, and each role's rights on the log and on the object store.

python -m deploy.generate
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from relax_events.kafka.security.acls import Acl, build_acls, build_username
from relax_events.kafka.security.folder import SecurityFolder
from relax_events.kafka.security.settings import build_broker_settings
from relax_events.objects.rights import FOLDERS, STORE_RIGHTS
from relax_events.ops.topic_documents import group_acls

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "relax-events"
COMPOSE = ROOT / "compose"
RUN = "RUN"
"""Stands for the run's id, which the chart puts in."""
TEMPLATED = {
    "KAFKA_HEAP_OPTS",
    "KAFKA_LISTENERS",
    "KAFKA_ADVERTISED_LISTENERS",
    "KAFKA_CONTROLLER_QUORUM_VOTERS",
}
"""Settings of the broker that the chart's template gives."""
CLIENTS = "CLIENT"
"""Name of the clients' listener. Kafka's image requires key stores with passwords for listeners
named SASL_SSL."""
BROKER_FILE, CA_FILE = "/etc/kafka/secrets/broker.pem", "/run/secrets/broker_ca"
ESCAPES = {".": "_", "_": "__", "-": "___"}


def build_variable_name(key: str) -> str:
    """Return the environment variable that sets a property of Kafka in its image."""
    return "KAFKA_" + "".join(ESCAPES.get(letter, letter.upper()) for letter in key)


def build_settings() -> dict[str, str]:
    """Return the broker's settings of the container stack, without the template's, with a
    login for every client.
    """
    stack = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())
    settings: dict[str, str] = stack["services"]["kafka"]["environment"]
    secured = build_broker_settings(
        SecurityFolder(Path("/security")), key_file=Path(BROKER_FILE), clients=CLIENTS
    ) | {"ssl.truststore.location": CA_FILE}
    settings |= {build_variable_name(key): value for key, value in secured.items()}
    return {name: value for name, value in settings.items() if name not in TEMPLATED}


def build_store_access() -> dict[str, list[str]]:
    """Return the folders of the object store that each role or person changes, and all of them
    under the name `all`.
    """
    changed = {principal: rights.changes for principal, rights in STORE_RIGHTS.items()}
    return {
        principal: [folder.rstrip("/") for folder in folders]
        for principal, folders in {"all": FOLDERS, **changed}.items()
    }


def build_access(acls: list[Acl]) -> dict[str, list[dict[str, Any]]]:
    """Return ACLs as Strimzi's KafkaUser has them, by role or person."""
    prefix = build_username(RUN, "")
    return {user.removeprefix(prefix): rules for user, rules in group_acls(acls).items()}


def build_files() -> dict[str, str]:
    """Return the generated files of the chart, by name."""
    return {
        "alerts.yml": (COMPOSE / "prometheus" / "alerts.yml").read_text(),
        "broker.yml": yaml.safe_dump(build_settings()),
        "access.json": json.dumps(build_access(build_acls(RUN)), indent=1) + "\n",
        "store.json": json.dumps(build_store_access(), indent=1) + "\n",
    }


def main() -> None:
    """Write the files."""
    for name, text in build_files().items():
        (CHART / "files" / name).write_text(text)


if __name__ == "__main__":
    main()
