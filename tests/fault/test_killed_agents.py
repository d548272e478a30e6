"""Runs whose samples are episodes of a foreign program, with a kill in the middle of episodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import (
    FaultRun,
    agents_of,
    assert_ledger_balances,
    assert_spent_attempts_are_not_scored,
    failpoint_marker,
)

pytestmark = pytest.mark.long

AGENT = """
import http.client, json, os, sys
from urllib.parse import urlsplit
task = json.load(open(os.environ["RELAX_TASK_FILE"]))
compacts = sum(task["prompt_group_id"].encode()) % 2
base = urlsplit(os.environ["OPENAI_BASE_URL"])
messages = task["messages"]
for number in range(2):
    if number and compacts:
        messages = [{"role": "user", "content": "a summary"}]
    connection = http.client.HTTPConnection(base.hostname, base.port, timeout=60)
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 3})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}
    connection.request("POST", base.path + "/chat/completions", body, headers)
    reply = connection.getresponse()
    answer = json.load(reply)
    if reply.status != 200:
        sys.exit(answer["error"]["message"])
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "and"}]
"""


def start_agents(
    start_run: Callable[..., FaultRun],
    file: Path,
    program: str,
    *,
    run: dict[str, int],
    **environment: int,
) -> FaultRun:
    """Prepare a run whose samples are a program's episodes."""
    file.write_text(program)
    return start_run(
        run={"prompts_per_step": 4, **run},
        algorithm={"kl_coefficient": 0.0, "old_logprobs": "rollout"},
        environment={"command": [sys.executable, "-I", "-S", str(file)], **environment},
    )


def test_killed_rollout_worker_begins_its_episodes_again_and_trains_each_once(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    file = tmp_path / "agent.py"
    run = start_agents(start_run, file, AGENT, run={"num_steps": 6}, concurrency=8)
    process = run.start()
    run.wait_until_steps(1)
    run.wait_until(lambda: bool(agents_of(file)), "an episode runs")
    running = agents_of(file)
    killed = run.kill("rollout-0")
    run.wait_until(
        lambda: not any(one.is_running() for one in running),
        "the killed worker's programs are gone",
    )
    run.wait_until_ready_again("rollout-0", killed=killed)
    assert run.wait_until_ended(process) == 0
    assert_ledger_balances(run)
    assert agents_of(file) == []
    samples = run.samples()
    assert {len(sample.path_lengths) for sample in samples} == {0, 2}
    assert all(sum(one.path_lengths) in (0, one.tokens.shape[0]) for one in samples)


def test_workers_killed_at_named_points_leave_no_program_and_train_each_episode_once(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    file = tmp_path / "agent.py"
    run = start_agents(start_run, file, AGENT, run={"num_steps": 6}, concurrency=8)
    points = tuple(
        f"{point}=kill"
        for point in ("rollout.generating:2", "rollout.before_flush:2", "rollout.before_settle:3")
    )
    run.arm(*points)
    assert run.wait_until_ended(run.start()) == 0
    assert run.fired() == {failpoint_marker(point) for point in points}
    assert_ledger_balances(run)
    assert agents_of(file) == []


FAILING = (
    AGENT
    + """
if sum(task["prompt_group_id"].encode()) % 3 == 0:
    sys.exit("the sandbox is gone")
"""
)


def test_spent_attempts_become_dead_letters_and_no_rewards(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    bounds = {"num_steps": 3, "max_failed_prompt_groups": 1000}
    run = start_agents(start_run, tmp_path / "agent.py", FAILING, run=bounds, attempts=2)
    assert run.wait_until_ended(run.start()) == 0
    assert_ledger_balances(run)
    reason = "attempt 2 of 2: exited with 1: the sandbox is gone"
    spent = assert_spent_attempts_are_not_scored(run, reason)
    assert {name for name, text in run.failures.items() if "sandbox is gone" in text} <= spent
