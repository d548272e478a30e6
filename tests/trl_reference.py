"""Computes the results of TRL's own trainers on small inputs: `python -m tests.trl_reference`
writes them to tests/data/trl.json, with TRL's release.

The gate compares our losses and advantages with that file. This program needs TRL's environment,
which the first call creates from `requirements/trl.txt`. TRL runs unchanged, from rollout to loss;
only the model is replaced: its forward passes return the log-probabilities of the inputs. All is in
float64.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "data" / "trl.json"
SAMPLES_PER_PROMPT = 4
MAX_NEW_TOKENS = 8
EOS, PAD = 1, 0
VOCABULARY = ["<pad>", "<eos>", "<unk>", *"abcdefghij"]
LOSS_KL = {"beta": 0.3, "use_bias_correction_kl": False}
CLIPS = {"epsilon": 0.2, "epsilon_high": 0.28}


def engine(mode: str, low: float | None, high: float) -> dict[str, Any]:
    """Return the settings that correct the difference of the engine's log-probabilities."""
    return {
        f"vllm_importance_sampling_{name}": value
        for name, value in (("mode", mode), ("clip_min", low), ("clip_max", high))
    }


LOSSES: dict[str, dict[str, Any]] = {
    "sample mean": {"loss_type": "grpo", **CLIPS},
    "token mean": {"loss_type": "dapo", **CLIPS},
    "token mean of the batch": {"loss_type": "bnpo", **CLIPS},
    "constant length": {"loss_type": "dr_grpo", **CLIPS},
    "two-sided clip": {"loss_type": "dapo", "delta": 1.5, **CLIPS},
    "clipped weight": {"loss_type": "cispo", "epsilon_high": 1.2},
    "soft gate": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "ratio of sequences": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.1,
        "epsilon_high": 0.15,
    },
    "ratio of sequences, two-sided clip": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "delta": 1.3,
        "epsilon": 0.1,
    },
    "geometric mean": {"epsilon": 0.2, "epsilon_high": 0.25},
    "KL": {"loss_type": "dapo", **LOSS_KL, **CLIPS},
    "KL by the sample": {"loss_type": "grpo", **LOSS_KL, **CLIPS},
    "unbiased KL": {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True, **CLIPS},
    "off-policy sequences": {"loss_type": "dapo", "off_policy_mask_threshold": 0.02, **CLIPS},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.2, **CLIPS},
    "engine corrected by the token, kept within": {
        "loss_type": "dapo",
        **engine("token_truncate", None, 1.1),
    },
    "engine corrected by the token, masked": {
        "loss_type": "dapo",
        **engine("token_mask", 0.8, 1.2),
    },
    "engine corrected by the sequence, kept within": {
        "loss_type": "grpo",
        **engine("sequence_truncate", None, 1.1),
    },
    "engine corrected by the sequence, masked": {
        "loss_type": "dapo",
        **engine("sequence_mask", 0.7, 1.3),
    },
    "truncated samples masked, sample mean": {
        "loss_type": "grpo",
        "mask_truncated_completions": True,
        **CLIPS,
    },
    "truncated samples masked, token mean": {
        "loss_type": "dapo",
        "mask_truncated_completions": True,
        **CLIPS,
    },
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "group": {"scale_rewards": "group"},
    "none": {"scale_rewards": "none"},
    "batch": {"scale_rewards": "batch"},
    "components apart": {
        "multi_objective_aggregation": "normalize_then_sum",
        "reward_weights": [1.0, 0.5],
    },
}
LEAVE_ONE_OUT: dict[str, dict[str, Any]] = {
    "plain": {},
    "KL in the reward": {"beta": 40.0},
    "normalised": {"normalize_advantages": True},
}
PREFERENCES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": ["sigmoid"]},
    "sigmoid of means": {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    "smoothed": {
        "loss_type": ["aot"],
        "label_smoothing": 0.1,
    },  # of one pair alone nothing is sorted
    "sigmoid and likelihood": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
    "ipo": {"loss_type": ["ipo"]},
}
MIXTURES = (0.0, 0.3, 1.0)
Values = list[list[float]]


def inputs() -> dict[str, Any]:
    """Draw what TRL and we are given: in each row the tokens of a sample, of which some are masked,
    and one sample is cut off."""
    rng = np.random.default_rng(11)
    lengths = [6, 3, 1, 5, 4, 7, 2, 8]

    def rows(of: Sequence[Sequence[float]], width: float) -> Values:
        return [[round(value + float(rng.normal(0, width)), 4) for value in row] for row in of]

    sampled = [
        [round(float(rng.uniform(-2.9, -0.7)), 4) for _ in range(length)] for length in lengths
    ]
    masks = [[1] * length for length in lengths]
    masks[0][2:4], masks[5][1:3] = [0, 0], [0, 0]
    return {
        "rollout": sampled,
        "old": rows(sampled, 0.2),
        "current": rows(sampled, 0.3),
        "ref": rows(sampled, 0.3),
        "entropies": [[round(float(rng.uniform(0.1, 2.0)), 4) for _ in row] for row in sampled],
        "masks": masks,
        "is_truncated": [False] * 7 + [True],
        "rewards": [
            [1000.0, 0.0],
            [0.0, 500.0],
            [250.0, 500.0],
            [1000.0, 0.0],
            [0.0, 0.0],
            [0.0, 500.0],
            [750.0, 500.0],
            [0.0, 500.0],
        ],
        "pairs_current": rows(sampled, 0.3),
        "pairs_ref": rows(sampled, 0.3),
        "student_logits": [[round(float(rng.normal()), 4) for _ in range(5)] for _ in range(4)],
        "teacher_logits": [[round(float(rng.normal()), 4) for _ in range(5)] for _ in range(4)],
    }


def completions(given: Mapping[str, Any]) -> list[list[int]]:
    """Return tokens for the samples, with an end token where a sample was not truncated."""
    return [
        [3 + at for at in range(len(row) - 1)] + [3 if cut else EOS]
        for row, cut in zip(given["rollout"], given["is_truncated"], strict=True)
    ]


def tables(given: Mapping[str, Any], name: str) -> Any:
    """Lay out the rows as a tensor, zeros behind the last token."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([torch.tensor(row) for row in given[name]], batch_first=True)


def save_model(folder: Path) -> None:
    """Write a model that is only there to be loaded, and its tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(VOCABULARY), eos_token_id=EOS, pad_token_id=PAD, **sizes)
    ).save_pretrained(folder)


def common(folder: Path) -> dict[str, Any]:
    """Return the settings of every trainer."""
    return {
        "output_dir": str(folder / "out"),
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "gradient_checkpointing": False,
    }


def reward_functions(given: Mapping[str, Any]) -> list[Any]:
    """Make reward functions that give the samples' components."""

    def first(completions: Sequence[Any], **_: Any) -> list[float]:
        return [row[0] for row in given["rewards"]]

    def second(completions: Sequence[Any], **_: Any) -> list[float]:
        return [row[1] for row in given["rewards"]]

    return [first, second]


def give_logprobs(trainer: Any, given: Mapping[str, Any]) -> Any:
    """Make the forward passes of a trainer return the inputs' log-probabilities, and return those
    that are trained."""
    import torch

    current = tables(given, "current").requires_grad_()
    old, ref, entropies = (tables(given, name) for name in ("old", "ref", "entropies"))

    def forward(model: Any, *_: Any, **__: Any) -> tuple[Any, Any, None]:
        if model is not None and model is getattr(trainer, "ref_model", None):
            return ref, None, None
        return (current if torch.is_grad_enabled() else old), entropies, None

    trainer._get_per_token_logps_and_entropies = forward
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return current


def rows_of(given: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row of the dataset for each sample."""
    return [{"prompt": "a"} for _ in given["rollout"]]


def group_trainer(
    folder: Path,
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    is_geometric: bool = False,
) -> Any:
    """Make a GRPOTrainer, which rolls out the inputs' samples; with settings for an engine it takes
    it that vLLM drew them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    def rollout(prompts: Sequence[Any], _: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [[3]] * len(prompts),
            "completion_ids": completions(given),
            "logprobs": given["rollout"],
            "env_mask": given["masks"],
        }

    sizes = {
        "num_generations": SAMPLES_PER_PROMPT,
        "per_device_train_batch_size": len(given["rollout"]),
        "max_completion_length": MAX_NEW_TOKENS,
    }
    trainer = (GMPOTrainer if is_geometric else GRPOTrainer)(
        model=str(folder),
        reward_funcs=reward_functions(given),
        args=(GMPOConfig if is_geometric else GRPOConfig)(
            **common(folder), **sizes, num_iterations=2, **settings
        ),
        train_dataset=Dataset.from_list(rows_of(given)),
        rollout_func=rollout,
    )
    trainer.use_vllm = "vllm_importance_sampling_mode" in settings
    trainer._last_loaded_step = 0  # there are no weights to take to an engine
    return trainer


def by_sample(given: Mapping[str, Any], table: Any) -> Values:
    """Take the rows out of a table, without what is behind their last token."""
    return [row[: len(own)].tolist() for row, own in zip(table, given["rollout"], strict=True)]


def group_losses(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Compute GRPOTrainer's losses and their gradients."""
    found = {}
    for name, settings in LOSSES.items():
        trainer = group_trainer(folder, given, settings, is_geometric=name == "geometric mean")
        current = give_logprobs(trainer, given)
        batch = trainer._generate_and_score_completions(rows_of(given))
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        found[name] = {
            "advantages": batch["advantages"].tolist(),
            "loss": loss.item(),
            "gradients": by_sample(given, current.grad),
        }
    return found


def group_advantages(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Compute GRPOTrainer's advantages."""
    found = {}
    for name, settings in ADVANTAGES.items():
        trainer = group_trainer(folder, given, settings)
        give_logprobs(trainer, given)
        found[name] = trainer._generate_and_score_completions(rows_of(given))["advantages"].tolist()
    return found


def async_advantages(given: Mapping[str, Any]) -> list[float]:
    """Compute what AsyncGRPOTrainer's rollout makes of the samples' rewards, all of one prompt."""
    from trl.experimental.async_grpo.async_rollout_worker import (
        RolloutGroup,
        TrainingSequence,
        _AsyncRolloutLoop,
    )

    num_samples = len(given["rollout"])
    rollout = SimpleNamespace(
        reward_funcs=reward_functions(given),
        reward_func_names=["first", "second"],
        _env_reward_types=[],
        _provides_rollout_reward=False,
    )
    sequence = TrainingSequence(*[[]] * len(fields(TrainingSequence)))
    group = RolloutGroup(**{field.name: [None] * num_samples for field in fields(RolloutGroup)})
    group.reward_kwargs, group.completions_sequences = {}, [[sequence]] * num_samples
    group.tool_call_counts = group.tool_failure_counts = [0] * num_samples
    return [
        sample.advantage for sample in asyncio.run(_AsyncRolloutLoop._score_group(rollout, group))
    ]


def leave_one_out(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Compute RLOOTrainer's advantages, and its gradients where the policy is the one that drew the
    samples."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    found = {}
    sizes = {
        "num_generations": SAMPLES_PER_PROMPT,
        "per_device_train_batch_size": len(given["rollout"]),
        "max_completion_length": MAX_NEW_TOKENS,
    }
    given = {**given, "old": given["current"]}
    for name, settings in LEAVE_ONE_OUT.items():
        arguments = RLOOConfig(**common(folder), **sizes, **{"beta": 0.0, **settings})
        trainer = RLOOTrainer(
            str(folder),
            reward_functions(given),
            args=arguments,
            train_dataset=Dataset.from_list(rows_of(given)),
        )
        trainer._generate_single_turn = lambda *_, **__: completions(given)
        current = give_logprobs(trainer, given)
        batch = trainer._generate_and_score_completions(rows_of(given))
        trainer._compute_loss(trainer.model, batch).backward()
        found[name] = {
            "advantages": batch["advantages"].tolist(),
            "gradients": by_sample(given, current.grad),
        }
    return found


def preferences(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Compute DPOTrainer's losses and their gradients, the mean over batches of one pair: the
    samples two by two, the chosen one first."""
    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    found = {}
    pair = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    for name, settings in PREFERENCES.items():
        arguments = DPOConfig(**common(folder), **settings)
        trainer = DPOTrainer(str(folder), args=arguments, train_dataset=pair)
        trainer.precompute_ref_logps = True
        trainer.model.train()
        current, ref, lengths = (
            tables(given, "pairs_current").requires_grad_(),
            tables(given, "pairs_ref"),
            [len(row) for row in given["rollout"]],
        )
        losses = []
        for at in range(0, len(lengths), 2):
            mask = torch.tensor(
                [
                    [0] + [1] * length + [0] * (current.shape[1] - length)
                    for length in lengths[at : at + 2]
                ]
            )
            logprobs = current[at : at + 2]
            outputs = SimpleNamespace(
                log_probs=logprobs,
                entropy=logprobs.detach(),
                mean_logits=logprobs.detach(),
                is_top1=mask[:, 1:].bool(),
            )
            batch = {
                "input_ids": mask * 3,
                "attention_mask": torch.ones_like(mask),
                "completion_mask": mask,
            }
            batch |= {
                "ref_chosen_logps": ref[at : at + 1].sum(1),
                "ref_rejected_logps": ref[at + 1 : at + 2].sum(1),
            }
            losses.append(trainer._compute_loss(lambda outputs=outputs, **_: outputs, batch, False))
        loss = torch.stack(losses).mean()
        loss.backward()
        found[name] = {"loss": loss.item(), "gradients": by_sample(given, current.grad)}
    return found


def distillation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Compute GKDTrainer's divergences, the mean over tokens, and their gradients by the student's
    logits."""
    import torch
    from trl.experimental.gkd import GKDTrainer

    found = {}
    for mixture in MIXTURES:
        student = torch.tensor(given["student_logits"]).requires_grad_()
        teacher = torch.tensor(given["teacher_logits"])
        loss = GKDTrainer.generalized_jsd_loss(
            student[None], teacher[None], beta=mixture, num_items_in_batch=len(student)
        )
        loss.backward()
        found[str(mixture)] = {"loss": loss.item(), "gradients": student.grad.tolist()}
    return found


@contextmanager
def model_folder() -> Iterator[Path]:
    """Yield a folder with the model."""
    with tempfile.TemporaryDirectory(prefix="relax-trl-") as name:
        save_model(Path(name))
        yield Path(name)


def measured() -> dict[str, Any]:
    """Run all of TRL's that we compare with."""
    import torch
    import trl

    torch.set_default_dtype(torch.float64)
    given = inputs()
    with model_folder() as folder:
        return {
            "trl": trl.__version__,
            "inputs": given,
            "losses": group_losses(folder, given),
            "advantages": group_advantages(folder, given),
            "advantages of the asynchronous trainer": async_advantages(given),
            "leave one out": leave_one_out(folder, given),
            "preferences": preferences(folder, given),
            "distillation": distillation(given),
        }


def in_environment(file: Path) -> None:
    """Run this program in TRL's environment."""
    from benchmarks import environment

    environment.run(
        "trl",
        "-m",
        "tests.trl_reference",
        str(file),
        settings={"TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"},
    )


def lines(tree: Mapping[str, Any]) -> str:
    """Write the numbers as JSON, what is of one case on one line."""
    parts = []
    for name, part in tree.items():
        own = (
            [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()]
            if isinstance(part, Mapping)
            else []
        )
        parts.append(
            f"  {json.dumps(name)}: "
            + ("{\n" + ",\n".join(own) + "\n  }" if own else json.dumps(part))
        )
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        in_environment(FILE)
    else:
        Path(sys.argv[1]).write_text(lines(measured()))
