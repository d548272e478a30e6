"""The address and the token of a run's API: two files in the run's folder that only their owner may
read.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from relax_events.config import RunConfig
from relax_events.errors import CheckFailed, ConfigError
from relax_events.kafka.security.folder import read_secret, write_private
from relax_events.telemetry.redaction import hide

TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class ApiEndpointFile:
    """The files of a run's API."""

    address_file: Path
    token_file: Path
    is_own_token: bool

    @classmethod
    def from_config(cls, config: RunConfig) -> ApiEndpointFile:
        """Return the paths of the files."""
        folder, given = config.run_directory, config.scaling.token_file
        return cls(folder / "api.json", given or folder / "api-token", given is None)

    def open_token(self) -> str:
        """Return the token that calls must carry; create the run's own token where it is missing.

        Raises:
            ConfigError: The file that `scaling.token_file` names is missing or empty.
        """
        if self.is_own_token and not self.token_file.exists():
            write_private(self.token_file, secrets.token_urlsafe(TOKEN_BYTES).encode())
        return self.read_token()

    def read_token(self) -> str:
        """Return the token; raises as `open_token`, and also where the run has created none."""
        if self.is_own_token and not self.token_file.exists():
            raise ConfigError(
                f"{self.token_file} does not exist: the run has not served its API here; "
                "start it, or name the file of its token"
            )
        token = read_secret(self.token_file, key="scaling.token_file")
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"scaling.token_file: {self.token_file} must hold one word of ASCII")
        hide(token)
        return token

    def write_url(self, url: str) -> None:
        """Write the address of the API."""
        write_private(self.address_file, orjson.dumps({"url": url}))

    def remove(self, url: str) -> None:
        """Remove the address and the run's own token, unless another controller has written its own
        address since.
        """
        with suppress(CheckFailed):
            if self.read_url() == url:
                self.address_file.unlink(missing_ok=True)
                if self.is_own_token:
                    self.token_file.unlink(missing_ok=True)

    def read_url(self) -> str:
        """Return the address of the API.

        Raises:
            CheckFailed: No address was written here.
        """
        try:
            return str(orjson.loads(self.address_file.read_bytes())["url"])
        except FileNotFoundError:
            remedy = (
                "start the run, or give --url and --token-file of one elsewhere (extra `api`, "
                "scaling.api)"
            )
            raise CheckFailed(
                f"{self.address_file} does not exist: the run has served no API here; {remedy}"
            ) from None
