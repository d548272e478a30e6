"""The sections `broker` and `objects`: the Kafka broker and the object store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from relax_events.config.addresses import EMBEDDED, is_loopback, list_addresses, split_address
from relax_events.config.base import Positive, Seconds, Section
from relax_events.config.external_values import Address, Addresses, FilePath, Names, Text
from relax_events.config.resume_rules import accepted, never

GUARDED_CLIENT_KEYS = frozenset(
    {
        "enable.idempotence",
        "isolation.level",
        "check.crcs",
        "enable.auto.commit",
        "acks",
        "auto.offset.reset",
        "transactional.id",
        "group.id",
    }
)
SECRET_CLIENT_KEYS = frozenset(
    {
        "sasl.password",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "sasl.oauthbearer.assertion.private.key.pem",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
    }
)


def secret_remedy(key: str) -> str:
    """Say where a secret librdkafka setting belongs."""
    if key == "sasl.password":
        return (
            "write it into a file and name that in broker.password_file, or set BROKER_PASSWORD "
            "in the environment"
        )
    return (
        f"write it into a file and name that in broker.secret_files: {{ {key!r} = "
        f'"/path/to/file" }}'
    )


class BrokerConfig(Section):
    """The Kafka broker, and its clients' settings."""

    bootstrap_servers: Address = EMBEDDED
    """`embedded` starts a real broker on this machine; otherwise `host:port,host:port`."""
    partitions_per_version: Annotated[Positive, never("the partitions follow from it")] = 2
    """Partitions of each policy-version slot: the number of workers of a role, or of trainer ranks,
    that can share one version. More than are used make record batches smaller, and so cost requests
    where samples are short."""
    queue_partitions: Annotated[
        Positive, never("the queue of prompts has that many partitions")
    ] = 1
    """Partitions of the prompt queue: one for a share group, which divides it by record; for a
    consumer group as many as rollout workers."""
    replication_factor: Positive = 1
    """Replicas of each partition."""
    prompt_queue: Annotated[
        Literal["share_group", "consumer_group"],
        never("prompt groups that are leased in one way are not known in the other"),
    ] = "share_group"
    """How rollout workers share the prompt queue; `consumer_group` is for brokers without share
    groups."""
    lease_seconds: Seconds = 3600.0
    """Lease time of a prompt group, after which another worker may receive it too (share groups). A
    dead worker's leases are released at once, when its connections close, so set this above the
    longest generation. A host that is cut off or gone closes none: its prompt groups are issued
    once more after `workers.takeover_seconds`. Brokers allow an hour at most, and a lease can't be
    renewed."""
    session_timeout_seconds: Seconds = 6.0
    """After this time without a heartbeat the broker reassigns a member's partitions."""
    request_timeout_seconds: Seconds = 30.0
    """Deadline of every request to the broker."""
    compression: Literal["none", "lz4", "zstd"] = "none"
    """Compression of sample topics."""
    credentials: FilePath | None = None
    """Folder made by `relax broker secure`. Every process takes its principal's password from it,
    and the embedded broker accepts only these principals. Empty means no security, or the settings
    of the next four keys."""
    principal: Text = ""
    """Principal of the folder to authenticate as; empty means the worker's role, and `operator` for
    all other commands."""
    username: Text = ""
    """User of SASL/SCRAM-SHA-512 over TLS; its password is in `password_file`, or in the
    environment as `BROKER_PASSWORD`."""
    password_file: FilePath | None = None
    """File that holds only the password."""
    ca_file: FilePath | None = None
    """PEM file of the authority that signed the brokers' certificates; empty means the machine's
    trusted authorities."""
    embedded_password_file: FilePath | None = None
    """File with the password of an embedded broker whose address is `bootstrap_servers`: the file
    `password` in its folder. The commands and workers of a run find their own broker's file."""
    secret_files: dict[str, FilePath] = Field(default_factory=dict)
    """librdkafka settings that are secrets, each in a file, for example `"ssl.key.password" =
    "/run/secrets/key"`."""
    schema_registry: Address = ""
    """Address of a schema registry with Confluent's interface, `http://host:port/path`, whose
    schema ids then prefix the records; empty means Avro's single-object encoding. Records of both
    kinds can be read either way."""
    schema_registry_login_file: FilePath | None = None
    """File that holds `user:password` for the registry; in the environment
    `SCHEMA_REGISTRY_LOGIN`."""
    client: Annotated[dict[str, str | int | float | bool], Names.OPTIONS] = Field(
        default_factory=dict,
        json_schema_extra={
            "propertyNames": {"not": {"enum": [*sorted(GUARDED_CLIENT_KEYS | SECRET_CLIENT_KEYS)]}}
        },
    )
    """Raw librdkafka settings, for security and tuning. Secrets are refused, and so are keys that
    this project's guarantees depend on."""

    @model_validator(mode="after")
    def _shared_queue_is_whole(self) -> BrokerConfig:
        if self.prompt_queue == "share_group" and self.queue_partitions > 1:
            raise ValueError(
                "a share group's queue has one partition, got queue_partitions = "
                f"{self.queue_partitions}; leave out broker.queue_partitions, or set "
                "broker.prompt_queue = 'consumer_group'"
            )
        return self

    @model_validator(mode="after")
    def _password_stays_on_this_machine(self) -> BrokerConfig:
        if self.embedded_password_file is None or self.bootstrap_servers == EMBEDDED:
            return self
        strange = [
            address
            for address in list_addresses(self.bootstrap_servers)
            if not is_loopback(split_address(address)[0])
        ]
        if strange:
            raise ValueError(
                "embedded_password_file is for embedded brokers, which are at 127.0.0.1, got "
                f"{strange[0]!r}; for a cluster set broker.username and broker.password_file"
            )
        return self

    @field_validator("secret_files")
    @classmethod
    def _only_secrets(cls, secret_files: dict[str, Path]) -> dict[str, Path]:
        if strange := sorted(secret_files.keys() - SECRET_CLIENT_KEYS):
            raise ValueError(
                f"{strange[0]} is no secret setting of librdkafka, which are "
                f"{', '.join(sorted(SECRET_CLIENT_KEYS))}; use broker.client"
            )
        return secret_files

    @field_validator("schema_registry")
    @classmethod
    def _is_an_address_without_login(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://[^\s@]+", url):
            shown = re.sub(r"//[^/]*@", "//...@", url)
            raise ValueError(
                f"must be http(s)://host:port/path without a login, got {shown!r}; a login "
                "goes into broker.schema_registry_login_file"
            )
        return url

    @field_validator("client")
    @classmethod
    def _promises_stay(cls, client: dict[str, Any]) -> dict[str, Any]:
        if guarded_keys := sorted(GUARDED_CLIENT_KEYS & client.keys()):
            raise ValueError(
                f"{guarded_keys[0]} carries a delivery promise and can't be overridden; remove it "
                "from broker.client"
            )
        return client


class ObjectsConfig(Section):
    """The object store for large data: weights, checkpoints, media, large tensors."""

    uri: Annotated[
        Address,
        accepted(
            "weights, checkpoints and media must be copied to the new store; "
            "name the old one in objects.uri_aliases"
        ),
    ] = ""
    """`file:///path`, `s3://bucket/prefix` or `gs://bucket/prefix`; empty means `<run
    directory>/objects`."""
    by_run: bool = True
    """Put objects in a folder below `uri` named by the run's id. `false` uses `uri` unchanged: no
    other run may use it."""
    allowed_roots: Addresses = ()
    """Other stores from which media of a record may be read, for example `s3://images/`; empty
    allows none."""
    uri_aliases: Annotated[tuple[str, ...], Names.NOTHING] = ()
    """Former URIs of stores whose objects were copied into this one, as `relax topics import`
    prints them: references to them resolve here."""
    claim_check_threshold_bytes: Positive = 262_144
    """Tensors larger than this are stored by reference (claim check) instead of inside the
    record."""

    @field_validator("uri")
    @classmethod
    def _is_shared_by_processes(cls, uri: str) -> str:
        if uri.startswith("memory:"):
            raise ValueError(
                f"{uri!r} lives in one process, and every worker is a process of its own; set "
                "objects.uri to file:///directory, s3://bucket/prefix or gs://bucket/prefix"
            )
        return uri
