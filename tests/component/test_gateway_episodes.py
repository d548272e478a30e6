"""Episodes of real programs against a real engine: exact tokens, bounds, failures, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import structlog
from engine_requests import plain_logprobs
from gateway_agents import begin, episodes, finish

from relax_events.deadline import Deadline
from relax_events.engines.protocol import GeneratedSample
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.packages.gateway.program import (
    GUARD,
    YOUNG_SECONDS,
    delete_abandoned_folders,
    locked_folder,
)
from relax_events.packages.gateway.program_guard import FOLDER_PREFIX

TALK = """
tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
for number in range(3):
    reply = say(messages, tools=tools, max_tokens=8)
    messages += [reply, {"role": "user", "content": f"more {number}"}]
"""


def test_an_episode_is_trained_on_the_tokens_and_logprobs_of_the_engine(tmp_path: Path) -> None:
    with episodes(tmp_path, TALK) as engine:
        begin(engine, num_samples=4)
        samples = finish(engine)
        renderer = engine._renderer
        expected_prompt = renderer.prompt_tokens([ChatMessage.of_text("user", "12")])
    for sample in samples:
        assert sample.prompt_tokens is not None
        assert sample.loss_mask is not None
        np.testing.assert_array_equal(sample.prompt_tokens, expected_prompt)
        assert [turn.role for turn in sample.turns] == [
            *("assistant", "user") * 2,
            "assistant",
        ]
        expected = plain_logprobs(expected_prompt, sample.tokens, path=tmp_path / "model")
        mask = sample.loss_mask == 1
        np.testing.assert_allclose(sample.logprobs[mask], expected[mask], atol=1e-4)
        assert not sample.logprobs[sample.loss_mask == 0].any()
    assert len({sample.tokens.tobytes() for sample in samples}) > 1


def test_the_same_seeds_give_the_same_episodes(tmp_path: Path) -> None:
    with episodes(tmp_path, TALK) as engine:
        begin(engine, num_samples=2)
        first = finish(engine)
        begin(engine, num_samples=2)
        second = finish(engine)
    assert [one.tokens.tolist() for one in first] == [one.tokens.tolist() for one in second]


TOGETHER = """
import threading
def call(text):
    say([{"role": "user", "content": text}], max_tokens=8)
threads = [threading.Thread(target=call, args=(text,)) for text in ("1", "2", "2", "12")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_calls_of_one_episode_run_at_the_same_time_and_sample_the_same_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine samples nothing before it has all four calls."""
    runs, joined = [], threading.Event()
    with episodes(tmp_path, TOGETHER) as engine:
        inner = engine._engine
        poll = inner.poll

        def poll_joined(*, timeout_seconds: float) -> list[GeneratedSample]:
            if inner.num_running == 4:
                joined.set()
            if joined.wait(0.05):
                return poll(timeout_seconds=timeout_seconds)
            return []

        monkeypatch.setattr(inner, "poll", poll_joined)
        for _ in range(2):
            joined.clear()
            begin(engine)
            (sample,) = finish(engine)
            assert joined.is_set()
            assert sample.prompt_tokens is not None
            tokens = np.concatenate([sample.prompt_tokens, sample.tokens])
            paths = np.split(tokens, np.cumsum(sample.path_lengths)[:-1])
            runs.append(sorted(path.tolist() for path in paths))
    assert runs[0] == runs[1]
    assert len({tuple(path) for path in runs[0]}) == 4, "the same messages, another turn"


def test_a_program_that_asks_for_too_many_turns_ends_as_cut_off(tmp_path: Path) -> None:
    body = """
while True:
    messages += [say(messages, max_tokens=2), {"role": "user", "content": "more"}]
"""
    with episodes(tmp_path, body) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.finish_reason is FinishReason.LENGTH
    assert sum(turn.role == "assistant" for turn in sample.turns) == 4


def test_a_failing_program_is_begun_again_and_then_fails_its_sample(tmp_path: Path) -> None:
    mark = tmp_path / "attempts"
    body = f"""
say(messages, max_tokens=2)
with open({str(mark)!r}, "a") as file:
    file.write("x")
sys.exit("the sandbox is gone")
"""
    with episodes(tmp_path, body, attempts=2) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert mark.read_text() == "xx"
    assert sample.finish_reason is FinishReason.ERROR
    assert "attempt 2 of 2: exited with 1: the sandbox is gone" in sample.error


def test_an_attempt_that_fails_leaves_nothing_in_the_sample(tmp_path: Path) -> None:
    mark = tmp_path / "failed"
    body = f"""
messages += [say(messages, max_tokens=4), {{"role": "user", "content": "again"}}]
if not os.path.exists({str(mark)!r}):
    open({str(mark)!r}, "w")
    sys.exit("once")
say(messages, max_tokens=4)
"""
    with episodes(tmp_path, body) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.finish_reason is not FinishReason.ERROR
    assert sum(turn.role == "assistant" for turn in sample.turns) == 2


FORK = """
first = say(messages, max_tokens=4)
say([{"role": "user", "content": "a summary"}], max_tokens=4)
"""


def test_an_edited_history_forks_and_both_paths_are_trained(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs, episodes(tmp_path, FORK) as engine:
        begin(engine)
        (sample,) = finish(engine)
        first, second = (
            engine._renderer.prompt_tokens([ChatMessage.of_text("user", text)])
            for text in ("12", "a summary")
        )
        assert sample.prompt_tokens is not None
        assert sample.loss_mask is not None
        tokens = np.concatenate([sample.prompt_tokens, sample.tokens])
        mask = np.concatenate([np.zeros(len(first), np.uint8), sample.loss_mask])
        paths = np.split(tokens, [sample.path_lengths[0]])
    (event,) = [one for one in logs if one["event"] == "session.forked"]
    assert (event["num_forks"], event["num_paths"], event["num_untrained_tokens"]) == (1, 2, 0)
    for path, prompt in zip(paths, (first, second), strict=True):
        np.testing.assert_array_equal(path[: len(prompt)], prompt)
        assert 0 < len(path) - len(prompt) <= 4
    expected = np.concatenate(
        [
            np.append(0.0, plain_logprobs(path[:1], path[1:], path=tmp_path / "model"))
            for path in paths
        ]
    )
    sampled = np.concatenate([np.zeros(len(first)), sample.logprobs])
    np.testing.assert_allclose(sampled[mask == 1], expected[mask == 1], atol=1e-4)
    assert [message.text for message in sample.prompt_messages] == ["a summary"]


def test_paths_that_the_program_left_are_not_trained_where_the_run_wants_the_last(
    tmp_path: Path,
) -> None:
    with (
        structlog.testing.capture_logs() as logs,
        episodes(tmp_path, FORK, trained_paths="last") as engine,
    ):
        begin(engine)
        (sample,) = finish(engine)
        expected = engine._renderer.prompt_tokens([ChatMessage.of_text("user", "a summary")])
    (event,) = [one for one in logs if one["event"] == "session.forked"]
    assert 0 < event["num_untrained_tokens"] <= 4
    assert sample.path_lengths == ()
    assert sample.prompt_tokens is not None
    np.testing.assert_array_equal(sample.prompt_tokens, expected)


def test_late_programs_fail_by_stage(tmp_path: Path) -> None:
    with episodes(tmp_path, "time.sleep(60)", attempts=1, start_seconds=0.5) as engine:
        begin(engine)
        (late,) = finish(engine)
    assert "did not call the model within 0.5 s (environment.start_seconds)" in late.error
    mark = tmp_path / "attempts"
    body = f"""
with open({str(mark)!r}, "a") as file:
    file.write("x")
say(messages, max_tokens=2)
time.sleep(60)
"""
    with episodes(tmp_path, body, attempts=3, episode_seconds=5.0) as engine:
        begin(engine)
        (slow,) = finish(engine)
    assert mark.read_text() == "x", "a program has a process of its own"
    assert (slow.finish_reason, len(slow.tokens) > 0) == (FinishReason.LATE, True)
    assert "took longer than 5 s (environment.episode_seconds)" in slow.error


def test_call_may_wait_longer_for_the_policy_than_its_program_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with episodes(tmp_path, "say(messages, max_tokens=2)", attempts=1, episode_seconds=3.0) as one:
        inner, deadline = one._engine, 0.0
        poll = inner.poll

        def poll_late(*, timeout_seconds: float) -> list[GeneratedSample]:
            nonlocal deadline
            if inner.num_running:
                deadline = deadline or time.monotonic() + 5.0
            if time.monotonic() < deadline:
                time.sleep(0.05)
                return []
            return poll(timeout_seconds=timeout_seconds)

        monkeypatch.setattr(inner, "poll", poll_late)
        begin(one)
        (sample,) = finish(one)
    assert (sample.finish_reason, sample.error) == (FinishReason.LENGTH, "")


def test_keys_of_other_sessions_and_ended_ones_are_refused(tmp_path: Path) -> None:
    body = """
status, text = ask(messages, key="other")
assert status == 401, text
status, text = ask(messages, n=2)
assert status == 400 and "n = 2" in text, text
status, text = ask([{"role": "user", "content": [{"type": "image_url"}]}])
assert status == 400 and "text parts only" in text, text
status, text = ask(messages, max_tokens=2, stream=True, stream_options={"include_usage": True})
assert status == 200 and text.rstrip().endswith("data: [DONE]"), text
events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
assert events[0]["choices"][0]["delta"]["role"] == "assistant"
assert events[-2]["choices"][0]["finish_reason"] in ("stop", "length")
assert events[-1]["usage"]["completion_tokens"] > 0
"""
    with episodes(tmp_path, body, attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.error == ""


def test_aborted_episodes_leave_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    body = f"""
child = os.fork()
if child == 0:
    os.setsid()
    time.sleep(60)
with open({str(mark)!r}, "a") as file:
    file.write(f"{{os.getpid()}} {{child}} ")
say(messages, max_tokens=2)
time.sleep(60)
"""
    with episodes(tmp_path, body) as engine:
        begin(engine, num_samples=2)
        deadline = Deadline(60.0)
        while not mark.exists() or len(mark.read_text().split()) < 4:
            engine.poll(timeout_seconds=0.05)
            assert not deadline.passed
        aborted = engine.abort()
    assert [sample.finish_reason for sample in aborted] == [FinishReason.ABORT] * 2
    assert all(is_gone(int(pid)) for pid in mark.read_text().split())


def test_folders_that_a_killed_worker_left_are_deleted_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    long_ago = time.time() - 2 * YOUNG_SECONDS
    left, young, other = (tmp_path / name for name in ("relax-episode-a", "relax-episode-b", "c"))
    for folder in (left, young, other):
        folder.mkdir()
        (folder / "file").write_text("x")
    with locked_folder() as used:
        for folder in (left, other, used):
            os.utime(folder, (long_ago, long_ago))
        assert delete_abandoned_folders() == 1
        assert sorted(tmp_path.iterdir()) == sorted([young, other, used])
    assert not used.exists()


PARENT = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
time.sleep(60)
"""


def test_programs_end_with_their_worker(tmp_path: Path) -> None:
    command = sys.executable
    mark = tmp_path / "pid"
    script = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    folder = tmp_path / f"{FOLDER_PREFIX}1"
    folder.mkdir()
    worker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PARENT,
            *(command, "-I", "-S", str(GUARD), str(4 * 1024**3), str(folder)),
            *(command, "-c", script),
        ],
        cwd=folder,
    )
    deadline = Deadline(60.0)
    while not mark.exists() or not mark.read_text():
        assert not deadline.passed
        time.sleep(0.02)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    while folder.exists() or not is_gone(int(mark.read_text())):
        assert not deadline.passed
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
