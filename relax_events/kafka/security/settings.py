"""Settings of secured brokers and their clients: SCRAM over TLS for clients, certificates between
brokers, deny by default.
"""

from __future__ import annotations

import os
from pathlib import Path

from relax_events.config.broker import BrokerConfig
from relax_events.errors import ConfigError
from relax_events.kafka.security.folder import ADMIN, SecurityFolder
from relax_events.secret_handling import hide, read_configured_file, read_secret

MECHANISM = "SCRAM-SHA-512"
EMBEDDED_PROTOCOL, EMBEDDED_USER = "SASL_PLAINTEXT", "relax"
"""Protocol and user of the embedded broker, which listens on the loopback interface."""
EMBEDDED_LOGIN_KEY = "broker.embedded_password_file"
PASSWORD_VARIABLE = "BROKER_PASSWORD"  # noqa: S105 the name of the variable
PEM_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
CLIENTS, INTERNAL, CONTROLLER = "SASL_SSL", "INTERNAL", "CONTROLLER"
"""Listener names; clients connect to the first."""


def build_broker_settings(
    folder: SecurityFolder, *, key_file: Path, clients: str = CLIENTS
) -> dict[str, str]:
    """Return the security settings of a broker's `server.properties`; `clients` is the name of the
    clients' listener.

    Clients authenticate by password. Brokers and controllers authenticate by certificate, so broker
    settings contain no password, and a changed password cannot lock a broker out of its cluster.
    """
    scram = f"listener.name.{clients.lower()}.{MECHANISM.lower()}"
    return {
        "listener.security.protocol.map": f"{CONTROLLER}:SSL,{INTERNAL}:SSL,{clients}:SASL_SSL",
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": INTERNAL,
        f"listener.name.{INTERNAL.lower()}.ssl.client.auth": "required",
        f"listener.name.{CONTROLLER.lower()}.ssl.client.auth": "required",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(key_file),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(folder.ca_file),
        "sasl.enabled.mechanisms": MECHANISM,
        f"{scram}.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "false",
        "super.users": f"User:CN=relax.broker;User:{ADMIN}",
        "auto.create.topics.enable": "false",
    }


def build_client_settings(username: str, password: str, ca_file: Path | None) -> dict[str, str]:
    """Return librdkafka's settings of a client that authenticates by password."""
    trust = {} if ca_file is None else {"ssl.ca.location": str(ca_file)}
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": MECHANISM,
        "sasl.username": username,
        "sasl.password": password,
        **trust,
    }


def read_embedded_client_settings(password_file: Path) -> dict[str, str]:
    """Return librdkafka's settings of an embedded broker's client.

    Raises:
        ConfigError: The password can't be read.
    """
    password = read_secret(password_file, key=EMBEDDED_LOGIN_KEY)
    return {
        "security.protocol": EMBEDDED_PROTOCOL,
        "sasl.mechanism": MECHANISM,
        "sasl.username": EMBEDDED_USER,
        "sasl.password": password,
    }


def read_admin_settings(folder: SecurityFolder) -> dict[str, str]:
    """Return librdkafka's settings of the super user.

    Raises:
        ConfigError: The folder has no password for it.
    """
    return build_client_settings(
        ADMIN, read_secret(folder.password_file(ADMIN), key="broker.credentials"), folder.ca_file
    )


def read_client_settings(config: BrokerConfig) -> dict[str, str]:
    """Read librdkafka's security settings of this process. They contain secrets: pass them to
    clients only.

    Raises:
        ConfigError: A secret's file is missing or empty, a user has no password, or the CA file
            holds no certificate.
    """
    settings = {} if config.ca_file is None else {"ssl.ca.location": _check_ca_file(config.ca_file)}
    if config.username:
        settings |= build_client_settings(config.username, _read_password(config), config.ca_file)
    elif config.embedded_password_file is not None:
        settings |= read_embedded_client_settings(config.embedded_password_file)
        hide(settings["sasl.password"])
    for key, file in config.secret_files.items():
        settings[key] = read_secret(file, key=f"broker.secret_files {key}")
        hide(settings[key])
    return settings


def _check_ca_file(file: Path) -> str:
    """Return the path of a CA file after checking that it holds a certificate; librdkafka's own
    error is unclear.
    """
    if PEM_CERTIFICATE not in read_configured_file(file, key="broker.ca_file"):
        raise ConfigError(
            f"broker.ca_file: {file} holds no certificate; give the PEM file of the "
            "authority that signed the brokers' certificates"
        )
    return str(file)


def _read_password(config: BrokerConfig) -> str:
    if config.password_file is not None:
        password = read_secret(config.password_file, key="broker.password_file")
    else:
        password = os.environ.get(PASSWORD_VARIABLE, "")
    if not password:
        raise ConfigError(
            f"broker.username = {config.username!r} has no password; name its file in "
            f"broker.password_file, or set {PASSWORD_VARIABLE} in the environment"
        )
    hide(password)
    return password
