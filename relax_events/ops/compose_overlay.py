"""Writes the overlay that secures the container stack: each service has its own principal, and the
brokers have certificates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_events.kafka.security.acls import ROLE_PERMISSIONS, build_username
from relax_events.kafka.security.folder import EMBEDDED_HOST, SecurityFolder
from relax_events.kafka.security.settings import build_broker_settings

CLIENTS = "CLIENT"
"""Name of the clients' listener. Kafka's image requires key stores with passwords for listeners
named SASL_SSL."""
BROKER_FILE, CA_FILE, PASSWORD_FILE = (
    "/etc/kafka/secrets/broker.pem",
    "/run/secrets/broker_ca",
    "/run/secrets/broker_password",
)
LOG_VOLUME, LOG_FOLDER = "/var/lib/kafka/data", "/var/lib/kafka/data/log"
CLUSTER_ID = "5L6g3nShT-eMCtK--X86sw"
"""The default of Kafka's image."""
RUN_FILE = "${RUN_FILE:-configs/quickstart.toml}"
ONE_SHOT = {
    "image": "${LIGHT_IMAGE:-relax-events:light}",
    "healthcheck": {"disable": True},
    "read_only": True,
    "tmpfs": ["/tmp"],  # noqa: S108 in its container
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "mem_limit": "256m",
    "pids_limit": 1024,
}
ESCAPES = {".": "_", "_": "__", "-": "___"}
COMPLETED, HEALTHY = (
    {"condition": "service_completed_successfully"},
    {"condition": "service_healthy"},
)


def build_overlay(folder: SecurityFolder, run_id: str) -> dict[str, Any]:
    """Return an overlay of compose/docker-compose.yml for a run, and for every broker that has a
    certificate, which is a service of that name.

    Before the brokers first start, their disks are formatted with the super user. Once they run,
    users and ACLs are created.
    """
    hosts = sorted(
        file.stem
        for file in folder.broker_file(EMBEDDED_HOST).parent.glob("*.pem")
        if file.stem != EMBEDDED_HOST
    )
    principals = {
        **{role: role for role in ROLE_PERMISSIONS},
        "topics": "operator",
        "relax": "operator",
    }
    secrets = {
        principal: {"file": str(folder.password_file(build_username(run_id, principal)))}
        for principal in {*principals.values()}
    }
    services: dict[str, Any] = {
        service: _client(run_id, principal) for service, principal in principals.items()
    }
    services["topics"]["depends_on"] = {"access": COMPLETED}
    for number, host in enumerate(hosts, start=1):
        services[f"format-{host}"] = _formatting(folder, host, number)
        services[host] = _broker(folder, host, is_alone=len(hosts) == 1)
    services["access"] = _access(folder, hosts)
    return {
        "services": services,
        "secrets": {**secrets, "broker_ca": {"file": str(folder.ca_file)}},
    }


def _client(run_id: str, principal: str) -> dict[str, Any]:
    return {
        "environment": {
            "RELAX_BROKER__USERNAME": build_username(run_id, principal),
            "RELAX_BROKER__PASSWORD_FILE": PASSWORD_FILE,
            "RELAX_BROKER__CA_FILE": CA_FILE,
        },
        "secrets": [{"source": principal, "target": "broker_password"}, "broker_ca"],
    }


def _formatting(folder: SecurityFolder, host: str, number: int) -> dict[str, Any]:
    command = [
        "broker",
        "format",
        LOG_FOLDER,
        "--credentials",
        str(folder.path),
        "--cluster-id",
        CLUSTER_ID,
        "--node-id",
        str(number),
    ]
    log = "log" if number == 1 else f"log-{number}"
    return {**ONE_SHOT, "command": command, "volumes": [f"{log}:{LOG_VOLUME}", _mounted(folder)]}


def _broker(folder: SecurityFolder, host: str, *, is_alone: bool) -> dict[str, Any]:
    listeners = {"listeners": f"{CLIENTS}://:9092,INTERNAL://:9094,CONTROLLER://:9093"}
    listeners["advertised.listeners"] = f"{CLIENTS}://{host}:9092,INTERNAL://{host}:9094"
    if is_alone:
        listeners["controller.quorum.voters"] = f"1@{host}:9093"
    settings = (
        build_broker_settings(folder, key_file=Path(BROKER_FILE), clients=CLIENTS)
        | {"ssl.truststore.location": CA_FILE}
        | listeners
    )
    return {
        "environment": {environment_variable(key): value for key, value in settings.items()},
        "volumes": [
            f"{folder.broker_file(host)}:{BROKER_FILE}:ro",
            f"{folder.ca_file}:{CA_FILE}:ro",
        ],
        "depends_on": {f"format-{host}": COMPLETED},
    }


def _access(folder: SecurityFolder, hosts: list[str]) -> dict[str, Any]:
    """Return the service that creates users and ACLs on the brokers; it alone reads all
    passwords.
    """
    servers = ",".join(f"{host}:9092" for host in hosts)
    return {
        **ONE_SHOT,
        "command": ["broker", "secure", RUN_FILE, "--out", str(folder.path), "--apply", "--yes"],
        "environment": {"RELAX_BROKER__BOOTSTRAP_SERVERS": f"${{BOOTSTRAP_SERVERS:-{servers}}}"},
        "volumes": ["${RUN_FILES:-../configs}:/srv/relax/configs:ro", _mounted(folder)],
        "depends_on": dict.fromkeys(hosts, HEALTHY),
    }


def _mounted(folder: SecurityFolder) -> str:
    """Return the mount of the whole folder at its path on this machine: its files name each
    other.
    """
    return f"{folder.path}:{folder.path}:ro"


def environment_variable(key: str) -> str:
    """Return the environment variable that sets a property of Kafka in its image."""
    return "KAFKA_" + "".join(ESCAPES.get(letter, letter.upper()) for letter in key)
