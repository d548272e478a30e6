"""One run of TRL's GRPOTrainer on the task of a run file, in TRL's own environment: `python -m
benchmarks.trl_run RUN_FILE RESULT`.

The prompts are the ones of our prompter, step by step; the reward is the same function,
called in the trainer's process.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from relax_events.config import RunConfig, load_run_config
from relax_events.data.rendering import PromptRenderer
from relax_events.data.sources import open_stream
from relax_events.packages.verifiers.reasoning_gym import reasoning_gym
from relax_events.training.backend.learning_rate import compute_scheduled_learning_rate


class Recorder:
    """What the run measures of itself: seconds by part and by step, rewards and lengths by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.parts: list[dict[str, float]] = []
        self.step_seconds: list[float] = []
        self.rewards: list[float] = []
        self.completion_tokens: list[float] = []
        self._last = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block to a part of the step."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def begin(self) -> None:
        """Start the clock of the first step."""
        self._last = time.perf_counter()

    def end_step(self) -> None:
        """Close a step; what no part was charged for is training."""
        now = time.perf_counter()
        spent, self._last = now - self._last, now
        self.step_seconds.append(spent)
        self.parts.append({**self.seconds, "training": spent - sum(self.seconds.values())})
        self.seconds.clear()

    def score(
        self,
        completions: Sequence[str],
        metadata: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float]:
        """Score a step's completions by the task's own verifier; TRL calls this with all of them at
        once."""
        with self.part("rewards"):
            rewards = [
                reasoning_gym(text, answer="", metadata=orjson.loads(of), prompt="")
                for text, of in zip(completions, metadata, strict=True)
            ]
        self.rewards.append(sum(rewards) / len(rewards))
        self.completion_tokens.append(sum(map(len, completion_ids)) / len(completion_ids))
        return rewards


class StepClock(TrainerCallback):
    """Tells the recorder when training begins and when a step ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._recorder.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Take the time."""
        self._recorder.end_step()


class TimedTrainer(GRPOTrainer):
    """TRL's trainer as it is; how long it generates is taken down."""

    recorder: Recorder

    def _generate_single_turn(self, *positional: Any, **named: Any) -> Any:
        with self.recorder.part("generation"):
            return super()._generate_single_turn(*positional, **named)


def prompts(config: RunConfig) -> Dataset:
    """Lay out the prompts of all steps in the order of our prompter, as text.

    Raises:
        ValueError: TRL would train on other prompt tokens than we do.
    """
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    renderer = PromptRenderer.from_folder(config.model.path, config.data)
    stream = open_stream(config.data, seed=config.run.seed)
    rows = []
    for number in range(config.run.num_steps * config.run.prompts_per_step):
        row = stream[number]
        messages = [{"role": message.role, "content": message.text} for message in row.messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ours = renderer.prompt_tokens(row.messages).tolist()
        if (theirs := tokenizer(text)["input_ids"]) != ours:
            raise ValueError(
                f"prompt {number} has other tokens in TRL: {theirs}, ours are {ours}; the "
                "sides would not train on the same"
            )
        rows.append({"prompt": text, "metadata": row.metadata})
    return Dataset.from_list(rows)


def settings(config: RunConfig, folder: Path) -> GRPOConfig:
    """Say the run file in TRL's words, with what makes it fastest on a CPU."""
    run, algorithm, sampling = config.run, config.algorithm, config.engine.sampling
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=run.num_steps,
        per_device_train_batch_size=run.prompts_per_step
        * run.samples_per_prompt,  # a step is one forward and backward pass
        num_generations=run.samples_per_prompt,
        max_completion_length=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        beta=algorithm.kl_coefficient,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        loss_type="dapo",  # its name for the mean over the step's tokens
        scale_rewards="group",
        max_grad_norm=config.trainer.max_grad_norm,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        generation_kwargs={"use_cache": True},
        seed=run.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def build_trainer(config: RunConfig, recorder: Recorder, folder: Path) -> TimedTrainer:
    """Put together TRL's trainer with our model, optimizer settings and schedule."""
    section = config.trainer
    model = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, attn_implementation=config.model.attention
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1.0,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: compute_scheduled_learning_rate(
            section, step=step, num_steps=config.run.num_steps
        ),
    )
    trainer = TimedTrainer(
        model=model,
        reward_funcs=recorder.score,
        args=settings(config, folder),
        train_dataset=prompts(config),
        processing_class=AutoTokenizer.from_pretrained(config.model.path, padding_side="left"),
        callbacks=[StepClock(recorder)],
        optimizers=(optimizer, rate),
    )
    trainer.recorder = recorder
    return trainer


def main(run_file: Path, result: Path) -> None:
    """Train, and write what was measured."""
    config, recorder = load_run_config(run_file), Recorder()
    build_trainer(config, recorder, result.parent / "trl").train()
    measured = {
        "step_seconds": recorder.step_seconds,
        "parts": recorder.parts,
        "rewards": recorder.rewards,
        "completion_tokens": recorder.completion_tokens,
        "threads": torch.get_num_threads(),
    }
    result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
