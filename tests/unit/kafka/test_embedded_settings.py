"""The broker's properties file, read back by the rules of java.util.Properties."""

from pathlib import Path

import pytest

from relax_events.errors import ConfigError
from relax_events.kafka.embedded.settings import build_server_properties, escape_property


def read(text: str) -> dict[str, str]:
    assert text.isascii()
    return dict(line.split("=", 1) for line in text.splitlines())


def settings(data: str = "/node/data", **overrides: str) -> dict[str, str]:
    named = {key.replace("_", "."): value for key, value in overrides.items()}
    return read(
        build_server_properties(Path(data), port=20001, controller_port=20002, overrides=named)
    )


def test_server_properties_listen_only_on_loopback() -> None:
    written = settings()
    assert written["listeners"] == "PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002"
    assert written["advertised.listeners"] == "PLAINTEXT://127.0.0.1:20001"
    assert written["controller.quorum.voters"] == "1@127.0.0.1:20002"


def test_server_properties_contain_settings_the_pipeline_requires() -> None:
    written = settings()
    expected = {
        "auto.create.topics.enable": "false",
        "delete.topic.enable": "true",
        "message.max.bytes": "67108864",
        "log.message.timestamp.type": "LogAppendTime",
        "broker.session.timeout.ms": "4000",
        "group.share.max.record.lock.duration.ms": "3600000",
        "group.share.min.record.lock.duration.ms": "1000",
        "offsets.topic.num.partitions": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        "transaction.state.log.num.partitions": "1",
    }
    assert expected.items() <= written.items()


def test_server_properties_take_overrides() -> None:
    assert (
        settings(log_cleaner_threads="2", num_io_threads="3").items()
        >= {"log.cleaner.threads": "2", "num.io.threads": "3"}.items()
    )


@pytest.mark.parametrize(
    "key",
    [
        "listeners",
        "log.dirs",
        "node.id",
        "process.roles",
        "controller.quorum.voters",
        "advertised.listeners",
    ],
)
def test_server_properties_refuse_overrides_of_identity_and_folder(key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"node_properties must not set {key}: the embedded broker controls it"
    ):
        build_server_properties(Path("/node/data"), port=1, controller_port=2, overrides={key: "x"})


def test_server_properties_refuse_a_folder_when_it_holds_a_comma() -> None:
    with pytest.raises(ConfigError, match="must not contain a comma, got '/a,b/data'"):
        settings("/a,b/data")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("/plain/path-1.0_x", "/plain/path-1.0_x"),
        (" leading", "\\u0020leading"),
        ("C:\\dir", "C:\\u005cdir"),
        ("caf\u00e9", "caf\\u00e9"),
        ("\U0001f600", "\\ud83d\\ude00"),
        ("two\nlines", "two\\u000alines"),
    ],
)
def test_escape_property_round_trips_through_java(text: str, written: str) -> None:
    assert escape_property(text) == written
