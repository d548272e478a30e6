"""A client for schema registries with Confluent's API (Confluent, Apicurio, Karapace).

Schemas are registered under their record's full name (RecordNameStrategy), not under the topic's:
several event types share a topic, every run has its own topics, and each record type has one
history.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_events.config.broker import BrokerConfig
from relax_events.errors import (
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    EnvironmentProblem,
    SchemaError,
)
from relax_events.events.codec import EventCodec
from relax_events.secret_handling import hide

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

LOGIN_VARIABLE = "SCHEMA_REGISTRY_LOGIN"
LOGIN_KEY = "broker.schema_registry_login_file"
NUM_RETRIES = 2
RETRY_MS = 200
MAX_RETRY_MS = 1000
NOT_FOUND, CONFLICT, UNPROCESSABLE = 404, 409, 422
REFUSED = {401, 403}
FIRST_SERVER_ERROR = 500


def open_codec(config: BrokerConfig) -> EventCodec:
    """Return the event codec of a run, without a request: it frames events with registry ids from
    `EventCodec.frame` on, if the run has a schema registry.
    """
    return EventCodec(RegistryClient.from_config(config) if config.schema_registry else None)


class RegistryClient:
    """A registry client. It requests each schema once, mostly at start, so it keeps no connection
    open.

    Args:
        url: The registry's address, `http://host:port/path`.
        timeout_seconds: Bound of a call with its three attempts.
        login: `user:password`; empty for none.
    """

    def __init__(self, url: str, *, timeout_seconds: float, login: str = "") -> None:
        self._url = url
        self._settings: dict[str, Any] = {
            "url": url,
            "timeout": timeout_seconds / (NUM_RETRIES + 1),
            "max.retries": NUM_RETRIES,
            "retries.wait.ms": RETRY_MS,
            "retries.max.wait.ms": MAX_RETRY_MS,
        }
        if login:
            self._settings["basic.auth.user.info"] = login
        self._client: SchemaRegistryClient | None = None
        self._one_at_a_time = threading.Lock()

    @classmethod
    def from_config(cls, config: BrokerConfig) -> RegistryClient:
        """Create a client from a run's configuration."""
        return cls(
            config.schema_registry,
            timeout_seconds=config.request_timeout_seconds,
            login=read_registry_login(config.schema_registry_login_file),
        )

    def register(self, name: str, schema_json: str) -> int:
        """Register a schema under its record's name if it is new; return its id.

        Raises:
            SchemaError: The registry has an incompatible schema of that name.
        """
        return int(
            self._request(
                f"registering {name}",
                lambda client: client.register_schema(name, _avro(schema_json)),
            )
        )

    def schema(self, schema_id: int) -> str | None:
        """Return the schema with this id as JSON, or None.

        Raises:
            SchemaError: The schema is not Avro, or references other schemas.
        """
        with self._one_at_a_time:  # the work loop and the control thread share one codec
            try:
                schema = self._request(
                    f"asking for schema {schema_id}",
                    lambda client: client.get_schema(schema_id),
                    missing_is_none=True,
                )
            finally:
                self.close()
        if schema is None:
            return None
        if (schema.schema_type or "AVRO") != "AVRO" or schema.references:
            raise SchemaError(
                f"schema {schema_id} of {self._url} is of type {schema.schema_type} or "
                "references other schemas; events need self-contained Avro records"
            )
        return str(schema.schema_str)

    def count_subjects(self) -> int:
        """Return the number of subjects: the cheapest request that shows that the registry
        works.
        """
        try:
            return len(
                self._request("asking for the subjects", lambda client: client.get_subjects())
            )
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _request(
        self,
        what: str,
        call: Callable[[SchemaRegistryClient], Any],
        *,
        missing_is_none: bool = False,
    ) -> Any:
        if self._client is None:
            self._client = _open_client(self._settings)
        from confluent_kafka.schema_registry.error import SchemaRegistryError
        from httpx2 import HTTPError

        try:
            return call(self._client)
        except SchemaRegistryError as error:
            if missing_is_none and error.http_status_code == NOT_FOUND:
                return None
            raise self._translate(error, what) from error
        except (HTTPError, OSError) as error:
            raise BrokerUnavailable(
                f"schema registry {self._url}, {what}: {type(error).__name__} {error}; see that "
                "it runs, and that broker.schema_registry is its address"
            ) from error

    def _translate(self, error: Any, what: str) -> BrokerError | SchemaError:
        """Translate an error response of the registry."""
        text = (
            f"schema registry {self._url}, {what}: HTTP {error.http_status_code}, "
            f"{error.error_message}"
        )
        if error.http_status_code in (CONFLICT, UNPROCESSABLE):
            return SchemaError(
                f"{text}; `relax schemas --check` names the change, or register under another "
                "registry"
            )
        if error.http_status_code in REFUSED:
            return BrokerRefused(
                f"{text}; put user:password into a file and its path into {LOGIN_KEY}"
            )
        if error.http_status_code >= FIRST_SERVER_ERROR:
            return BrokerUnavailable(f"{text}; the registry failed internally")
        return BrokerRefused(
            f"{text}; is broker.schema_registry the address of Confluent's interface "
            "(Apicurio's ends in /apis/ccompat/v7)?"
        )


def read_registry_login(path: Path | None) -> str:
    """Read `user:password` for the registry from a file, or without a file from the environment;
    empty when neither is set.

    Raises:
        ConfigError: The file can't be read, or the text has no colon.
    """
    try:
        login = path.read_text().strip() if path else os.environ.get(LOGIN_VARIABLE, "")
    except OSError as error:
        raise ConfigError(f"{LOGIN_KEY} {path} can't be read: {error.strerror}") from None
    if login and ":" not in login:
        raise ConfigError(
            f"the login in {path or LOGIN_VARIABLE} must be user:password; it has no colon"
        )
    hide(login.partition(":")[2])
    return login


def _avro(schema_json: str) -> Schema:
    """Wrap a schema's text for Apicurio: version 3.0 replaces a default of `"{}"` by `{}` before
    parsing and then rejects the schema.
    """
    from confluent_kafka.schema_registry import Schema

    return Schema(schema_json.replace('"{}"', '"\\u007b}"'), "AVRO")


def _open_client(settings: dict[str, Any]) -> SchemaRegistryClient:
    """Import and create the client; the import takes 0.5 s, which runs without a registry avoid."""
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise EnvironmentProblem(
            f"broker.schema_registry needs {error.name}, which is not installed; install "
            "relax-events[registry]"
        ) from None
    return SchemaRegistryClient(settings)
