"""What a rollout worker has at hand of a prompt group, from its lease to the last of its samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from relax_events.broker.leases import Lease
from relax_events.data.laying_out import LaidOutAnswer
from relax_events.engines.protocol import GeneratedSample
from relax_events.events.types import PromptGroupIssued


@dataclass(slots=True)
class GroupInWork:
    """A leased prompt group and what has been generated of it.

    It has several leases when its prompt was delivered again while it was at work: the broker was away and forgot who
    holds what, the lease lapsed, or a prompter that died in the middle had issued it twice.
    """

    leases: list[Lease]
    issued: PromptGroupIssued
    prompt_tokens: np.ndarray
    answers: tuple[LaidOutAnswer, ...] = ()
    """By sample index, where the data bring them and nothing is generated."""
    samples: list[GeneratedSample] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every sample has been generated."""
        return len(self.samples) == self.issued.samples_per_prompt

    def done(self) -> None:
        """Settle all leases: the work is finished and safe."""
        for lease in self.leases:
            lease.done()

    def release(self) -> None:
        """Settle all leases: the work was not finished."""
        for lease in self.leases:
            lease.release()
