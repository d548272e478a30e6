"""The section `evaluation`: held-out evaluation of policy versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from relax_events.config.base import Positive, Seconds, Section, get_tables
from relax_events.config.data import KEYS_TO_LEARN, RowsConfig
from relax_events.config.engine import SamplingConfig
from relax_events.config.external_values import Names
from relax_events.config.reward import RewardConfig

COLUMN_KEYS = (
    *("metadata_keys", "multimodal_keys", "media_root", "media_hosts"),
    *("answer_key", "tools_key", "system_prompt"),
)
PROMPT_KEYS = ("prompt_key", "prompt_template")
"""Each says what the prompt is, so both follow or none."""
FILES = ("jsonl:", "parquet:", "hf:")
"""Begin the sources whose columns the run file names."""


def with_columns_of_data(tree: Any) -> Any:
    """Let evaluation datasets in files take the keys of columns that they leave out from `[data]`,
    where the prompts have one source, a file too.

    Args:
        tree: The run file, not validated yet.
    """
    if not (tables := get_tables(tree, "data", "evaluation")):
        return tree
    data, evaluation = tables
    datasets = evaluation.get("datasets")
    if not _is_file(data) or not isinstance(datasets, list | tuple):
        return tree
    filled = [
        _take_columns(dataset, data) if _is_file(dataset) else dataset for dataset in datasets
    ]
    return {**tree, "evaluation": {**evaluation, "datasets": filled}}


def _is_file(rows: Any) -> bool:
    return isinstance(rows, Mapping) and str(rows.get("source", "")).startswith(FILES)


def _take_columns(dataset: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names_prompt = any(key in dataset for key in (*PROMPT_KEYS, *KEYS_TO_LEARN))
    keys = COLUMN_KEYS if names_prompt else (*COLUMN_KEYS, *PROMPT_KEYS)
    return {key: data[key] for key in keys if key in data} | dict(dataset)


class EvaluationDatasetConfig(RowsConfig):
    """A held-out dataset, evaluated whole and in order. Columns that it leaves out are those of
    `[data]`, where the prompts have one source and both are files.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,47}$"), Names.NOTHING]
    """Name of the dataset in metrics and reports."""
    samples_per_prompt: Positive = 1
    """Samples generated for each prompt."""
    pass_at: tuple[Positive, ...] = (1,)
    """The k of pass@k, each at most `samples_per_prompt`."""
    pass_reward: float = 1.0
    """Minimum reward of a sample that passes."""
    sampling: SamplingConfig | None = None
    """Sampling here; without it that of `engine.sampling`. `top_k = 1` is greedy."""
    reward: RewardConfig | None = None
    """The reward here; without it that of the section `reward`."""

    @model_validator(mode="after")
    def _has_enough_samples(self) -> EvaluationDatasetConfig:
        if (highest := max(self.pass_at, default=0)) > self.samples_per_prompt:
            raise ValueError(
                f"pass_at must hold numbers up to samples_per_prompt = {self.samples_per_prompt}, "
                f"got {highest}; set evaluation.datasets.samples_per_prompt"
            )
        return self


class EvaluationConfig(Section):
    """Held-out evaluation of policy versions; without datasets nothing is evaluated."""

    every: Positive = 10
    """Policy versions between evaluations; the first and the last version are always evaluated."""
    final_seconds: Seconds = 600.0
    """Time that the end of the run waits for the evaluation of its last version."""
    datasets: tuple[EvaluationDatasetConfig, ...] = ()
    """What is evaluated on."""

    @model_validator(mode="after")
    def _names_differ(self) -> EvaluationConfig:
        repeated = [
            name
            for name, count in Counter(dataset.name for dataset in self.datasets).items()
            if count > 1
        ]
        if repeated:
            raise ValueError(
                f"evaluation.datasets must have names of their own, got {repeated[0]!r} "
                "twice; set evaluation.datasets.name"
            )
        return self

    def is_due(self, policy_version: int, *, first: int, last: int) -> bool:
        """Return whether a version of a run is to be evaluated."""
        return bool(self.datasets) and (
            (policy_version - first) % self.every == 0 or policy_version == last
        )
