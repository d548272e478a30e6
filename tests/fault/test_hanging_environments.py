"""Whole runs in which the environments of a tenth of the samples hang, or those of a tenth of the
prompts hang or die, or a program wherever the policy says what makes it hang.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from harness import FaultRun, assert_ledger_balances

from relax_events.events.parts import FinishReason
from relax_events.events.types import PromptGroupIssued
from tests.component.gateway_agents import write_program
from tests.misbehaving import NEXT, NUM_TURNS
from tests.misbehaving_kinds import environment_of, openenv_server

pytestmark = pytest.mark.long
SHARE = 10
"""One sample of so many has an environment that hangs, by its id."""
ENVIRONMENT = f"""
import asyncio, time, zlib


class Ordinary:
    def __init__(self, sample):
        self.hangs, self.turn = zlib.crc32(sample.index.encode()) % {SHARE} == 0, 0

    def reset(self):
        return {{}}, {{}}

    def step(self, response_text):
        if self.hangs:
            time.sleep(600)
        self.turn += 1
        return {{"obs_str": "next"}}, self.turn == 2, {{"reward": 0.5}}


class Asynchronous(Ordinary):
    async def step(self, response_text):
        await asyncio.sleep(0)
        return super().step(response_text)
"""
NUM_ROWS = 20
FAULTS_OF_ROWS = {3: "hang", 13: "kill"}
# Calls the tool of a server in each turn but the last, with what its prompt says; other environments
# don't read it. The first token is the policy's, and the log-probabilities of the others are made up.
ENGINE = f"""
import dataclasses
import json
import re

import numpy as np

from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.models.tokenizer_folder import FolderTokenizer


class Caller(TransformersEngine):
    def __init__(self, model_path, **settings):
        super().__init__(model_path, **settings)
        self.tokenizer, self.asked = FolderTokenizer.open(model_path), {{}}

    def submit(self, request):
        text = self.tokenizer.decode(request.prompt_tokens.tolist(), skip_special_tokens=True)
        for sample in request.samples:
            self.asked[sample.sample_id] = text, request.stop_token_ids
        one = request.sampling.model_copy(update={{"max_new_tokens": 1}})
        super().submit(dataclasses.replace(request, sampling=one))

    def poll(self, *, timeout_seconds):
        return [self.end_turn(one) for one in super().poll(timeout_seconds=timeout_seconds)]

    def end_turn(self, sample):
        text, stops = self.asked.pop(sample.sample_id)
        turn = 1 + text.count("{NEXT}")
        fault = re.search(r"do (\\w*) \\d", text)[1] if turn == 2 else ""
        call = json.dumps({{"name": "act", "arguments": {{"how": fault}}}})
        words = f"<tool_call>{{call}}</tool_call>" if turn < {NUM_TURNS} else "the answer"
        tokens = self.tokenizer.encode(words, add_special_tokens=False)
        tokens = [one for one in sample.tokens if one not in stops] + tokens + [stops[0]]
        return dataclasses.replace(
            sample,
            tokens=np.array(tokens, np.int32),
            logprobs=np.append(sample.logprobs[:1], np.full(len(tokens) - 1, -1.0, np.float32)),
            segments=(VersionSegment(sample.segments[0].policy_version, len(tokens)),),
            finish_reason=FinishReason.STOP,
        )
"""
NO_CHARACTER = "\ufffd"
"""What about half of the tokens of a policy of bytes look like."""
AGENT = f"""
if {NO_CHARACTER!r} in (say(messages, max_tokens=1)["content"] or ""):
    time.sleep(600)
"""


@pytest.mark.parametrize("name", ["Ordinary", "Asynchronous"])
def test_environments_that_hang_cost_their_own_samples(
    start_run: Callable[..., FaultRun], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "environment.py"
    file.write_text(ENVIRONMENT)
    run = start_run(
        run={"num_steps": 10},
        algorithm={"kl_coefficient": 0.0, "old_logprobs": "rollout"},
        reward={"function": "environment"},
        engine={"max_context_tokens": 256, "sampling": {"max_new_tokens": 64}},
        environment={
            "interface": "interaction",
            "function": f"{file}:{name}",
            "timeout_seconds": 10.0,
            "processes": 2,
        },
    )
    assert run.wait_until_ended(run.start()) == 0
    assert_ledger_balances(run)
    samples = run.samples()
    late = [one for one in samples if one.finish_reason is FinishReason.LATE]
    assert late
    assert {is_guilty(one.sample_id) for one in late} == {True}
    others = {one.finish_reason for one in samples if not is_guilty(one.sample_id)}
    assert others <= {FinishReason.STOP, FinishReason.LENGTH}
    reasons = [line["error"] for line in run.logged("rollout-0", "episode.failed")]
    assert reasons
    assert not [reason for reason in reasons if re.search(r"attempt \d", reason)]


def is_guilty(sample_id: str) -> bool:
    """Return whether a sample's environment hangs."""
    return zlib.crc32(sample_id.encode()) % SHARE == 0


@pytest.mark.parametrize("kind", ["function", "program", "openenv", "mcp"])
def test_prompts_whose_environments_hang_or_die_cost_the_others_no_attempt(
    start_run: Callable[..., FaultRun], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(build_row, range(NUM_ROWS))))
    with openenv_server() as address:
        run = start_run(
            run={"num_steps": 4},
            data={"source": f"jsonl:{tmp_path / 'rows.jsonl'}", "shuffle": False},
            engine={
                "name": f"{tmp_path / 'engine.py'}:Caller",
                "max_context_tokens": 2048,
                "sampling": {"max_new_tokens": 1024},
            },
            trainer={"max_start_mismatch": 100.0},
            environment={"timeout_seconds": 10.0, "episode_seconds": 10.0}
            | environment_of(kind, tmp_path, address),
        )
        process = run.start()
        run.wait_until_steps(2)
        run.wait_until(
            lambda: count_spent_attempts(run) == len(list_spent_attempts(run)),
            "each attempt that was used is logged with its sample",
        )
        assert run.wait_until_ended(process) == 0
    assert_ledger_balances(run)
    faults = list_faults(run)
    endings: dict[str, set[FinishReason]] = {}
    for sample in run.samples():
        endings.setdefault(faults[sample.prompt_group_id], set()).add(sample.finish_reason)
    assert endings == {"hang": {FinishReason.LATE}, "": {FinishReason.STOP}}
    assert {faults[group_id] for group_id in run.failures} == {"hang", "kill"}
    spent = {faults[sample_id.partition("/")[0]] for sample_id in list_spent_attempts(run)}
    assert spent == (set() if kind == "function" else {"kill"})  # a function has no attempts


def build_row(number: int) -> bytes:
    """Return a prompt whose environment does what is named, in the columns of every kind."""
    fault = {"how": FAULTS_OF_ROWS.get(number, "")}
    prompt = f"do {fault['how']} {number}"
    row = {"prompt": prompt, "answer": "", "options": fault, "reset": fault} | fault
    return orjson.dumps(row)


def list_faults(run: FaultRun) -> dict[str, str]:
    """Return what the environments of each prompt group do."""
    records = run.records("prompt.groups", num_partitions=run.plan.queue_partitions)
    events = [run.decode(record) for record in records]
    return {
        event.prompt_group_id: FAULTS_OF_ROWS.get(event.row % NUM_ROWS, "")
        for event in events
        if isinstance(event, PromptGroupIssued)
    }


def count_spent_attempts(run: FaultRun) -> float:
    """Return how many attempts of all samples were used, by the metric."""
    values = run.metrics("rollout-0")
    name = 'relax_episode_attempts_total{{outcome="{}",role="rollout"}}'
    return sum(values[name.format(outcome)] for outcome in ("begun_again", "failed"))


def list_spent_attempts(run: FaultRun) -> list[str]:
    """Return the samples of the attempts that were used, one for each."""
    return [
        line["sample_id"]
        for line in run.logged("rollout-0", "episode.failed")
        if re.search(r"attempt \d", line["error"])
    ]


@pytest.mark.parametrize("on_timeout", [0.0, "none"])
def test_policy_unlearns_what_makes_its_program_hang_unless_that_has_no_reward(
    start_run: Callable[..., FaultRun], tmp_path: Path, on_timeout: float | str
) -> None:
    """The second run is the control: in it late samples have no reward, and all others have one."""
    reward, prompts = tmp_path / "reward.py", tmp_path / "prompts.jsonl"
    reward.write_text("def give_one(completion):\n    return 1.0\n")
    prompts.write_text('{"prompt": "go", "answer": ""}\n')
    num_steps = 20
    run = start_run(
        run={
            "mode": "sync",
            "max_staleness": 0,
            "num_steps": num_steps,
            "prompts_per_step": 4,
            "samples_per_prompt": 8,
        },
        algorithm={"kl_coefficient": 0.0, "old_logprobs": "rollout", "min_samples_per_group": 2},
        data={"source": f"jsonl:{prompts}"},
        trainer={"learning_rate": 1e-2},
        reward={"function": f"{reward}:give_one", "on_timeout": on_timeout},
        environment={"command": write_program(tmp_path, AGENT), "episode_seconds": 1.0},
    )
    assert run.wait_until_ended(run.start(), timeout_seconds=420) == 0
    assert_ledger_balances(run)
    samples = run.samples()
    hanging = [one for one in samples if NO_CHARACTER in one.completion]
    assert {one.finish_reason for one in hanging} == {FinishReason.LATE}
    all_by_version, hanging_by_version = (
        Counter(one.policy_version for one in some) for some in (samples, hanging)
    )
    shares = [hanging_by_version[one] / all_by_version[one] for one in range(num_steps)]
    before, after = sum(shares[:3]), sum(shares[-3:])
    assert before > 3 / 4, shares
    assert (after < before / 2) == (on_timeout == 0.0), shares
