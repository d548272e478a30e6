"""The section `environment`: who answers the policy."""

from __future__ import annotations

from pydantic import Field

from relax_events.config.base import Positive, Seconds, Section
from relax_events.config.external_values import Code, Options


class EnvironmentConfig(Section):
    """What the policy talks with: a function that is asked after each of its answers (ADR 17).
    Without one a sample is one answer.
    """

    function: Code = ""
    """A name in the entry point group `relax_events.environments`, such as `zoom`, or
    `path/to/file.py:function`; empty for none."""
    options: Options = Field(default_factory=dict)
    """Settings of the function: further keyword arguments that it takes."""
    max_turns: Positive = 4
    """Answers of the policy in one sample; after the last the environment is not asked.
    `engine.sampling.max_new_tokens` bounds all of them together."""
    processes: Positive = 1
    """Child processes that run the function."""
    timeout_seconds: Seconds = 10.0
    """A call that takes longer is killed, and its sample has failed."""
    memory_bytes: Positive = 4 * 1024**3
    """Address space that one child process may take."""
