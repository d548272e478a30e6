"""`relax schemas --check CONFIG` compares with the schemas that a run's writers published, and the
doctor checks the registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from registry_server import FIRST_ID, serve_registry
from schema_changes import FORBIDDEN, changed

from relax_events.config import RunConfig
from relax_events.errors import BrokerUnavailable, CheckFailed, ConfigError
from relax_events.events.codec import EventCodec
from relax_events.events.schemas import schema_directory, schema_fingerprint
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.schema_registry import open_codec
from relax_events.launcher.broker_checks import check_registry
from relax_events.launcher.checked_run import CheckedRun
from relax_events.ops.schemas import check_run
from relax_events.topics import TopicPlan

ENDED = "relax.events.sample.PromptGroupEnded"


@pytest.fixture
def config(apply_run: Callable[..., RunConfig]) -> RunConfig:
    return apply_run()


@pytest.fixture
def publish(config: RunConfig, producer: RecordProducer) -> Callable[[str, bytes | None], None]:
    """Return a writer of control.schemas."""
    topic = TopicPlan.from_config(config).topic("control.schemas")
    return lambda key, value: producer.write([ProducerRecord(topic, value, key=key)])


def test_published_schemas_of_current_workers_pass_the_check(
    config: RunConfig, publish: Callable[[str, bytes | None], None]
) -> None:
    for fingerprint, schema in EventCodec().published_form().items():
        publish(fingerprint.hex(), schema)
    assert check_run(config, schema_directory()) == []


def test_writer_of_an_incompatible_schema_is_named(
    config: RunConfig, publish: Callable[[str, bytes | None], None]
) -> None:
    edit, *_ = FORBIDDEN["type promoted"]
    schema = changed(edit).schemas[ENDED]
    name = schema_fingerprint(schema).hex()
    publish(name, json.dumps(schema | {"registry_schema_ids": [7]}).encode())
    other = {"type": "record", "name": "Other", "namespace": "of.others", "fields": []}
    key = schema_fingerprint(other).hex()
    publish(key, json.dumps(other).encode())
    found = [
        (problem.schema, problem.field, problem.what)
        for problem in check_run(config, schema_directory())
    ]
    assert found == [
        (
            ENDED,
            "attempt",
            f"current can't read what the run's writer ({name}) wrote: long can't be read as int",
        ),
        (
            "of.others.Other",
            "",
            f"the run has a writer of such records ({key}), current has no schema for them",
        ),
    ]
    publish(name, None)
    publish(key, b"{}")
    assert len(check_run(config, schema_directory())) == len(found), (
        "what a writer has published, no other record takes away"
    )


@pytest.mark.parametrize("value", [b"{", b"[]", b"\xff", b'{"type": "record"}'])
def test_unlearnable_published_schema_is_skipped(
    config: RunConfig, publish: Callable[[str, bytes | None], None], value: bytes
) -> None:
    publish("key", value)
    publish("0011223344556677", next(iter(EventCodec().published_form().values())))
    assert check_run(config, schema_directory()) == []


def test_run_without_topics_is_a_config_error(config: RunConfig) -> None:
    other = config.model_copy(update={"run": config.run.model_copy(update={"id": "absent"})})
    with pytest.raises(ConfigError, match="the broker has no topics of a run 'absent'"):
        check_run(other, schema_directory())


@pytest.fixture
def with_registry(config: RunConfig) -> Iterator[RunConfig]:
    with serve_registry() as registry:
        broker = config.broker.model_copy(
            update={"schema_registry": registry.url, "request_timeout_seconds": 0.6}
        )
        yield config.model_copy(update={"broker": broker})


def test_doctor_asks_the_registry(config: RunConfig, with_registry: RunConfig) -> None:
    assert check_registry(CheckedRun(config)) == "none: records carry their schema's fingerprint"
    assert (
        check_registry(CheckedRun(with_registry))
        == f"{with_registry.broker.schema_registry} answers; it holds 0 subject(s)"
    )


def test_doctor_names_ids_under_which_the_registry_has_other_schemas(
    with_registry: RunConfig, publish: Callable[[str, bytes | None], None]
) -> None:
    codec = open_codec(with_registry.broker)
    codec.frame()
    for fingerprint, schema in codec.published_form().items():
        publish(fingerprint.hex(), schema)
    assert "answers" in check_registry(CheckedRun(with_registry))
    with serve_registry() as replaced:
        foreign = {"schema": '{"type": "record", "name": "Foreign", "fields": []}'}
        replaced.answer("POST", "/subjects/foreign/versions", foreign)
        other = with_registry.broker.model_copy(update={"schema_registry": replaced.url})
        with pytest.raises(
            CheckFailed,
            match=rf"under {len(codec.schemas)} id\(s\) of this run's log, the first is {FIRST_ID}:",
        ):
            check_registry(CheckedRun(with_registry.model_copy(update={"broker": other})))


def test_doctor_reports_an_unavailable_registry(with_registry: RunConfig) -> None:
    away = with_registry.broker.model_copy(update={"schema_registry": "http://127.0.0.1:1"})
    with pytest.raises(
        BrokerUnavailable,
        match=r"schema registry http://127\.0\.0\.1:1, asking for the subjects: ConnectError",
    ):
        check_registry(CheckedRun(with_registry.model_copy(update={"broker": away})))
