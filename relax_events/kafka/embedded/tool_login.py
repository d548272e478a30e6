"""How tools that are not ours log in to an embedded broker."""

from __future__ import annotations

from typing import Literal

from relax_events.errors import ConfigError
from relax_events.kafka.embedded.broker import EmbeddedBroker
from relax_events.kafka.security.settings import local_security

SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


def client_properties(broker: EmbeddedBroker, *, form: Literal["java", "librdkafka"]) -> str:
    """Return the settings of a client, one a line; they hold the password.

    Raises:
        BrokerUnavailable: The broker was never started.
        ConfigError: Its clients log in as the principals of a security folder.
    """
    settings = {"bootstrap.servers": broker.bootstrap_servers}
    state, file = broker.state, broker.password_file
    if state is not None and state.credentials is not None:
        rule = (
            f"the broker in {broker.directory} lets in the principals of {state.credentials}, "
            "each with a password of its own there"
        )
        raise ConfigError(f"{rule}; see docs/how-to/secure-a-cluster.md")
    if file is not None:
        settings |= local_security(file)
        if form == "java":
            user, password = settings.pop("sasl.username"), settings.pop("sasl.password")
            settings["sasl.jaas.config"] = (
                f'{SCRAM_MODULE} required username="{user}" password="{password}";'
            )
    return "".join(f"{key}={value}\n" for key, value in settings.items())
