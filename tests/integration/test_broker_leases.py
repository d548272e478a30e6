"""Leases on the embedded broker: it runs while any client holds a lease, also after the process
that started it died, and never stops under a client.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from relax_events.cli.broker import app
from relax_events.config import RunConfig
from relax_events.errors import BrokerUnavailable, CheckFailed
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.session.broker_address import attach

USER = """
import pathlib, sys
from relax_events.kafka.embedded import EmbeddedBroker
with EmbeddedBroker(pathlib.Path(sys.argv[1])).in_use("relax run") as is_new:
    print("started" if is_new else "found", flush=True)
    sys.stdin.read()
"""
END_SECONDS = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """Yield a broker that is not started yet."""
    broker = EmbeddedBroker(tmp_path / "node")
    try:
        yield broker
    finally:
        broker.stop()


@contextmanager
def user(broker: EmbeddedBroker) -> Iterator[subprocess.Popen[bytes]]:
    """Have another process use the broker until its input is closed."""
    command = [sys.executable, "-c", USER, str(broker.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[bytes]) -> str:
    """Return the next line of a user."""
    return _pipe(process.stdout).readline().decode().strip()


def leave(process: subprocess.Popen[bytes]) -> None:
    """Have a user leave, and wait for it."""
    _pipe(process.stdin).close()
    assert process.wait(END_SECONDS) == 0


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def test_concurrent_users_share_a_broker_that_the_last_one_stops(
    broker: EmbeddedBroker,
) -> None:
    with user(broker) as first, user(broker) as second:  # the later one waits for the start
        assert sorted([said(first), said(second)]) == ["found", "started"]
        assert sorted(broker.users) == sorted([first.pid, second.pid])
        with pytest.raises(CheckFailed, match=rf"is used by process .*{first.pid}"):
            app(["stop", "--directory", str(broker.directory)], result_action="return_value")
        leave(first)
        assert broker.is_running
        leave(second)
    assert not broker.is_running


def test_next_user_stops_the_broker_of_one_who_was_killed(broker: EmbeddedBroker) -> None:
    with user(broker) as killed:
        assert said(killed) == "started"
        killed.kill()
        killed.wait(END_SECONDS)
    assert broker.is_running
    assert broker.users == []
    with user(broker) as adopting:
        assert said(adopting) == "found"
        leave(adopting)
    assert not broker.is_running


def test_last_user_stops_a_broker_that_was_killed_and_restarted(
    broker: EmbeddedBroker,
) -> None:
    with broker:
        broker.kill()
        again = EmbeddedBroker(broker.directory)  # as another process restarts it
        again.restart()
        assert again.is_running
    assert not broker.is_running


def test_last_user_stops_the_broker_after_the_clock_was_set(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broker:
        started_at = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: started_at(process) + 60)
        pid = broker.pid
        assert pid is not None
    assert not broker.is_running
    assert not psutil.pid_exists(pid)


def test_broker_start_keeps_the_broker_when_its_users_leave(
    broker: EmbeddedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    with user(broker) as other:
        said(other)
        app(["start", "--directory", str(broker.directory)], result_action="return_value")
        assert capsys.readouterr().out.strip() == broker.bootstrap_servers
        leave(other)
    assert broker.is_running
    broker.kill()
    broker.restart()
    with user(broker) as other:
        assert said(other) == "found"
        leave(other)
    assert broker.is_running, "a crash does not change who it was started for"
    app(["stop", "--directory", str(broker.directory)], result_action="return_value")
    assert not broker.is_running


def test_command_starts_a_stopped_broker_for_its_own_duration(
    make_run_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run_config()
    broker = EmbeddedBroker(config.run.directory / "broker")
    with (
        pytest.raises(BrokerUnavailable, match="no broker was ever started"),
        attach(config, by="relax ledger check"),
    ):
        pass
    with broker:
        pass
    with (
        pytest.raises(BrokerUnavailable, match="does not run; start it with"),
        attach(config, by="relax worker reward", brings_up=False),
    ):
        pass
    with attach(config, by="relax ledger check") as reached:
        assert reached.broker.bootstrap_servers == broker.bootstrap_servers
        assert broker.is_running
    assert "is down; starting it for relax ledger check" in capsys.readouterr().err
    assert not broker.is_running
