"""Settings of secured brokers and of their clients: SCRAM over TLS for clients, certificates among
brokers, deny what is not allowed.
"""

from __future__ import annotations

from pathlib import Path

from relax_events.kafka.security.folder import ADMIN, SecurityFolder, read_secret

MECHANISM = "SCRAM-SHA-512"
LOCAL_PROTOCOL, LOCAL_USER = "SASL_PLAINTEXT", "relax"
"""Of the embedded broker, on the loopback interface."""
LOCAL_KEY = "broker.embedded_password_file"
CLIENTS, INTERNAL, CONTROLLER = "SASL_SSL", "INTERNAL", "CONTROLLER"
"""Names of the listeners; the first is where our clients connect."""


def broker_security(
    folder: SecurityFolder, *, key_file: Path, clients: str = CLIENTS
) -> dict[str, str]:
    """Return the `server.properties` of a secured broker, addresses apart; `clients` is what the
    listener is called where they connect.

    Clients prove themselves by password; brokers and controllers by their certificate, so that no
    password lies in a broker's settings and a changed one never locks a broker out of its own
    cluster.
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
        f"{scram}.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required;",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "false",
        "super.users": f"User:CN=relax.broker;User:{ADMIN}",
        "auto.create.topics.enable": "false",
    }


def client_security(username: str, password: str, ca_file: Path | None) -> dict[str, str]:
    """Return librdkafka's settings of a client that proves itself by password."""
    trust = {} if ca_file is None else {"ssl.ca.location": str(ca_file)}
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": MECHANISM,
        "sasl.username": username,
        "sasl.password": password,
        **trust,
    }


def local_security(password_file: Path) -> dict[str, str]:
    """Return librdkafka's settings of a client of an embedded broker.

    Raises:
        ConfigError: The password can't be read.
    """
    password = read_secret(password_file, key=LOCAL_KEY)
    return {
        "security.protocol": LOCAL_PROTOCOL,
        "sasl.mechanism": MECHANISM,
        "sasl.username": LOCAL_USER,
        "sasl.password": password,
    }


def admin_security(folder: SecurityFolder) -> dict[str, str]:
    """Return librdkafka's settings of the super user.

    Raises:
        ConfigError: The folder has no password for it.
    """
    return client_security(
        ADMIN, read_secret(folder.password_file(ADMIN), key="broker.credentials"), folder.ca_file
    )
