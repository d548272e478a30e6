"""A schema registry with Confluent's interface (Confluent's own, Apicurio, Karapace): gives schemas
numbers, checks that they evolve.

A schema is registered under its record's full name (the RecordNameStrategy), not under its topic's:
several kinds of events share a topic, and every run has topics of its own, while there is one
history for each record of ours.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_events.config import BrokerConfig
from relax_events.errors import (
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    EnvironmentProblem,
    SchemaError,
)
from relax_events.events.codec import EventCodec
from relax_events.telemetry.redaction import hide

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
    """Return the codec of a run: framed by the ids of the schema registry where the run has one.

    Raises:
        BrokerUnavailable: The registry does not answer.
        BrokerRefused: It wants a login, or another one.
        SchemaError: It holds an incompatible schema of the same record.
        EnvironmentProblem: The libraries that speak with it are not installed.
    """
    if not config.schema_registry:
        return EventCodec()
    registry = RegistryClient.of(config)
    try:
        return EventCodec(registry)
    finally:
        registry.close()


class RegistryClient:
    """Asks a registry, once for each schema: many at the start, hardly any later, so connections
    are not kept.

    Args:
        url: `http://host:port/path` of the registry.
        timeout_seconds: Deadline of a call, which is tried three times within it.
        login: `user:password`, empty for none.
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
    def of(cls, config: BrokerConfig) -> RegistryClient:
        """Read address and login off a run's configuration."""
        return cls(
            config.schema_registry,
            timeout_seconds=config.request_timeout_seconds,
            login=registry_login(config.schema_registry_login_file),
        )

    def register(self, name: str, schema_json: str) -> int:
        """Return the id of a schema under its record's name, registering it when it is new.

        Raises:
            SchemaError: The registry holds an incompatible schema of that name.
        """
        return int(
            self._ask(
                f"registering {name}",
                lambda client: client.register_schema(name, _avro(schema_json)),
            )
        )

    def schema(self, schema_id: int) -> str | None:
        """Return the schema of an id as JSON, or None when there is none.

        Raises:
            SchemaError: It is not an Avro schema, or not complete in itself.
        """
        with self._one_at_a_time:  # the work loop and the control thread decode by one codec
            try:
                found = self._ask(
                    f"asking for schema {schema_id}",
                    lambda client: client.get_schema(schema_id),
                    missing_is_none=True,
                )
            finally:
                self.close()
        if found is None:
            return None
        if (found.schema_type or "AVRO") != "AVRO" or found.references:
            raise SchemaError(
                f"schema {schema_id} of {self._url} is of type {found.schema_type} or refers "
                "to others; events are Avro records, whole"
            )
        return str(found.schema_str)

    def num_subjects(self) -> int:
        """Return how many names have schemas: the cheapest question that shows a registry at
        work.
        """
        try:
            return len(self._ask("asking for the subjects", lambda client: client.get_subjects()))
        finally:
            self.close()

    def close(self) -> None:
        """Drop the connection; the next question opens another."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(
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
            remedy = "see that it runs, and that broker.schema_registry is its address"
            raise BrokerUnavailable(
                f"schema registry {self._url}, {what}: {type(error).__name__} {error}; {remedy}"
            ) from error

    def _translate(self, error: Any, what: str) -> BrokerError | SchemaError:
        """Return our error for the registry's answer."""
        text = (
            f"schema registry {self._url}, {what}: HTTP {error.http_status_code}, "
            f"{error.error_message}"
        )
        if error.http_status_code in (CONFLICT, UNPROCESSABLE):
            return SchemaError(
                f"{text}; `relax schemas check` names the change, or register under another "
                "registry"
            )
        if error.http_status_code in REFUSED:
            return BrokerRefused(
                f"{text}; put user:password into a file and its path into {LOGIN_KEY}"
            )
        if error.http_status_code >= FIRST_SERVER_ERROR:
            return BrokerUnavailable(f"{text}; the registry has trouble of its own")
        return BrokerRefused(
            f"{text}; is broker.schema_registry the address of Confluent's interface "
            "(Apicurio's ends in /apis/ccompat/v7)?"
        )


def registry_login(path: Path | None) -> str:
    """Return `user:password` for the registry from a file, or without one from the environment;
    empty when neither has it.

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
    """Wrap a schema's text, spelled so that Apicurio takes it: 3.0 replaces a default of `"{}"` by
    `{}` before it parses, and refuses the rest.
    """
    from confluent_kafka.schema_registry import Schema

    return Schema(schema_json.replace('"{}"', '"\\u007b}"'), "AVRO")


def _open_client(settings: dict[str, Any]) -> SchemaRegistryClient:
    """Load the client here: it takes half a second, which runs without a registry should not
    pay.
    """
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise EnvironmentProblem(
            f"broker.schema_registry needs {error.name}, which is not installed; install "
            "relax-events[registry]"
        ) from None
    return SchemaRegistryClient(settings)
