"""Client settings with which other tools authenticate to an embedded broker."""

from __future__ import annotations

from typing import Literal

from relax_events.errors import ConfigError
from relax_events.kafka.embedded.broker import EmbeddedBroker
from relax_events.kafka.security.settings import read_embedded_client_settings

SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


def build_client_properties(broker: EmbeddedBroker, *, form: Literal["java", "librdkafka"]) -> str:
    """Return a client's settings, one per line; they contain the password.

    Raises:
        BrokerUnavailable: The broker was never started.
        ConfigError: The broker's clients authenticate as principals of a security folder.
    """
    settings = {"bootstrap.servers": broker.bootstrap_servers}
    state, file = broker.state, broker.password_file
    if state is not None and state.credentials is not None:
        raise ConfigError(
            f"the broker in {broker.directory} accepts the principals of {state.credentials}, "
            "each with its own password there; see docs/how-to/secure-a-cluster.md"
        )
    if file is not None:
        settings |= read_embedded_client_settings(file)
        if form == "java":
            user, password = settings.pop("sasl.username"), settings.pop("sasl.password")
            settings["sasl.jaas.config"] = (
                f'{SCRAM_MODULE} required username="{user}" password="{password}";'
            )
    return "".join(f"{key}={value}\n" for key, value in settings.items())
