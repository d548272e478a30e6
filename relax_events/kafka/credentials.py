"""Who this process is to the broker: its user name, and the secrets that prove it, from files or
the environment and nowhere else.
"""

from __future__ import annotations

import os
from pathlib import Path

from relax_events.config import BrokerConfig, RunConfig
from relax_events.errors import ConfigError
from relax_events.kafka.security.folder import SecurityFolder, read_named, read_secret
from relax_events.kafka.security.settings import client_security, local_security
from relax_events.telemetry.redaction import hide

PASSWORD_VARIABLE = "BROKER_PASSWORD"  # noqa: S105 the name of it
PEM_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
OWN_VARIABLES = ("RELAX_BROKER__USERNAME", "RELAX_BROKER__PASSWORD_FILE", "RELAX_BROKER__CA_FILE")
SHARED_VARIABLES = ("RELAX_BROKER__CREDENTIALS", "RELAX_BROKER__PRINCIPAL")
"""A worker is told its own principal, not where to find everybody's."""


def as_principal(config: RunConfig, principal: str) -> RunConfig:
    """Return the configuration of a process that is this principal of the run, unless
    `broker.principal` names another.

    Without a security folder the configuration stays as it is.

    Raises:
        ConfigError: The folder has no password for it.
    """
    broker = config.broker
    if broker.credentials is None or broker.username:
        return config
    folder = SecurityFolder(broker.credentials.absolute())
    username = folder.username(config.run.id, broker.principal or principal)
    found = {
        "username": username,
        "password_file": folder.password_file(username),
        "ca_file": broker.ca_file or folder.ca_file,
    }
    return config.model_copy(update={"broker": broker.model_copy(update=found)})


def without_credentials(config: RunConfig) -> RunConfig:
    """Return the configuration that may be handed to others: it doesn't say who we are, nor where
    everybody's passwords lie.
    """
    if config.broker.credentials is None:
        return config
    cleared = {
        "credentials": None,
        "principal": "",
        "username": "",
        "password_file": None,
        "ca_file": None,
    }
    return config.model_copy(update={"broker": config.broker.model_copy(update=cleared)})


def credential_environment(config: RunConfig, role: str) -> dict[str, str]:
    """Return what a worker process of a role finds in its environment: its own principal and no
    other.
    """
    if config.broker.credentials is None:
        return {}
    folder = SecurityFolder(config.broker.credentials.absolute())
    username = folder.username(config.run.id, role)
    return environment_of(folder, username)


def environment_of(folder: SecurityFolder, username: str) -> dict[str, str]:
    """Return the variables by which a process becomes a principal. They name files: the password
    itself is in none of them.
    """
    return dict(
        zip(
            OWN_VARIABLES,
            (username, str(folder.password_file(username)), str(folder.ca_file)),
            strict=True,
        )
    )


def client_settings(config: BrokerConfig) -> dict[str, str]:
    """Return librdkafka's security settings of this process, secrets included: hand them to
    clients, to nothing else.

    Raises:
        ConfigError: A secret's file is missing or empty, a user has no password, or the authority's
            file holds no certificate.
    """
    settings = {} if config.ca_file is None else {"ssl.ca.location": _authority(config.ca_file)}
    if config.username:
        settings |= client_security(config.username, _password(config), config.ca_file)
    elif config.embedded_password_file is not None:
        settings |= local_security(config.embedded_password_file)
        hide(settings["sasl.password"])
    for key, file in config.secret_files.items():
        settings[key] = read_secret(file, key=f"broker.secret_files {key}")
        hide(settings[key])
    return settings


def _authority(file: Path) -> str:
    """Return the place of a certificate that is one; librdkafka would only say so with an error of
    its own.
    """
    if PEM_CERTIFICATE not in read_named(file, key="broker.ca_file"):
        raise ConfigError(
            f"broker.ca_file: {file} holds no certificate; give the PEM file of the "
            "authority that signed the brokers' certificates"
        )
    return str(file)


def _password(config: BrokerConfig) -> str:
    if config.password_file is not None:
        password = read_secret(config.password_file, key="broker.password_file")
    else:
        password = os.environ.get(PASSWORD_VARIABLE, "")
    if not password:
        remedy = (
            f"name its file in broker.password_file, or set {PASSWORD_VARIABLE} in the environment"
        )
        raise ConfigError(f"broker.username = {config.username!r} has no password; {remedy}")
    hide(password)
    return password
