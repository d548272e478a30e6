"""Commits train steps and prompt group outcomes, in agreement with the other ranks."""

from __future__ import annotations

import structlog

from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.batch.assembly import BatchAssembler
from relax_events.training.publishing import StepPublisher
from relax_events.training.ranks import Ranks
from relax_events.training.step_record import PhaseTimer, RankStepResult

log = structlog.get_logger()


class StepCommits:
    """The commits of a trainer; rank 0 has the publisher and writes them, the others wait.

    `phases` times the current train step; `backend` trains it.
    """

    def __init__(
        self,
        worker: Worker,
        backend: TrainerBackend,
        ranks: Ranks,
        *,
        publisher: StepPublisher | None,
        assembler: BatchAssembler,
    ) -> None:
        self._worker, self.backend, self._ranks = worker, backend, ranks
        self._publisher, self._assembler = publisher, assembler
        self._has_uncommitted_step = False
        self.phases = PhaseTimer()

    def agree_to_drain(self) -> bool:
        """Return whether any rank was asked to end, and note whether the step before is still
        uncommitted; all ranks get the same answer.
        """
        self.commit_step(wait=False)
        has_uncommitted_step = self._publisher is not None and self._publisher.has_uncommitted_step
        flags = self._ranks.all_gather_bytes(
            bytes([self._worker.drain.requested, has_uncommitted_step])
        )
        self._has_uncommitted_step = any(flag[1] for flag in flags)
        return any(flag[0] for flag in flags)

    def commit_step(self, *, wait: bool = True) -> None:
        """Commit the step before, whose weights were written during this one, if it is not yet
        committed; with `wait` False only when its weights are written by now.
        """
        publisher = self._publisher
        if (
            publisher is None
            or not publisher.has_uncommitted_step
            or not (wait or publisher.weights_are_written)
        ):
            return
        with self.phases.measure("weights"), self._worker.lifecycle.transfer("write weights"):
            publisher.wait_until_written()
        with self.phases.measure("commit"), self._worker.lifecycle.piece("commit the step"):
            publisher.commit()

    def commit_outcomes(self) -> bool:
        """Commit prompt groups that ended untrained, at once, so that the prompter can fill their
        batch slots; but after the step before. Return whether there were any; all ranks get the
        same answer.
        """
        if self._has_uncommitted_step:
            return False
        share = RankStepResult(self._ranks.at.data, ended=self._assembler.pending_outcomes())
        ended = [end for other in self.gather(share) for end in other.ended]
        if not ended:
            return False
        with self.phases.measure("commit"):
            if self._publisher is not None:
                self._publisher.commit_outcomes(ended, train_step=self.backend.policy_version)
                failpoint("trainer.after_ends")
            self._ranks.all_gather_bytes(b"")  # all ranks wait for the commit
        self.mark_ended(share)
        return True

    def mark_ended(self, share: RankStepResult) -> None:
        """Note that the prompt groups of the share that ended untrained do so in a transaction that
        is committed, or in the step's.
        """
        ended = share.ended
        self._assembler.mark_done([end.prompt_group_id for end in ended])
        for end in ended:
            self._worker.records.traces.record_group_end(
                end.prompt_group_id, outcome=end.outcome.value, reason=end.reason
            )
        if ended:
            log.info(
                "prompt_groups.ended",
                num_prompt_groups=len(ended),
                outcome=ended[0].outcome,
                reason=ended[0].reason,
            )

    def gather(self, share: RankStepResult) -> list[RankStepResult]:
        """Return the results of all ranks. Collective."""
        if self._ranks.size == 1:
            return [share]
        return [
            RankStepResult.from_bytes(data)
            for data in self._ranks.all_gather_bytes(share.to_bytes())
        ]
