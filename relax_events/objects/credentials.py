"""The credential with which this process uses remote stores.

A file of `NAME=value` lines, named by `OBJECTS_CREDENTIALS_FILE`, one for each role; or, of the
folder `OBJECTS_CREDENTIALS`, the file that is named after the role: `trainer.env`. Without both,
the storage library takes the cloud provider's variables from the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_events.errors import ConfigError
from relax_events.objects.rights import STORE_RIGHTS
from relax_events.secret_handling import MAX_SECRET_BYTES, hide, read_configured_file

FILE_VARIABLE, FOLDER_VARIABLE = "OBJECTS_CREDENTIALS_FILE", "OBJECTS_CREDENTIALS"
PRINCIPAL_VARIABLE = "RELAX_BROKER__PRINCIPAL"
OPERATOR = "operator"
LINE = re.compile(r"(?:export )?((?:AWS|GOOGLE)_[A-Z_]+)=(.*)")
ALLOW_HTTP = "AWS_ALLOW_HTTP"
SECRET_NAMES = re.compile(r"SECRET|TOKEN|KEY$")
OWN_VARIABLES = re.compile(
    r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN)|GOOGLE_SERVICE_ACCOUNT(_PATH|_KEY)?"
)
"""Variables of the cloud provider's credential, which no worker inherits that has its own."""


@dataclass(frozen=True, slots=True)
class StoreCredential:
    """Settings of the storage library, by the names of its environment variables."""

    settings: Mapping[str, str]

    @property
    def allows_http(self) -> bool:
        """Whether an endpoint without TLS may be used."""
        return self.settings.get(ALLOW_HTTP, "").lower() in {"1", "true"}

    @property
    def options(self) -> dict[str, Any]:
        """The settings of the client's credential and endpoint, by the library's names."""
        return {name.lower(): value for name, value in self.settings.items() if name != ALLOW_HTTP}


def read_store_credential(environment: Mapping[str, str] = os.environ) -> StoreCredential:
    """Read the credential of this process; without a file, the storage library takes the cloud
    provider's variables.

    Raises:
        ConfigError: The file is missing, or a line of it is no setting.
    """
    inherited = {ALLOW_HTTP: environment.get(ALLOW_HTTP, "")}
    if path := environment.get(FILE_VARIABLE, ""):
        return StoreCredential(inherited | _read(Path(path), key=FILE_VARIABLE))
    if folder := environment.get(FOLDER_VARIABLE, ""):
        principal = environment.get(PRINCIPAL_VARIABLE, "") or OPERATOR
        file = find_credential_file(Path(folder), principal)
        return StoreCredential(inherited | _read(file, key=FOLDER_VARIABLE))
    return StoreCredential(inherited)


def find_credential_file(folder: Path, principal: str) -> Path:
    """Return the file of a role or person in a folder.

    Raises:
        ConfigError: There is none.
    """
    path = folder.absolute() / f"{principal}.env"
    if principal not in STORE_RIGHTS or not path.is_file():
        raise ConfigError(
            f"{FOLDER_VARIABLE} = {str(folder)!r} has no file {path.name}; write the credential of "
            f"{principal} into it, as lines like AWS_ACCESS_KEY_ID=..."
        )
    return path


def build_worker_store_environment(
    role: str, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables of a role's worker: the file of its own credential, where roles have
    their own.

    Raises:
        ConfigError: The folder has no file for the role.
    """
    folder = environment.get(FOLDER_VARIABLE, "")
    return {FILE_VARIABLE: str(find_credential_file(Path(folder), role))} if folder else {}


def remove_store_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for workers without the folder of all credentials, and, where roles have
    their own, without this process's.
    """
    if not environment.get(FOLDER_VARIABLE):
        return dict(environment)
    process_variables = (FOLDER_VARIABLE, FILE_VARIABLE)
    return {
        name: value
        for name, value in environment.items()
        if name not in process_variables and not OWN_VARIABLES.fullmatch(name)
    }


def _read(path: Path, *, key: str) -> dict[str, str]:
    text = read_configured_file(path, key=key)[:MAX_SECRET_BYTES].decode(errors="replace")
    settings: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(
                f"{key}: line {number} of {path} is no setting of the object store; write lines "
                "like AWS_ACCESS_KEY_ID=..."
            )
        settings[match[1]] = match[2].strip("\"'")
        if SECRET_NAMES.search(match[1]):
            hide(settings[match[1]])
    if not settings:
        raise ConfigError(f"{key}: {path} is empty; write lines like AWS_ACCESS_KEY_ID=...")
    return settings
