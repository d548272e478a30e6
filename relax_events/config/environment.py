"""The section `environment`: who answers the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from relax_events.config.base import Positive, Seconds, Section
from relax_events.config.external_values import Code, Options, Program


class EnvironmentConfig(Section):
    """Who answers the policy: a function called after each turn (ADR 17), or a program that drives
    the policy through a model API. Without one a sample is a single turn.
    """

    function: Code = ""
    """A name in the entry point group `relax_events.environments`, such as `zoom`, or
    `path/to/file.py:function`; empty for none."""
    command: Program = ()
    """A program and its arguments, such as `["python", "agents/mine.py"]`; each sample is one run
    of it. It finds the model at `OPENAI_BASE_URL` with the key `OPENAI_API_KEY`, and its task in
    the file `RELAX_TASK_FILE`. Paths must be absolute or of programs on `PATH`, or of files that
    exist where `relax` is called. Empty for none."""
    options: Options = Field(default_factory=dict)
    """Settings of the function, passed as keyword arguments."""
    max_turns: Positive = 4
    """Maximum assistant turns of a sample; the environment is not called after the last.
    `engine.sampling.max_new_tokens` bounds all of them together. A program that asks for more turns
    or tokens is refused."""
    processes: Positive = 1
    """Child processes that run the function."""
    timeout_seconds: Seconds = 10.0
    """Deadline of a call; after it the process is killed and the sample fails."""
    memory_bytes: Positive = 4 * 1024**3
    """Address space limit of one child process."""
    concurrency: Positive = 64
    """Programs that one rollout worker runs at the same time (`command`)."""
    start_seconds: Seconds = 60.0
    """Deadline of a program for its first call of the model (`command`)."""
    episode_seconds: Seconds = 900.0
    """Deadline of a program after that (`command`)."""
    attempts: Positive = 3
    """How often an episode is begun in all if its program fails, is late or calls no model
    (`command`). After the last attempt the prompt becomes a dead letter, and its prompt group fails
    without a score."""
    max_media_files: Positive = 64
    """Maximum media files that one program may show the policy, those of its row included
    (`command`). `model.media` bounds the size of each."""
    tool_call_format: Literal[
        "auto", "hermes", "qwen3_coder", "glm", "llama3", "mistral", "deepseek"
    ] = "auto"
    """How the policy writes tool calls, which programs receive as such (`command`); `auto` chooses
    by the chat template, and `hermes`, which Qwen3 has, where that shows none."""
    trained_paths: Literal["all", "last"] = "all"
    """Which paths of an episode are trained whose program edited its history, shortened it or asked
    twice (`command`): all, each sampled token once, or that of the last turn."""

    @model_validator(mode="after")
    def _one_answers(self) -> EnvironmentConfig:
        if self.function and self.command:
            raise ValueError(
                "function and command are two ways to answer the policy; leave one of them out"
            )
        return self
