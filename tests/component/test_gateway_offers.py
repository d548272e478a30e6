"""Sessions for harnesses that a person starts: taken, driven, finished, and begun again."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from gateway_agents import begin, episodes, finish

from relax_events.deadline import Deadline
from relax_events.engines.protocol import GeneratedSample
from relax_events.episodes.engine import EpisodeEngine
from relax_events.events.parts import FinishReason
from relax_events.packages.gateway import program_driver

TOKEN = "a-token"


def post(url: str, path: str, body: dict[str, Any], *, key: str = TOKEN) -> tuple[int, Any]:
    """Call a gateway."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=100)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, json.loads(text) if text else None


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def offering(folder: Path, **environment: Any) -> Iterator[EpisodeEngine]:
    """Open an engine whose episodes wait for a harness."""
    file = folder / "token"
    file.write_text(TOKEN)
    harness = {"port": free_port(), "token_file": file}
    with episodes(folder, "", harness=harness, **environment) as engine:
        yield engine


def drive(
    engine: EpisodeEngine, work: Callable[[str], None], *, num_samples: int = 1
) -> list[GeneratedSample]:
    """Run a harness in a thread and the rollout loop in this one, and return the samples."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(engine._driver.url)
        except BaseException as error:
            errors.append(error)

    begin(engine, num_samples=num_samples)
    thread = threading.Thread(target=run)
    thread.start()
    found: list[GeneratedSample] = []
    while thread.is_alive():
        found += engine.poll(timeout_seconds=0.05)
    thread.join()
    if errors:
        raise errors[0]
    return [*found, *finish(engine)]


def say(session: dict[str, Any], messages: list[Any]) -> Any:
    """Ask the policy in a session."""
    status, found = post(
        session["base_url"],
        "/v1/chat/completions",
        {"model": "any", "messages": messages, "max_tokens": 4},
        key=session["key"],
    )
    assert status == 200, found
    return found["choices"][0]["message"]


def test_a_harness_takes_drives_and_finishes_its_sessions(tmp_path: Path) -> None:
    def work(url: str) -> None:
        for number in range(2):
            status, session = post(url, "/sessions", {})
            assert status == 200, session
            assert session["base_url"] == f"{url}/v1"
            assert session["task"]["messages"] == [{"role": "user", "content": "12"}]
            say(session, session["task"]["messages"])
            reward = {"reward": 0.5} if number else {}
            assert post(url, "/sessions/finish", reward, key=session["key"])[0] == 200
            assert post(url, "/sessions/finish", reward, key=session["key"])[0] == 200

    with offering(tmp_path) as engine:
        samples = drive(engine, work, num_samples=2)
    assert sorted(sample.environment_rewards for sample in samples) == [(), (0.5,)]
    assert all(sample.num_sampled_tokens for sample in samples)


def test_sessions_are_for_harnesses_with_the_token_alone(tmp_path: Path) -> None:
    def work(url: str) -> None:
        assert post(url, "/sessions", {}, key="other")[0] == 401
        assert post(url, "/sessions/finish", {}, key="other")[0] == 401
        status, found = post(url, "/sessions", {"wait_seconds": 90})
        assert status == 400, found
        _, session = post(url, "/sessions", {})
        assert post(url, "/sessions", {"wait_seconds": 0.05}) == (204, None)
        assert post(url, "/sessions/finish", {"reward": "high"}, key=session["key"])[0] == 400
        say(session, session["task"]["messages"])
        assert post(url, "/sessions/finish", {}, key=session["key"])[0] == 200

    with offering(tmp_path) as engine:
        (sample,) = drive(engine, work)
    assert sample.error == ""


def test_a_harness_that_hangs_up_while_it_waits_takes_nothing(tmp_path: Path) -> None:
    with offering(tmp_path, attempts=1, start_seconds=100.0) as engine:
        address = urlsplit(engine._driver.url)
        leaving = http.client.HTTPConnection(address.hostname or "", address.port, timeout=100)
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        leaving.request("POST", "/sessions", "{}", headers)
        assert post(engine._driver.url, "/sessions", {"wait_seconds": 0.2}) == (204, None)
        leaving.close()
        assert engine._driver.offers is not None
        deadline = Deadline(60.0)
        while engine._driver.offers._changed._waiters:  # until the gateway has seen that it left
            assert not deadline.passed
            time.sleep(0.01)

        def work(url: str) -> None:
            _, session = post(url, "/sessions", {})
            say(session, session["task"]["messages"])
            assert post(url, "/sessions/finish", {}, key=session["key"])[0] == 200

        (sample,) = drive(engine, work)
    assert sample.error == ""


def test_a_failed_or_late_harness_has_its_episode_begun_again(tmp_path: Path) -> None:
    def work(url: str) -> None:
        _, first = post(url, "/sessions", {})
        say(first, first["task"]["messages"])
        assert post(url, "/sessions/finish", {"error": "disk full"}, key=first["key"])[0] == 200
        _, second = post(url, "/sessions", {})  # and is gone: its deadline passes
        status, third = post(url, "/sessions", {"wait_seconds": 60})
        assert status == 200, third
        assert len({session["key"] for session in (first, second, third)}) == 3
        assert {session["sample_id"] for session in (first, second, third)} == {first["sample_id"]}
        say(third, third["task"]["messages"])
        assert post(url, "/sessions/finish", {"reward": 1}, key=third["key"])[0] == 200

    with offering(tmp_path, attempts=3, start_seconds=5.0) as engine:
        (sample,) = drive(engine, work)
    assert sample.error == ""
    assert sample.environment_rewards == (1.0,)
    assert sum(turn.role == "assistant" for turn in sample.turns) == 1


def test_an_episode_whose_attempts_are_spent_fails_with_the_reason(tmp_path: Path) -> None:
    def work(url: str) -> None:
        _, session = post(url, "/sessions", {})
        assert post(url, "/sessions/finish", {"error": "disk full"}, key=session["key"])[0] == 200

    with offering(tmp_path, attempts=1) as engine:
        (sample,) = drive(engine, work)
    assert sample.finish_reason is FinishReason.ERROR
    assert "attempt 1 of 1: the harness failed: disk full" in sample.error


def test_waiting_for_a_harness_counts_as_progress_and_can_be_aborted(tmp_path: Path) -> None:
    with offering(tmp_path) as engine:
        begin(engine)
        before = engine.num_tokens
        for _ in range(3):
            engine.poll(timeout_seconds=0.02)
        assert engine.num_tokens > before
        (aborted,) = engine.abort()
        assert post(engine._driver.url, "/sessions", {"wait_seconds": 0.2}) == (204, None)
    assert aborted.finish_reason is FinishReason.ABORT


def test_harness_that_dies_during_a_call_has_its_episode_begun_again_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_driver, "GONE_SECONDS", 0.1)
    with offering(tmp_path, attempts=2, idle_seconds=500.0) as engine:
        begin(engine)
        offers = engine._driver.offers
        assert offers is not None
        _, first = post(engine._driver.url, "/sessions", {"wait_seconds": 60})
        assert first["idle_seconds"] == 500.0
        dying = _begin_call(first)
        deadline = Deadline(60.0)
        while offers._taken[first["key"]].session.clock.runs.is_set():
            assert not deadline.passed, "the call has not arrived"
            time.sleep(0.01)
        dying.close()
        status, second = post(engine._driver.url, "/sessions", {"wait_seconds": 60})
        assert status == 200, "the episode was not begun again"
        assert second["sample_id"] == first["sample_id"]
        assert post(engine._driver.url, "/sessions/finish", {}, key=first["key"])[0] == 401
        engine.abort()


def _begin_call(session: dict[str, Any]) -> socket.socket:
    """Send a call whose answer is not read."""
    address = urlsplit(session["base_url"])
    body = json.dumps({"model": "any", "messages": session["task"]["messages"]})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Authorization: Bearer {session['key']}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((address.hostname or "", address.port or 0), timeout=60)
    connection.sendall((head + body).encode())
    return connection
