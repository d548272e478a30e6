"""The section `environment`: who answers the policy."""

from __future__ import annotations

from pydantic import Field

from relax_events.config.base import Positive, Seconds, Section
from relax_events.config.external_values import Code, Options


class EnvironmentConfig(Section):
    """A multi-turn environment: a function called after each turn of the policy (ADR 17). Without
    one a sample is a single turn.
    """

    function: Code = ""
    """A name in the entry point group `relax_events.environments`, such as `zoom`, or
    `path/to/file.py:function`; empty for none."""
    options: Options = Field(default_factory=dict)
    """Settings of the function, passed as keyword arguments."""
    max_turns: Positive = 4
    """Maximum assistant turns of a sample; the environment is not called after the last.
    `engine.sampling.max_new_tokens` bounds all of them together."""
    processes: Positive = 1
    """Child processes that run the function."""
    timeout_seconds: Seconds = 10.0
    """Deadline of a call; after it the process is killed and the sample fails."""
    memory_bytes: Positive = 4 * 1024**3
    """Address space limit of one child process."""
