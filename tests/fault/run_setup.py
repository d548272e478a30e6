"""The setup of every run under fault injection: a folder with prompts and reward functions, a small
random model, the usual run file.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import orjson
from harness import command, environment

PROMPTS = [
    f"spell {word} backwards"
    for word in ("tea", "milk", "juice", "water", "coffee", "lemon", "cocoa", "cider")
]
# `spread`: over many values, so that nearly every prompt group of a random model has something to
# learn from, and the same wherever it is computed. `slowly`: for tests that need time within a run
# on a machine of any speed. `badly`: what reward functions of users do now and then. `hang_once`:
# on the first sample of a run, in whose folder it is called. `hang_on_milk`: on all samples of one
# prompt. `as_commanded`: on all samples of the prompts that a file in the run's folder names, and
# `badly` otherwise.
REWARDS = """
import time
import zlib

def spread(completion, *, answer, metadata, prompt):
    return zlib.crc32(completion.encode()) % 1000 / 1000

def slowly(completion, *, answer, metadata, prompt):
    time.sleep(0.01)
    return spread(completion, answer=answer, metadata=metadata, prompt=prompt)

def badly(completion, *, answer, metadata, prompt):
    reward = slowly(completion, answer=answer, metadata=metadata, prompt=prompt)
    if zlib.crc32(completion.encode()) % 41 == 0:
        raise ValueError("no reward for this one")
    if zlib.crc32(completion.encode()) % 997 == 0:
        time.sleep(1000)
    return reward

def hang_once(completion, *, answer, metadata, prompt):
    try:
        open("hangs", "x").close()
    except FileExistsError:
        return slowly(completion, answer=answer, metadata=metadata, prompt=prompt)
    time.sleep(1000)

def hang_on_milk(completion, *, answer, metadata, prompt):
    if "milk" in prompt:
        time.sleep(1000)
    return spread(completion, answer=answer, metadata=metadata, prompt=prompt)

def as_commanded(completion, *, answer, metadata, prompt):
    try:
        hanging = open("hanging_prompts").read().splitlines()
    except FileNotFoundError:
        hanging = ()
    if any(one in prompt for one in hanging):
        time.sleep(1000)
    return badly(completion, answer=answer, metadata=metadata, prompt=prompt)
"""
SLOW_SECONDS = 24.0
# `Grader` is a judge's engine that always writes a score, where a random model would write noise.
# Stuck engines send heartbeats and sample nothing: `StuckOnce` the first time in a run, which a
# file in the run's folder marks; `Stuck` each time that it gets so far.
ENGINES = """
import dataclasses
import time
import zlib

import numpy as np

from relax_events.models.tokenizer_folder import FolderTokenizer
from relax_events.engines.transformers.engine import TransformersEngine

class Grader(TransformersEngine):
    def __init__(self, model_path, **settings):
        super().__init__(model_path, **settings)
        self.tokenizer = FolderTokenizer.open(model_path)

    def poll(self, *, timeout_seconds):
        return [self.graded(sample) for sample in super().poll(timeout_seconds=timeout_seconds)]

    def graded(self, sample):
        tokens = self.tokenizer.encode(f"Score: {zlib.crc32(sample.tokens.tobytes()) % 11}", add_special_tokens=False)
        return dataclasses.replace(sample, tokens=np.array(tokens, np.int32))

class Stuck(TransformersEngine):
    def poll(self, *, timeout_seconds):
        if self.num_tokens < 400 or not self.is_stuck():
            return super().poll(timeout_seconds=timeout_seconds)
        time.sleep(timeout_seconds)
        return []

    def is_stuck(self):
        return True

class StuckOnce(Stuck):
    marked = False

    def is_stuck(self):
        if not self.marked:
            try:
                open("stuck", "x").close()
            except FileExistsError:
                return False
            self.marked = True
        return True
"""
DEVICE_CELLS = 48
# A trainer whose gradients are infinite from step 3 on; one that takes long over a micro-batch, an
# optimizer step and a copy of the weights; one on a device with memory for passes of `DEVICE_CELLS`
# cells, and one whose critic is on such a device; one that never comes back from an optimizer step.
TRAINERS = """
import time

import torch

from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.torch_critic import TorchCritic

class NotFinite(TorchBackend):
    def accumulate(self, samples):
        super().accumulate(samples)
        if self.policy_version == 3 or self.policy_version >= 6:
            self._parameters.gradients += torch.inf

class Slow(TorchBackend):
    def accumulate(self, samples):
        if self.policy_version == 1:
            time.sleep(SLOW_SECONDS)
        super().accumulate(samples)

    def step(self):
        if self.policy_version == 1:
            time.sleep(SLOW_SECONDS)
        return super().step()

    def weight_buckets(self, *, max_bytes):
        if self.policy_version == 1:
            time.sleep(SLOW_SECONDS)
        yield from super().weight_buckets(max_bytes=max_bytes)

def on_small_device(run):
    def run_on_device(batch, **settings):
        if batch.input_ids.size > DEVICE_CELLS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(batch, **settings)

    return run_on_device

class Small(TorchBackend):
    def _open_model(self, dtype):
        super()._open_model(dtype)
        self._model.token_logprobs = on_small_device(self._model.token_logprobs)

class SmallCritic(TorchBackend):
    @staticmethod
    def open_critic(config, ranks):
        critic = TorchCritic(config, ranks=ranks)
        critic._model.token_values = on_small_device(critic._model.token_values)
        return critic

class Hung(TorchBackend):
    def step(self):
        time.sleep(1000)
""".replace("SLOW_SECONDS", f"{SLOW_SECONDS}").replace("DEVICE_CELLS", f"{DEVICE_CELLS}")


def lay_out(folder: Path) -> None:
    """Write the prompts, the reward file and the engines."""
    (folder / "engine.py").write_text(ENGINES)
    (folder / "trainer.py").write_text(TRAINERS)
    (folder / "prompts.jsonl").write_bytes(
        b"".join(orjson.dumps({"prompt": prompt, "answer": ""}) + b"\n" for prompt in PROMPTS)
    )
    (folder / "reward.py").write_text(REWARDS)


def make_model(folder: Path) -> Path:
    """Make a random model, as `relax models prepare` does, and return its path; the folder that it
    creates for a run's objects is removed."""
    tree = {
        "run": {"id": "prepare", "directory": str(folder)},
        "model": {
            "path": str(folder / "model"),
            "tiny": {"hidden_size": 32, "num_layers": 1, "corpus_rows": len(PROMPTS)},
        },
        "data": {"source": f"jsonl:{folder / 'prompts.jsonl'}"},
    }
    run_file = folder / "prepare.json"
    run_file.write_bytes(orjson.dumps(tree))
    subprocess.run(
        command("models", "prepare", run_file),
        cwd=folder,
        env=environment(),
        timeout=200,
        check=True,
        capture_output=True,
    )
    shutil.rmtree(folder / "runs" / "prepare")
    return folder / "model"


def default_config(folder: Path, run_id: str) -> dict[str, dict[str, Any]]:
    """Return a run file with every role in it, and steps of well under a second."""
    return {
        "run": {
            "id": run_id,
            "directory": str(folder),
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "max_staleness": 2,
        },
        "model": {"path": str(folder / "model")},
        "data": {"source": f"jsonl:{folder / 'prompts.jsonl'}"},
        "broker": {"session_timeout_seconds": 3.0, "request_timeout_seconds": 10.0},
        "engine": {
            "max_context_tokens": 96,
            "max_running_samples": 64,
            "max_prompt_groups": 16,
            "threads": 1,
            "sampling": {"max_new_tokens": 6},
        },
        "reward": {"function": f"{folder / 'reward.py'}:slowly"},
        "algorithm": {"kl_coefficient": 0.001, "old_logprobs": "actor"},
        "trainer": {"checkpoint_every": 5, "learning_rate": 1e-3, "threads": 1},
        "workers": {"heartbeat_seconds": 0.2, "drain_seconds": 20.0},
        "scaling": {"api": "off"},
    }


def judge_config(folder: Path, **judge: Any) -> dict[str, dict[str, Any]]:
    """Return the sections of a run whose rewards are a judge's, which writes for a while and has an
    opinion of everything."""
    engine = {
        "name": f"{folder / 'engine.py'}:Grader",
        "max_context_tokens": 1024,
        "max_running_samples": 16,
        "sampling": {"max_new_tokens": 8},
    }
    return {
        "judge": {"model_path": str(folder / "model"), "engine": engine, **judge},
        "reward": {"function": "genrm"},
    }


def merge_config(
    tree: dict[str, dict[str, Any]], sections: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the tree with its keys overridden by these sections."""
    return tree | {name: tree.get(name, {}) | keys for name, keys in sections.items()}
