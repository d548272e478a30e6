"""The section `reward`: how a sample is scored."""

from __future__ import annotations

from relax_events.config.base import Positive, Seconds, Section


class RewardConfig(Section):
    """How a sample is scored."""

    function: str = "exact_match"
    """A name of the reward hub, or `path/to/file.py:function`."""
    timeout_seconds: Seconds = 10.0
    """A call that takes longer is killed and counted as failed."""
    processes: Positive = 1
    """Child processes that run the function."""
    memory_bytes: Positive = 4 * 1024**3
    """Address space that one child process may take."""
