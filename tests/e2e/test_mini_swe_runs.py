"""A run whose episodes are those of mini-swe-agent, unchanged, with its bash actions in the sandbox.

The engine is scripted: a tiny model would not write an action. All else is real: the agent's own
command line and prompts, the gateway, the sandbox, the hidden tests, the trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import FinishedRun, call_relax, report_of, sample_events

from relax_events.config import load_run_config
from relax_events.events.types import SampleRolledOut, SampleScored
from relax_events.models.tokenizer_folder import FolderTokenizer
from relax_events.packages.examples.repair import BODIES

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
AGENTS = ROOT / "configs" / "agents"
NUM_STEPS, SAMPLES_PER_STEP = 2, 4
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make agents`"),
]
# Looks, edits, tries, submits. Even samples write the right body, odd ones a wrong one. Of a turn
# the first tokens are the script's; the log-probabilities are made up, and not used.
ENGINE = """
import dataclasses
import re

import numpy as np

from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.packages.examples.repair import BODIES
from relax_events.models.tokenizer_folder import FolderTokenizer


def act(command):
    return f"THOUGHT: next.\\n\\n```mswea_bash_command\\n{command}\\n```"


class Scripted(TransformersEngine):
    def __init__(self, model_path, **settings):
        super().__init__(model_path, **settings)
        self.tokenizer, self.asked = FolderTokenizer.open(model_path), {}

    def submit(self, request):
        text = self.tokenizer.decode(request.prompt_tokens.tolist(), skip_special_tokens=True)
        for sample in request.samples:
            self.asked[sample.sample_id] = text, request.stop_token_ids[0]
        one = request.sampling.model_copy(update={"max_new_tokens": 1})
        super().submit(dataclasses.replace(request, sampling=one))

    def poll(self, *, timeout_seconds):
        return [self.said(one) for one in super().poll(timeout_seconds=timeout_seconds)]

    def said(self, sample):
        text, stop = self.asked.pop(sample.sample_id)
        wanted = re.search(r"f must return (.*?):", text)[1]
        index = int(re.match(r".*?-.*?-.*?/(\\d+)", sample.sample_id)[1])
        body = BODIES[wanted] if index % 2 == 0 else "a + b + 1000"
        script = [
            "cat f.py; echo secret > /tmp/relax-mini-swe; id -u",
            f"sed -i 's/return .*/return {body}/' f.py",
            "python3 -c 'import f; print(f.f(2, 3))'",
            "SUBMIT",
        ]
        turn = act(script[text.count("<returncode>")])
        tokens = self.tokenizer.encode(turn, add_special_tokens=False) + [stop]
        return dataclasses.replace(
            sample,
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -1.0, np.float32),
            segments=(VersionSegment(sample.segments[0].policy_version, len(tokens)),),
            finish_reason=FinishReason.STOP,
        )
""".replace("SUBMIT", SUBMIT)


def run_file_text(folder: Path, run_id: str, bootstrap_servers: str) -> str:
    """Return a run of the repair task whose agent is mini-swe-agent."""
    return f"""
[run]
id = "{run_id}"
directory = "{folder / ".relax"}"
num_steps = {NUM_STEPS}
prompts_per_step = 2
samples_per_prompt = 2
mode = "sync"
max_staleness = 0

[model]
path = "{folder / "model"}"
tiny = {{ hidden_size = 32, num_layers = 1, corpus_rows = 64 }}

[data]
source = "synthetic_text:repair"
num_problems = 64

[environment]
command = ["{PYTHON}", "{AGENTS / "mini_swe.py"}", "{sys.executable}"]
max_turns = 6
concurrency = 2
start_seconds = 200.0

[engine]
name = "{folder / "engine.py"}:Scripted"
max_context_tokens = 16384
sampling = {{ max_new_tokens = 2048 }}

[reward]
function = "{AGENTS / "sandboxed_shell.py"}:hidden_tests"
timeout_seconds = 120

[algorithm]
kl_coefficient = 0.0
old_logprobs = "actor"

[trainer]
max_start_mismatch = 100.0  # the engine has no log-probabilities: it plays a script

[scaling]
api = "off"

[broker]
bootstrap_servers = "{bootstrap_servers}"
"""


def test_mini_swe_agent_is_trained_unchanged_with_its_actions_in_the_sandbox(
    tmp_path: Path, bootstrap_servers: str, run_id: str
) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    run_file = tmp_path / "run.toml"
    run_file.write_text(run_file_text(tmp_path, run_id, bootstrap_servers))
    ended = call_relax("run", run_file, cwd=tmp_path, timeout_seconds=800)
    assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    assert (report["samples_lost"], report["samples_trained_twice"], report["ledger_problems"]) == (
        0,
        0,
        [],
    )
    assert report["samples_trained"] == NUM_STEPS * SAMPLES_PER_STEP
    assert not Path("/tmp/relax-mini-swe").exists()
    run = FinishedRun(
        run_file, load_run_config(tmp_path / f".relax/runs/{run_id}/run.json", environment={})
    )
    samples = [
        one for one in sample_events(run, "rollout.samples") if isinstance(one, SampleRolledOut)
    ]
    assert len(samples) == NUM_STEPS * SAMPLES_PER_STEP
    tokenizer = FolderTokenizer.open(tmp_path / "model")
    for sample in samples:
        check_sample(sample, tokenizer)
    scores = {
        one.key.sample_index: one.reward
        for one in sample_events(run, "reward.scores")
        if isinstance(one, SampleScored)
    }
    assert scores == {0: 1.0, 1: 0.0}
    sampled = sum(int(np.sum(one.loss_mask)) for one in samples)
    assert sum(report["curves"]["num_loss_tokens"]) == sampled


def check_sample(sample: SampleRolledOut, tokenizer: FolderTokenizer | None) -> None:
    """Check that the trained tokens are those of the policy's four turns, each with its stop token,
    and that the sandbox answered the actions.
    """
    assert tokenizer is not None
    said = [turn.text for turn in sample.turns if turn.role == "assistant"]
    assert len(said) == 4
    assert SUBMIT in said[-1]
    mask = np.asarray(sample.loss_mask, bool)
    trained = np.asarray(sample.tokens)[mask].tolist()
    wanted = [tokenizer.encode(text, add_special_tokens=False) for text in said]
    stop = trained[len(wanted[0])]
    assert trained == [token for turn in wanted for token in (*turn, stop)]
    first, _, third = (turn.text for turn in sample.turns if turn.role == "user")
    assert "def f(a, b):" in first
    assert "/tmp/relax-mini-swe: " in first  # which it may not write
    assert "<returncode>0</returncode>" in third
    asked = sample.messages[-1].text.partition("f must return ")[2]
    body = BODIES[asked.partition(":")[0]]
    result = eval(body, {"a": 2, "b": 3, "max": max, "min": min})
    assert (f"<output>\n{result}\n" in third) == (sample.key.sample_index % 2 == 0)
