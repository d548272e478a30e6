"""The flags that say which samples are meant; commands share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_events.control.samples.filter import SampleFilter


@dataclass(frozen=True)
class Which:
    """Which samples; all that is given must hold.

    Args:
        version: Policy version that generated them: 3, 3..7, 3.. or ..7.
        reward: Their reward: ..0.2 or 0.9.., both ends included.
        group: One prompt group, such as 000012-0003-0.
        sample: One sample, such as 000012-0003-0/5.
        step: The train step that trained them.
        worker: The rollout worker that generated them, such as rollout-1.
        contains: Text in the prompt or the completion.
    """

    version: str = ""
    reward: str = ""
    group: str = ""
    sample: str = ""
    step: int | None = None
    worker: str = ""
    contains: str = ""

    def as_filter(self) -> SampleFilter:
        """Check the flags.

        Raises:
            ConfigError: One of them is unfit; the text names it.
        """
        from relax_events.control.samples.filter import SampleFilter, parse_bounds

        return SampleFilter(
            versions=parse_bounds(self.version, flag="--version"),
            rewards=parse_bounds(self.reward, flag="--reward"),
            prompt_group_id=self.group,
            sample_id=self.sample,
            train_step=self.step,
            worker_id=self.worker,
            contains=self.contains,
        )

    @property
    def has_end(self) -> bool:
        """Whether what is asked for lies in the past, so that waiting for more makes no sense."""
        return bool(self.group or self.sample or self.step is not None or (self.version and not self.version.endswith("..")))
