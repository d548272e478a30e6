"""The principal of a process: the user, password file and CA with which it authenticates to the
broker.
"""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.kafka.security.folder import SecurityFolder

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
