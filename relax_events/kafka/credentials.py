"""The user name and secrets with which this process authenticates to the broker, read from files or
the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from relax_events.config import BrokerConfig, RunConfig
from relax_events.errors import ConfigError
from relax_events.kafka.security.folder import SecurityFolder
from relax_events.kafka.security.settings import (
    build_client_settings,
    read_embedded_client_settings,
)
from relax_events.secret_handling import hide, read_configured_file, read_secret

PASSWORD_VARIABLE = "BROKER_PASSWORD"  # noqa: S105 the name of the variable
PEM_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
OWN_VARIABLES = ("RELAX_BROKER__USERNAME", "RELAX_BROKER__PASSWORD_FILE", "RELAX_BROKER__CA_FILE")
SHARED_VARIABLES = ("RELAX_BROKER__CREDENTIALS", "RELAX_BROKER__PRINCIPAL")
"""The variables of the launcher; a worker gets only its own principal, not the folder of all
credentials."""


def apply_principal(config: RunConfig, principal: str) -> RunConfig:
    """Return the configuration with the credentials of a principal, or of `broker.principal` if
    set.

    Returns the configuration unchanged when there is no security folder.

    Raises:
        ConfigError: The folder has no password for the principal.
    """
    broker = config.broker
    if broker.credentials is None or broker.username:
        return config
    folder = SecurityFolder(broker.credentials.absolute())
    username = folder.username(config.run.id, broker.principal or principal)
    login_settings = {
        "username": username,
        "password_file": folder.password_file(username),
        "ca_file": broker.ca_file or folder.ca_file,
    }
    return config.model_copy(update={"broker": broker.model_copy(update=login_settings)})


def remove_credentials(config: RunConfig) -> RunConfig:
    """Return the configuration without user name, password file and security folder, so that it may
    be passed on.
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


def build_worker_credentials(config: RunConfig, role: str) -> dict[str, str]:
    """Build the environment variables of a role's worker: the credentials of its own principal
    only.
    """
    if config.broker.credentials is None:
        return {}
    folder = SecurityFolder(config.broker.credentials.absolute())
    username = folder.username(config.run.id, role)
    return build_principal_environment(folder, username)


def build_principal_environment(folder: SecurityFolder, username: str) -> dict[str, str]:
    """Build the environment variables of a principal. They name files and do not contain the
    password.
    """
    return dict(
        zip(
            OWN_VARIABLES,
            (username, str(folder.password_file(username)), str(folder.ca_file)),
            strict=True,
        )
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
        remedy = (
            f"name its file in broker.password_file, or set {PASSWORD_VARIABLE} in the environment"
        )
        raise ConfigError(f"broker.username = {config.username!r} has no password; {remedy}")
    hide(password)
    return password
