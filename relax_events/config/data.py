"""The section `data`: the prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax_events.config.base import Positive, Section
from relax_events.config.external_values import (
    Addresses,
    Code,
    FilePath,
    Names,
    Quantities,
    Text,
    Texts,
)
from relax_events.config.resume_rules import PROMPTS, accepted, free

KEYS_TO_LEARN = ("completion_key", "conversation_key", "chosen_key", "rejected_key")
"""Keys of the columns that hold training targets."""


class RowsConfig(Section):
    """A source of rows, and the roles of its columns."""

    source: Annotated[str, Names.DATA]
    """`jsonl:<file>` (also .gz, .zst and .bz2), `parquet:<file or folder>`,
    `hf:<org/name>@<revision>:<config>:<split>` for a dataset of the Hugging Face hub, of which the
    run keeps the commit, `reasoning_gym:<task>` for generated problems with their own verifier, or
    synthetic media: `synthetic_images:<task>` (colour, count, where, and zoom for the environment
    of this name), `synthetic_videos:<task>` (direction, order) or `synthetic_audio:<task>` (pitch,
    order). A suffix `[100:200]` takes a slice of a file's rows, counted from 0, without the last
    one."""
    split: Text = ""
    """Split of a folder in Hugging Face layout, such as `train`; empty takes all files. Also that
    of a name on the hub which has none."""
    prompt_key: Text = "prompt"
    """Column of the prompt: a string, or a list of chat messages. Dots lead into objects, here and
    in the other keys."""
    prompt_template: Text = ""
    """Template of the prompt, in place of `prompt_key`: `{name}` is replaced by a column that holds
    a string, a number, or a list of strings, one a line. `"<image>{problem}"` puts an image before
    a question that does not say where it belongs."""
    completion_key: Text = ""
    """Column of the target completion: a string, or the messages that follow the prompt. Without it
    the reference answer is the target."""
    conversation_key: Text = ""
    """Column of a whole conversation to train on: a list of chat messages, in place of prompt and
    completion."""
    train_on: Literal["all", "last"] = "all"
    """Which assistant messages of a conversation are trained on."""
    chosen_key: Text = ""
    """Column of the chosen completion of a preference pair: a string, or messages, with or without
    those of the prompt before them."""
    rejected_key: Text = ""
    """Column of the rejected completion. With an empty `prompt_key` the prompt is the common prefix
    of both."""
    answer_key: Text = "answer"
    """Column of the reference answer for the reward, in which null is none; empty for none, as is
    usual where the row has target completions."""
    metadata_keys: Texts | None = None
    """Columns passed to the reward function as metadata; by default all except prompt, answer and
    tools."""
    multimodal_keys: Annotated[dict[Literal["image", "audio", "video"], str], Names.NOTHING] = (
        Field(default_factory=dict)
    )
    """Columns of media, by modality: `{ image = "images" }`. Each `<image>`, `<audio>` or `<video>`
    in the prompt is replaced by the next item of its column. A column holds one item or a list:
    paths, web addresses, bytes, data URIs, or objects with `bytes` or `path` as in Hugging Face
    datasets; with the path of a tar file, `member` names a file in it."""
    media_root: Annotated[FilePath | None, free("a folder that was moved is the same folder")] = (
        None
    )
    """Root folder of the paths in those columns and in parts of messages; nothing outside it is
    read. Without it a row can't name files."""
    media_hosts: Annotated[Addresses, free("from where media may come")] = ()
    """Hosts that the web addresses in those columns and in parts of messages may name; empty allows
    none. Their addresses must be public."""
    tools_key: Text = ""
    """Column of the tools that the chat template renders: a list of JSON schemas."""
    system_prompt: Annotated[Text, accepted(PROMPTS)] = ""
    """System message put before every prompt, when not empty."""
    max_invalid_rows: Annotated[int, Field(ge=0), free("when to refuse a file")] = 0
    """Invalid rows that are skipped, each with a log event; one more, and the run does not
    start."""
    num_problems: Positive = 1000
    """Number of generated problems (generated sources only)."""
    options: Quantities = Field(default_factory=dict)
    """Options of the problem generator (generated sources only)."""

    @model_validator(mode="before")
    @classmethod
    def _rows_to_learn_need_no_answer(cls, section: Any) -> Any:
        if (
            not isinstance(section, Mapping)
            or "answer_key" in section
            or not any(section.get(key) for key in KEYS_TO_LEARN)
        ):
            return section
        return {**section, "answer_key": ""}

    @model_validator(mode="after")
    def _keys_fit_together(self) -> RowsConfig:
        keys = [key for key in KEYS_TO_LEARN if getattr(self, key)]
        if keys not in (
            [],
            ["completion_key"],
            ["conversation_key"],
            ["chosen_key", "rejected_key"],
        ):
            raise ValueError(
                "completion_key, conversation_key, or chosen_key with rejected_key name what "
                "the policy "
                f"learns, got {' and '.join(keys)}"
            )
        if not self.prompt_key and not self.prompt_template and "chosen_key" not in keys:
            raise ValueError(
                "prompt_key must name a column, got ''; it may be empty where chosen_key and "
                "rejected_key bring the prompt"
            )
        if self.prompt_template and (
            self.prompt_key not in ("", "prompt") or self.conversation_key
        ):
            raise ValueError(
                "prompt_template replaces prompt_key and conversation_key; leave them out"
            )
        if self.train_on != "all" and not self.conversation_key:
            raise ValueError(
                f"train_on = {self.train_on!r} chooses among a conversation's messages; set "
                "conversation_key, or leave train_on out"
            )
        return self


class DatasetConfig(RowsConfig):
    """One of several datasets that are mixed."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Relative share of the prompts among the datasets; a small dataset with a large weight repeats
    more often."""


class DataConfig(RowsConfig):
    """The prompts: either one source, with the keys below, or several in `[[data.datasets]]`."""

    source: Annotated[str, Names.DATA] = ""
    """See `[[data.datasets]]`; its other keys are set here when the run has one source."""
    chat_template: Annotated[bool, accepted(PROMPTS)] = True
    """Render by the tokenizer's chat template, for which control tokens that a message spells are
    text; false uses the prompt unchanged, and control tokens that it spells are tokens."""
    chat_template_file: Annotated[FilePath | None, accepted(PROMPTS)] = None
    """A Jinja file to use instead of the tokenizer's own template."""
    chat_template_options: Annotated[dict[str, Any], Names.NOTHING, accepted(PROMPTS)] = Field(
        default_factory=dict
    )
    """Variables for the template, such as `enable_thinking = false`."""
    shuffle: bool = True
    """Shuffle again each epoch, by an order derived from the run's seed."""
    min_prompt_tokens: Annotated[int, Field(ge=0), accepted(PROMPTS)] = 0
    """Shorter prompts are skipped; 0 skips none."""
    max_prompt_tokens: Annotated[int, Field(ge=0), accepted(PROMPTS)] = 0
    """Longer prompts are skipped; 0 skips none."""
    max_sample_tokens: Annotated[int, Field(ge=0), accepted(PROMPTS)] = 0
    """Rows whose prompt and longest target completion exceed this are skipped; 0 skips none."""
    pass_rate_range: Annotated[tuple[float, float] | None, accepted(PROMPTS)] = None
    """Skip a prompt whose newest mean reward is outside [low, high]; prompts without a reward are
    used."""
    prompt_filter: Annotated[Code, accepted(PROMPTS)] = ""
    """`path/to/file.py:function` that gives each row a sort key, or drops it."""
    filter_window_rows: Annotated[Positive, accepted(PROMPTS)] = 256
    """Rows of the stream that the filter sorts at a time."""
    datasets: tuple[DatasetConfig, ...] = ()
    """Several sources, mixed by weight."""

    @model_validator(mode="after")
    def _has_a_source(self) -> DataConfig:
        if not self.source and not self.datasets:
            raise ValueError(
                "the prompts need a source; set data.source, or give [[data.datasets]] tables"
            )
        if self.source and self.datasets:
            raise ValueError(
                f"data.source = {self.source!r} and {len(self.datasets)} "
                "[[data.datasets]] are both set; give one or the other"
            )
        fields = RowsConfig.model_fields.items()
        changed_keys = [
            name
            for name, field in fields
            if name != "source"
            and getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        if self.datasets and changed_keys:
            raise ValueError(
                f"data.{changed_keys[0]} is a dataset's own where there are [[data.datasets]]; "
                "move it into their tables"
            )
        return self

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> DataConfig:
        if 0 < self.max_prompt_tokens < self.min_prompt_tokens:
            raise ValueError(
                "max_prompt_tokens must be 0 or at least min_prompt_tokens = "
                f"{self.min_prompt_tokens}, got {self.max_prompt_tokens}; set "
                "data.max_prompt_tokens"
            )
        if not self.chat_template and any(part.multimodal_keys for part in self.parts):
            raise ValueError(
                "multimodal_keys need a chat template, which places media in a "
                "prompt; leave data.chat_template out"
            )
        if (
            self.pass_rate_range is not None
            and not self.pass_rate_range[0] <= self.pass_rate_range[1]
        ):
            raise ValueError(
                "pass_rate_range must be [low, high] with low <= high, got "
                f"{list(self.pass_rate_range)}; set data.pass_rate_range"
            )
        return self

    @property
    def parts(self) -> Sequence[RowsConfig]:
        """The datasets, or the one source as the only one."""
        return self.datasets or (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each of `parts`."""
        return tuple(dataset.weight for dataset in self.datasets) or (1.0,)
