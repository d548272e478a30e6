"""Client settings with which other tools authenticate to an embedded broker."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from relax_events.errors import BrokerUnavailable, ConfigError
from relax_events.kafka.embedded.broker import EmbeddedBroker
from relax_events.kafka.embedded.launch import PROPERTIES_NAME
from relax_events.kafka.embedded.security import TOOL_PRINCIPALS, read_tool_password
from relax_events.kafka.security.folder import SecurityFolder
from relax_events.kafka.security.settings import (
    build_client_settings,
    read_embedded_client_settings,
)
from relax_events.secret_handling import read_secret

SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
ClientForm = Literal["java", "librdkafka", "kcat"]


def build_client_properties(
    broker: EmbeddedBroker, *, form: ClientForm, principal: str = ""
) -> str:
    """Return a client's settings, one per line; they contain the password.

    Args:
        broker: The broker, which runs for the form `kcat`.
        form: `java` and `librdkafka` authenticate by SCRAM. `kcat` authenticates by PLAIN, which
            librdkafka before 2.6.1 can, with a password of the broker's last start.
        principal: A user of the security folder, for a broker that has one.
    Raises:
        BrokerUnavailable: The broker was never started; for `kcat`, it does not run.
        ConfigError: The broker accepts principals, and none is named, or one without a password;
            or one is named, and it has a single user.
    """
    settings = {"bootstrap.servers": broker.bootstrap_servers}
    state, file = broker.state, broker.password_file
    if state is not None and state.credentials is not None:
        settings |= _read_principal(broker, Path(state.credentials), principal)
    elif principal:
        raise ConfigError(
            f"--principal {principal}: the broker in {broker.directory} has no security folder "
            "but one user, who may do all; leave --principal out"
        )
    elif file is not None:
        settings |= read_embedded_client_settings(file)
    if "sasl.username" in settings:
        if form == "kcat":
            settings |= _read_plain_login(broker, settings["sasl.username"])
        elif form == "java":
            settings = _to_java(settings)
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def _read_principal(broker: EmbeddedBroker, credentials: Path, principal: str) -> dict[str, str]:
    folder = SecurityFolder(credentials)
    users = folder.usernames()
    if principal not in users:
        raise ConfigError(
            f"the broker in {broker.directory} accepts the principals of {credentials}, got "
            f"{principal!r}; name one with --principal: {', '.join(users) or 'it has none'}; see "
            "docs/how-to/secure-a-cluster.md"
        )
    password = read_secret(folder.password_file(principal), key="broker.credentials")
    return build_client_settings(principal, password, folder.ca_file)


def _read_plain_login(broker: EmbeddedBroker, username: str) -> dict[str, str]:
    if not broker.is_running:
        raise BrokerUnavailable(
            f"the broker in {broker.directory} does not run, and kcat's password is a new one at "
            "each start; start it with: relax broker start"
        )
    password = read_tool_password(broker.directory / PROPERTIES_NAME, username)
    if password is None:
        raise ConfigError(
            f"the running broker in {broker.directory} has no PLAIN password for {username}: only "
            f"a principal {' or '.join(TOOL_PRINCIPALS)} whose run was in the security folder at "
            "the broker's start has one; restart the broker, or use --client-config librdkafka "
            "with librdkafka 2.6.1 or later"
        )
    return {"sasl.mechanism": "PLAIN", "sasl.password": password}


def _to_java(settings: dict[str, str]) -> dict[str, str]:
    """Convert librdkafka's settings of a SCRAM client to the properties of Kafka's own tools."""
    user, password = settings["sasl.username"], settings["sasl.password"]
    login = {
        "sasl.jaas.config": f'{SCRAM_MODULE} required username="{user}" password="{password}";'
    }
    if "ssl.ca.location" in settings:
        login |= {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": settings["ssl.ca.location"],
        }
    others = {"sasl.username", "sasl.password", "ssl.ca.location"}
    return {key: value for key, value in settings.items() if key not in others} | login
