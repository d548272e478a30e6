"""Writes the text of a proposed run file: every key with the reason for its value."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from relax_events.config import DataConfig
from relax_events.config.hub_names import PREFIX
from relax_events.data.parquet import parquet_files
from relax_events.data.rendering import PromptRenderer
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError, EnvironmentProblem, PoisonSample
from relax_events.launcher.hub_download import Report, fetch_dataset, fetch_model
from relax_events.launcher.run_file.columns import (
    ProposedReward,
    guess_columns,
    propose_reward,
)
from relax_events.launcher.run_file.python_arguments import name_source
from relax_events.models.checkpoint_facts import read_facts
from relax_events.planning.inventory import CheckpointFacts, format_bytes, get_value_bytes

SCHEMA_FILE = Path(__file__).parents[2] / "config" / "run-file.schema.json"
NUM_ROWS = 200
"""Rows whose columns and lengths are looked at."""
PADDING_TOKENS = 64
LONG_ANSWERS = {"math": 2048, "code": 2048, "gsm8k": 512, "ifeval": 1024, "multiple_choice": 1024}
SHORT_ANSWER = 256
LARGE_MODEL = 1e8
"""Parameters; smaller models are trained with a larger learning rate."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the person named; empty for what is to be looked up."""

    prompt: str = ""
    answer: str = ""
    reward: str = ""
    split: str = ""


def propose_run_file(run_id: str, model: Path, data: Path, wishes: Wishes) -> str:
    """Return the text of a run file for a model and a dataset.

    Args:
        run_id: Of the run.
        model: A folder in Hugging Face layout, or `hf:org/name`, which is fetched.
        data: A JSON-lines or Parquet file, a folder of Parquet files, or
            `hf:org/name:config:split`, which is fetched.
        wishes: What is not to be looked up.
    Raises:
        ConfigError: The model or the data can't be read, or a column or reward is not clear; the
            text says which flag names it.
    """
    model_name, report = "", partial(print, file=sys.stderr)
    if str(model).startswith(PREFIX):
        name = fetch_model(str(model), key="--model", report=report)
        model, model_name = name.folder, str(name)
    if not model.exists():
        raise ConfigError(
            f"model folder {model} does not exist; a model of the Hugging Face hub is named "
            "hf:org/name"
        )
    facts = read_facts(model, needs_weights=True)
    source, parts = _locate_data(data, wishes.split, report)
    rows = read_rows(parts)
    columns = guess_columns(rows, prompt=wishes.prompt, answer=wishes.answer)
    reward = (
        ProposedReward(wishes.reward, "as you named it")
        if wishes.reward
        else propose_reward(rows, columns)
    )
    has_template = _has_template(model)
    if columns.media and not has_template:
        raise ConfigError(
            f"model {model} has no chat template, which places the data's media in a prompt; take "
            "a model whose tokenizer brings one"
        )
    settings = DataConfig(
        source=source,
        split=wishes.split,
        prompt_key=columns.prompt,
        answer_key=columns.answer,
        multimodal_keys=columns.media,  # type: ignore[arg-type] # checked by pydantic
        system_prompt=reward.system_prompt,
        chat_template=has_template,
    )
    longest = 0 if settings.multimodal_keys else measure_prompts(model, settings)
    room = divide_context(facts, reward, longest)
    return _render(
        run_id=run_id,
        model=model_name or str(model.resolve()),
        facts=facts,
        data=settings,
        reward=reward,
        longest=longest,
        prompt_tokens=room[0],
        new_tokens=room[1],
    )


def _locate_data(data: Path, split: str, report: Report) -> tuple[str, list[Path]]:
    """Return the source as a run file names it, and its files."""
    if str(data).startswith(PREFIX):
        return fetch_dataset(str(data), split, key="--data", report=report)
    source = name_source(data)
    is_parquet = source.startswith("parquet:")
    return source, parquet_files(data, split, section="data") if is_parquet else [data]


def read_rows(parts: Sequence[Path]) -> list[Mapping[str, Any]]:
    """Return the columns of a dataset's first rows.

    Args:
        parts: Parquet files, or one file of JSON lines.
    Raises:
        ConfigError: There are none, or they are no objects.
    """
    data = parts[0]
    try:
        if data.suffix == ".parquet":
            rows = list(islice(_parquet_rows(parts), NUM_ROWS))
        else:
            opener: Callable[..., Any] = gzip.open if data.suffix == ".gz" else open
            with opener(data, "rt", encoding="utf-8") as lines:
                rows = [json.loads(line) for line in islice(lines, NUM_ROWS) if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"data {data} can't be read: {error}") from None
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"data {data} must hold rows, one JSON object each")
    return rows


def _parquet_rows(parts: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise EnvironmentProblem("Parquet needs pyarrow; install relax-events[parquet]") from None
    for file in parts:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=NUM_ROWS):
                yield from batch.to_pylist()


def _has_template(model: Path) -> bool:
    """Return whether the tokenizer brings a chat template."""
    if any((model / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = model / "tokenizer_config.json"
    return path.is_file() and "chat_template" in json.loads(path.read_text("utf-8"))


def measure_prompts(model: Path, settings: DataConfig) -> int:
    """Return the tokens of the longest of the first prompts, with the chat template."""
    renderer = PromptRenderer.from_folder(model, settings)
    source = open_source(settings, seed=0)
    longest = 0
    for index in range(min(source.num_rows, NUM_ROWS)):
        row = source.row(index)
        try:
            tokens = renderer.row_tokens(row.messages, tools=row.tools)
        except PoisonSample:
            continue  # the run passes over it, and counts it
        longest = max(longest, len(tokens))
    return longest


def divide_context(facts: CheckpointFacts, reward: ProposedReward, longest: int) -> tuple[int, int]:
    """Return the tokens for a prompt and for a completion.

    Args:
        facts: Of the model, which bounds their sum.
        reward: Says how long completions are.
        longest: Tokens of the longest known prompt; 0 where it is unknown.
    Raises:
        ConfigError: The longest prompt leaves no room.
    """
    prompt_tokens = -(-max(longest, 1) * 5 // 4 // PADDING_TOKENS) * PADDING_TOKENS
    new_tokens = LONG_ANSWERS.get(reward.function, SHORT_ANSWER)
    limit = facts.max_position_embeddings
    if limit <= longest:
        raise ConfigError(
            f"the model reads at most {limit} tokens, and a prompt has {longest}; take a model "
            "with a longer context, or shorter prompts"
        )
    prompt_tokens = min(prompt_tokens, max(longest, limit // 2))
    return prompt_tokens, min(new_tokens, limit - prompt_tokens)


def describe_memory(facts: CheckpointFacts) -> str:
    """Return what an engine and a trainer need, without activations and cache."""
    served = format_bytes(facts.num_parameters * get_value_bytes(facts.dtype))
    trained = format_bytes(facts.training_bytes(facts.dtype))
    return (
        f"{facts.num_parameters / 1e6:,.1f} million parameters: an engine holds {served} of "
        f"weights, a trainer {trained} of weights, gradients and AdamW's moments; cache and "
        "activations come on top"
    )


def _render(*, facts: CheckpointFacts, **values: Any) -> str:
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 the text is TOML
    )
    environment.filters["toml"] = partial(json.dumps, ensure_ascii=False)
    template = files(__package__).joinpath("run.toml.jinja").read_text("utf-8")
    return environment.from_string(template).render(
        facts=facts,
        memory=describe_memory(facts),
        num_rows=NUM_ROWS,
        schema=SCHEMA_FILE.as_uri(),
        is_large=facts.num_parameters >= LARGE_MODEL,
        **values,
    )
