"""Runs whose sessions harnesses take that a person has started: gateways and harnesses are killed,
and each sample is trained once, with the harness's reward.
"""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import FaultRun, assert_ledger_balances, failpoint_marker

from relax_events.events.parts import FinishReason

pytestmark = pytest.mark.long
TOKEN = "a-token"
NUM_BEFORE = 16
"""Episodes of one step."""
HARNESS = """
import http.client, json, sys, threading, time
ports, token = [int(port) for port in sys.argv[1].split(",")], sys.argv[2]
limit = float(sys.argv[3])

def post(port, path, body, key):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    reply = connection.getresponse()
    text = reply.read()
    return reply.status, json.loads(text) if text else None

def episode(port):
    status, session = post(port, "/sessions", {"wait_seconds": 2}, token)
    if status != 200:
        return False
    messages = session["task"]["messages"]
    for _ in range(2):
        body = {"model": "any", "messages": messages, "max_tokens": 3}
        status, answer = post(port, "/v1/chat/completions", body, session["key"])
        if status != 200:
            return False
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "and"}]
    reward = {"reward": len(session["sample_id"]) % 2}
    return post(port, "/sessions/finish", reward, session["key"])[0] == 200

def serve(port):
    finished = 0
    while finished < limit:
        try:
            finished += episode(port)
        except OSError:
            time.sleep(0.2)

for port in ports:
    threading.Thread(target=serve, args=(port,)).start()
"""


def start_harness(
    file: Path, ports: list[int], *, limit: float = math.inf
) -> subprocess.Popen[bytes]:
    """Start a harness as a person does, in no relation to the run: it takes sessions from all
    gateways side by side, and ends after `limit` episodes of each.
    """
    file.write_text(HARNESS)
    names = ",".join(map(str, ports))
    return subprocess.Popen([sys.executable, "-I", "-S", str(file), names, TOKEN, str(limit)])


def free_ports() -> list[int]:
    """Return two free ports in a row."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return [port, port + 1]


@contextmanager
def running_harness(
    folder: Path, ports: list[int], *, limit: float = math.inf
) -> Iterator[subprocess.Popen[bytes]]:
    """Have a harness for as long as the block takes."""
    process = start_harness(folder / "harness.py", ports, limit=limit)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start_harness_run(
    start_run: Callable[..., FaultRun], folder: Path, ports: list[int], **sections: Any
) -> FaultRun:
    """Start a run whose episodes harnesses drive."""
    token = folder / "token"
    token.write_text(TOKEN)
    return start_run(
        **{
            "algorithm": {"kl_coefficient": 0.0, "old_logprobs": "rollout"},
            "environment": {
                "harness": {"port": ports[0], "token_file": str(token)},
                "concurrency": 8,
                "episode_seconds": 60.0,
                "attempts": 20,
            },
            "reward": {"function": "environment"},
        }
        | sections
    )


def assert_trained_once(run: FaultRun, *, max_late: int = 0) -> None:
    """Check the ledger, and that each sample has the harness's reward, but those of a harness that
    was killed between two calls: they are late."""
    assert_ledger_balances(run)
    samples = [one for one in run.samples() if one.finish_reason is not FinishReason.LATE]
    assert samples
    assert len(run.samples()) - len(samples) <= max_late
    for sample in samples:
        assert list(sample.environment_rewards) == [len(sample.sample_id) % 2]
        assert sum(turn.role == "assistant" for turn in sample.turns) == 2


def test_sessions_of_killed_gateways_and_harnesses_are_taken_again_and_trained_once(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    ports = free_ports()
    run = start_harness_run(start_run, tmp_path, ports, run={"num_steps": 8, "prompts_per_step": 4})
    points = (
        "rollout.generating=kill",
        "rollout.before_flush:2=kill",
        "rollout.before_settle:2=kill",
    )
    run.arm(*points)
    process = run.start()
    with running_harness(tmp_path, ports[:1]) as first:
        run.wait_until_steps(1)
        run.wait_until(lambda: run.num_taken("rollout-0") > 0, "a harness has sessions")
        first.kill()  # its machine is gone in the middle of a session
    with running_harness(tmp_path, ports[:1]):
        assert run.wait_until_ended(process) == 0
    assert run.fired() == {failpoint_marker(point) for point in points}
    assert_trained_once(run, max_late=1)


def test_a_gateway_joins_a_run_and_leaves_it_by_a_signal_without_losing_a_session(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    ports = free_ports()
    run = start_harness_run(start_run, tmp_path, ports, run={"num_steps": 8, "prompts_per_step": 4})
    process = run.start()
    # Without a harness the run waits until the second gateway is ready, however long that takes.
    with running_harness(tmp_path, ports[:1], limit=NUM_BEFORE) as first:
        assert run.wait_until_ended(first) == 0
    gateway = run.start("gateway", run.folder / "run.json", "--index", "1")
    run.wait_until(lambda: run.is_ready("rollout-1"), "the second gateway is ready")
    with running_harness(tmp_path, ports):
        run.wait_until(
            lambda: run.state.workers["rollout-1"].num_processed > 0, "it has written samples"
        )
        gateway.send_signal(signal.SIGTERM)
        assert run.wait_until_ended(gateway) == 0
        assert run.wait_until_ended(process) == 0
    assert_trained_once(run)
