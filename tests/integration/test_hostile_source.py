"""A log written by an unknown producer: listing and forking it run none of its code and contact no
address before the user agrees.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from relax_events.cli import runs
from relax_events.cli.parameters import BrokerOptions
from relax_events.cli.rewards import rewards
from relax_events.cli.run_training import fork, replay
from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.events.codec import EventCodec
from relax_events.history.cluster import Cluster
from relax_events.history.runs.forking import ParentChoice, make_run_file
from relax_events.history.runs.inherited_code import UntrustedSettingsError
from relax_events.history.runs.replay import resolve_parent
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.runtime.run_description import ParentRun, build_run_description
from relax_events.topics import TopicPlan

CODEC = EventCodec()
ApplyRun = Callable[..., RunConfig]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listen where the description leads; `was_called` returns whether a client connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def was_called(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@dataclasses.dataclass
class Hostile:
    """A run whose description an unknown producer has written, and the trace that its code would
    leave."""

    config: RunConfig
    tree: dict[str, Any]
    trace: Path
    describe: Callable[[dict[str, Any]], None]


@pytest.fixture
def hostile(
    apply_run: ApplyRun, producer: RecordProducer, tmp_path: Path, listener: socket.socket
) -> Hostile:
    config, trace, url = (
        apply_run(),
        tmp_path / "trace",
        f"http://127.0.0.1:{listener.getsockname()[1]}",
    )
    (tmp_path / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    evil = f"{tmp_path / 'evil.py'}:x"
    tree = orjson.loads(build_run_description(config).config)
    tree["run"]["directory"] = str(tmp_path / "theirs")
    tree["algorithm"]["name"] = tree["trainer"]["backend"] = tree["engine"]["name"] = evil
    tree["reward"] |= {
        "function": "genrm",
        "options": {"url": url, "token_variable": "JUDGE_TOKEN"},
    }
    tree["engine"]["sglang"]["urls"], tree["telemetry"]["traces"]["endpoint"] = (
        [url],
        f"{url}/v1/traces",
    )
    topic = TopicPlan.from_config(config).topic("control.commands")

    def describe(description: dict[str, Any]) -> None:
        event = dataclasses.replace(
            build_run_description(config), config=orjson.dumps(description).decode()
        )
        producer.write([ProducerRecord(topic, CODEC.encode(event), partition=0)])
        producer.flush()

    describe(tree)
    return Hostile(config, tree, trace, describe)


@pytest.mark.parametrize("verb", [fork, replay])
def test_untrusted_settings_of_a_hostile_log_are_listed_and_not_used(
    verb: Callable[..., int],
    hostile: Hostile,
    listener: socket.socket,
    bootstrap_servers: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cr3t-of-the-forker")
    options = {
        "broker": BrokerOptions(bootstrap_servers=bootstrap_servers, directory=tmp_path / "mine")
    }
    runs.show(**options)
    runs.show(hostile.config.run.id, **options)
    assert hostile.config.run.id in capsys.readouterr().out
    with pytest.raises(UntrustedSettingsError) as refused:
        verb(hostile.config.run.id, f"{hostile.config.run.id}-new", **options)
    assert refused.value.exit_code == 2
    listed = {named.key for named in refused.value.named}
    used_by_both = {
        "algorithm.name",
        "trainer.backend",
        "model.path",
        "run.directory",
        "telemetry.traces.endpoint",
    }
    of_a_fork = {
        "engine.name",
        "engine.sglang.urls",
        "reward.options.url",
        "reward.options.token_variable",
        "data.source",
    }
    assert listed == (used_by_both | of_a_fork if verb is fork else used_by_both)
    assert "give --trust-source to inherit them as they are" in str(refused.value)
    assert not hostile.trace.exists()
    assert not was_called(listener)
    assert not (tmp_path / "mine").exists()


def test_comparing_rewards_uses_no_untrusted_settings_from_the_log(
    hostile: Hostile,
    listener: socket.socket,
    bootstrap_servers: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: dict[str, Any] = {
        "run": hostile.config.run.id,
        "broker": BrokerOptions(bootstrap_servers=bootstrap_servers, directory=tmp_path / "mine"),
        "output": "json",
    }
    rewards("exact_match", "f1", **given)
    assert orjson.loads(capsys.readouterr().out)["num_samples"] == 0
    with pytest.raises(UntrustedSettingsError) as refused:
        rewards("exact_match", "genrm", **given)
    assert {named.key for named in refused.value.named} == {
        "reward.options.url",
        "reward.options.token_variable",
    }
    assert not hostile.trace.exists()
    assert not was_called(listener)
    rewards("exact_match", "genrm", trust_source=True, **given)
    assert "the log of run" in capsys.readouterr().err


def test_fork_uses_the_object_store_that_the_user_accepted(
    hostile: Hostile, connection: Connection, bootstrap_servers: str, tmp_path: Path
) -> None:
    """The log may change before the workers start."""
    valid_config = orjson.loads(build_run_description(hostile.config).config)
    valid_config["run"]["directory"] = str(tmp_path / "theirs")
    hostile.describe(valid_config)
    cluster = Cluster.from_options(
        config=None, bootstrap_servers=bootstrap_servers, directory=tmp_path / "mine"
    )
    source = ParentRun.read(connection, hostile.config.run.id)
    new = f"{hostile.config.run.id}-new"
    config = make_run_file(
        cluster,
        source,
        new,
        ParentChoice(hostile.config.run.id, "fork", 0),
        (),
        accept=lambda _: None,
    )
    assert config.parent.objects_uri == source.config.objects_uri
    assert resolve_parent(config).parent.objects_uri == source.config.objects_uri
    valid_config["run"]["directory"] = str(tmp_path / "evil")
    hostile.describe(valid_config)
    again = ParentRun.read(connection, hostile.config.run.id, child_config=config)
    assert again.config.objects_uri != again.objects_uri == config.parent.objects_uri
    with pytest.raises(
        ConfigError,
        match=r"says that its objects lie in file://.*/evil/.*; set parent\.objects_uri to where they are",
    ):
        resolve_parent(config)
    unsaid = config.model_copy(
        update={"parent": config.parent.model_copy(update={"objects_uri": ""})}
    )
    with pytest.raises(
        ConfigError, match=r"and the run file that they lie in file://.*/mine/runs/"
    ):
        resolve_parent(unsaid)
