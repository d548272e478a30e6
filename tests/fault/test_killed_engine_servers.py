"""Runs whose episodes sample on a real SGLang server, which is killed in the middle of sessions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from harness import FaultRun, agents_of, assert_ledger_balances

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
NUM_TURNS = 3
SOME_TOKENS = 100
AGENT = f"""
import http.client, json, os, sys
from urllib.parse import urlsplit
task = json.load(open(os.environ["RELAX_TASK_FILE"]))
base = urlsplit(os.environ["OPENAI_BASE_URL"])
messages = task["messages"]
for _ in range({NUM_TURNS}):
    connection = http.client.HTTPConnection(base.hostname, base.port, timeout=300)
    body = json.dumps({{"model": "any", "messages": messages, "max_tokens": 200}})
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}}
    connection.request("POST", base.path + "/chat/completions", body, headers)
    reply = connection.getresponse()
    answer = json.load(reply)
    if reply.status != 200:
        sys.exit(answer["error"]["message"])
    messages += [answer["choices"][0]["message"], {{"role": "user", "content": "and"}}]
"""


def server_of(worker: int) -> list[psutil.Process]:
    """Return the processes of the server that a rollout worker has started."""
    return [
        process
        for child in psutil.Process(worker).children()
        if any(word.endswith("launch.py") for word in child.cmdline())
        for process in (child, *child.children(recursive=True))
    ]


def num_sampled(run: FaultRun) -> float:
    """Return the tokens that the rollout worker's engine has sampled."""
    metrics = run.metrics("rollout-0").items()
    counted = "relax_engine_tokens_total"
    return sum(
        value for name, value in metrics if name.startswith(counted) and '"generated"' in name
    )


def test_sessions_of_a_killed_sglang_server_continue_and_are_trained_once(
    start_run: Callable[..., FaultRun], sglang_python: str, tmp_path: Path
) -> None:
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    run = start_run(
        run={"num_steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2},
        algorithm={"kl_coefficient": 0.0, "old_logprobs": "actor"},
        environment={
            "command": [sys.executable, "-I", "-S", str(file)],
            "concurrency": 8,
            "attempts": 5,
        },
        engine={
            "name": "sglang",
            "max_context_tokens": 1024,
            "max_running_samples": 8,
            "sampling": {"max_new_tokens": 600},
            "sglang": {"python": sglang_python},
        },
    )
    run.patience = 4.0
    process = run.start()
    run.wait_until(lambda: run.is_ready("rollout-0"), "the server has started")
    run.wait_until(
        lambda: bool(agents_of(file)) and num_sampled(run) > SOME_TOKENS, "turns are sampled"
    )
    worker = run.pid("rollout-0")
    victims = server_of(worker)
    assert len(victims) >= 2, "the server has a scheduler"
    for victim in victims:
        victim.kill()
    run.wait_until(
        lambda: bool(run.logged("rollout-0", "engine.lost")), "the worker has seen the loss"
    )
    (lost,) = run.logged("rollout-0", "engine.lost")
    assert lost["num_samples"] > 0, "turns of sessions were under way"
    assert run.wait_until_ended(process) == 0
    assert run.pid("rollout-0") == worker, "the worker itself has lived on"
    assert run.logged("rollout-0", "engine.recovered")
    assert_ledger_balances(run)
    assert agents_of(file) == []
    for sample in run.samples():
        assert sum(turn.role == "assistant" for turn in sample.turns) == NUM_TURNS
