"""Prepare the tiny model that a run file describes, from the run's own data."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

import orjson
import torch
from transformers.utils import logging

from relax_events.api.engines import RunConfig
from relax_events.api.errors import ConfigError, EnvironmentProblem
from relax_events.config import DataConfig, SftWarmupConfig
from relax_events.config.engine import TinyModelConfig
from relax_events.data.sources import open_stream
from relax_events.models.families import read_family
from relax_events.packages.examples.sft_warmup import count_correct, sft_warmup
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.packages.examples.tiny_tokenizer import constant_phrases
from relax_events.packages.examples.warmup_conversations import (
    WarmupConversations,
    read_assistant_turns,
)
from relax_events.planning.inventory import num_threads

RECIPE_FILE = "relax_events.json"
NUM_CHECKED_PROMPTS = 256
REPORT_EVERY_STEPS = 10
Report = Callable[[str], None]


def prepare_model(config: RunConfig, *, report: Report = print) -> Path:
    """Create the model of `model.path` if the folder has none: a tiny model as `model.tiny`
    describes it, then the SFT warm-up.

    An existing model is not changed; if it was made from other settings, the report says so. The
    folder is written atomically.

    Args:
        config: The run file.
        report: Called with a line for each stage.
    Returns:
        The folder.
    Raises:
        ConfigError: The folder is missing and the run file has no `model.tiny`, or the data are
            invalid.
    """
    path = config.model.path
    if (path / "config.json").is_file():
        recipe = path / RECIPE_FILE
        changed = recipe.is_file() and recipe.read_bytes() != _recipe(config)
        report(
            f"model {path} exists"
            + (", made from other settings; remove it to make it again" if changed else "")
        )
        return path
    return warm_up_model(config, report=report)


def warm_up_model(config: RunConfig, *, output: Path | None = None, report: Report = print) -> Path:
    """Run the SFT warm-up of a model and write the result to `output`, or over the old model.

    Args:
        config: The run file; if its `model.path` does not exist, the tiny model is made first.
        output: The folder to write; `model.path` when None.
        report: Called with a line for each stage.
    Returns:
        The folder written.
    Raises:
        ConfigError: The folder is missing and the run file has no `model.tiny`, or the data are
            invalid.
        EnvironmentProblem: The folder can't be written.
    """
    logging.disable_progress_bar()
    target = output or config.model.path
    draft = target.with_name(target.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    _check_writable(draft)
    try:
        _copy_or_make(config, draft, report)
        if config.sft_warmup.steps:
            _train(config, draft, report)
        (draft / RECIPE_FILE).write_bytes(_recipe(config))
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    report(f"wrote model {target}")
    return target


def _check_writable(folder: Path) -> None:
    """Check that the folder can be written before the work starts."""
    try:
        folder.mkdir(parents=True)
        folder.rmdir()
    except OSError as error:
        raise EnvironmentProblem(
            f"model folder {folder.parent} can't be written: {error.strerror}; set "
            "model.path to a path in a writable folder"
        ) from None


def make_tiny_for(
    data: DataConfig, path: Path, *, tiny: TinyModelConfig, seed: int, assistant_turns_key: str = ""
) -> Path:
    """Write a tiny model whose tokenizer is trained on the prompts and answers of a run's data,
    including the assistant turns under `assistant_turns_key`.

    The constant text around the problems of each dataset becomes one token: see `constant_phrases`.
    """
    stream = open_stream(data, seed=seed, shuffle=True)
    rows = [stream[number] for number in range(tiny.corpus_rows)]
    prompts = [row.messages[-1].text for row in rows]
    by_dataset = defaultdict(list)
    for number, prompt in enumerate(prompts):
        by_dataset[stream.order.dataset_row(number).dataset].append(prompt)
    return make_tiny(
        path,
        corpus=[
            *prompts,
            *(
                answer
                for row in rows
                for answer in read_assistant_turns(row, key=assistant_turns_key)
            ),
            *(
                message.text
                for row in rows
                for completion in row.completions
                for message in completion
            ),
        ],
        family=tiny.family,
        hidden_size=tiny.hidden_size,
        num_layers=tiny.num_layers,
        vocab_size=tiny.vocab_size,
        phrases=[
            *chain.from_iterable(map(constant_phrases, by_dataset.values())),
            *dict.fromkeys(part.system_prompt for part in data.parts if part.system_prompt),
        ],
        seed=seed,
    )


def _copy_or_make(config: RunConfig, draft: Path, report: Report) -> None:
    if (config.model.path / "config.json").is_file():
        shutil.copytree(config.model.path, draft)
    elif config.model.tiny is None:
        raise ConfigError(
            f"model folder {config.model.path} does not exist; set model.path, or describe a "
            "small model in [model.tiny]"
        )
    else:
        make_tiny_for(
            config.data,
            draft,
            tiny=config.model.tiny,
            seed=config.run.seed,
            assistant_turns_key=config.sft_warmup.assistant_turns_key,
        )
        report(f"made a random {config.model.tiny.family} of width {config.model.tiny.hidden_size}")


def _train(config: RunConfig, path: Path, report: Report) -> None:
    # A different order from the run's, so that the run does not start with the prompts of the
    # warm-up.
    stream = open_stream(
        config.data, seed=config.run.seed, order_seed=config.run.seed + 1, shuffle=True
    )
    family = read_family(path, config.model.media)
    model = family.loader.from_pretrained(
        path,
        local_files_only=True,
        dtype=torch.float32,
        trust_remote_code=False,
        use_safetensors=True,
    )
    size = config.sft_warmup.batch_size
    with (
        _threads_of_the_trainer(config),
        closing(WarmupConversations(config, model_path=path)) as conversations,
    ):
        sft_warmup(
            model,
            batch=lambda step: [
                conversations.build_example(stream[step * size + offset]) for offset in range(size)
            ],
            config=config.sft_warmup,
            report=lambda step, loss: _report_step(step, loss, config.sft_warmup, report),
            family=family,
        )
        first_unseen = config.sft_warmup.steps * size
        unseen = [
            conversations.build_example(stream[first_unseen + offset])
            for offset in range(NUM_CHECKED_PROMPTS)
        ]
    accuracy = count_correct(model, unseen, family=family) / NUM_CHECKED_PROMPTS
    report(
        f"greedy accuracy after the SFT warm-up: {accuracy:.2f} on {NUM_CHECKED_PROMPTS} prompts"
    )
    model.save_pretrained(path)


@contextmanager
def _threads_of_the_trainer(config: RunConfig) -> Iterator[None]:
    """Compute with `trainer.threads` threads, if it is set: a tiny model's threads wait for each
    other longer than they compute, and their number changes the last bits of the weights.
    """
    before = torch.get_num_threads()
    if config.trainer.threads is not None:
        torch.set_num_threads(num_threads(config.trainer.threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report_step(step: int, loss: float, config: SftWarmupConfig, report: Report) -> None:
    if loss < config.target_loss:
        report(f"SFT warm-up: stopped at step {step}, loss {loss:.3f}")
    elif step % REPORT_EVERY_STEPS == 0 or step == config.steps:
        report(f"SFT warm-up: step {step} of {config.steps}, loss {loss:.3f}")


def _recipe(config: RunConfig) -> bytes:
    tiny = config.model.tiny
    recipe = {
        "data": config.data.model_dump(mode="json"),
        "media": config.model.media.model_dump(mode="json"),
        "tiny": None if tiny is None else tiny.model_dump(mode="json"),
        "environment": config.environment.model_dump(mode="json"),
        "sft_warmup": config.sft_warmup.model_dump(mode="json"),
        "seed": config.run.seed,
    }
    return orjson.dumps(recipe, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
