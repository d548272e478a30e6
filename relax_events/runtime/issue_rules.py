"""Checks prompts and samples against the rules by which the run issues prompt groups, to detect
records that no worker of the run wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from relax_events.config import RunConfig
from relax_events.errors import CorruptRecord, ForeignRecord
from relax_events.events.types import PromptGroupIssued, SampleReady
from relax_events.kafka.records import Record
from relax_events.staleness import SLOTS_PER_PROMPT, BatchSlot, IssuedGroup, is_external
from relax_events.topics import TopicPlan, compute_shard


@dataclass(frozen=True, slots=True)
class IssueRules:
    """The rules by which prompt groups are issued; none of these keys may change during a run."""

    plan: TopicPlan
    prompts_per_step: int
    samples_per_prompt: int

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """Read the rules from a run's configuration."""
        return cls(
            TopicPlan.from_config(config),
            config.run.prompts_per_step,
            config.run.samples_per_prompt,
        )

    def check_prompt(self, issued: PromptGroupIssued) -> None:
        """Check that a prompt group is in a batch slot of the run, has its number of samples, and
        is not generated before its step is admitted; or that it is an external one. Its train step
        may be any: a worker may be behind the prompter.

        Raises:
            ForeignRecord: A rule is violated; the text names the field, the value and the rule.
        """
        for problem in self._prompt_problems(issued):
            raise ForeignRecord(
                f"prompt group {issued.prompt_group_id!r}: {problem}; no prompter of this run "
                "writes such a record"
            )

    def is_foreign(self, issued: PromptGroupIssued) -> bool:
        """Return whether `check_prompt` refuses a prompt group."""
        return any(self._prompt_problems(issued))

    def _prompt_problems(self, issued: PromptGroupIssued) -> Iterator[str]:
        if is_external(issued.prompt_group_id):
            return
        yield from self._index_problems(issued.group_index)
        yield from self._size_problems(issued.samples_per_prompt)
        first = max(issued.train_step - self.plan.max_staleness, 0)
        if issued.required_policy_version < first:
            yield (
                f"required_policy_version must be at least {first} for train step "
                f"{issued.train_step}, got {issued.required_policy_version}"
            )

    def check_sample(self, record: Record, sample: SampleReady, *, trainer_version: int) -> None:
        """Check that a sample can belong to an issued prompt group, and is on the partition to
        which the advantage role writes it.

        Raises:
            ForeignRecord: A rule is violated; the text names the field, the value and the rule.
        """
        for problem in self._problems(record, sample, trainer_version):
            raise ForeignRecord(
                f"sample {sample.sample_id[:80]!r}: {problem}; no worker of this run writes "
                "such a record"
            )

    def check_end(self, record: Record, prompt_group_id: str, *, trainer_version: int) -> None:
        """Check that an end request is for an external prompt group, or a batch slot that is issued
        by now; and that it is on a partition of its prompt group's shard, so that the rank that
        trains the prompt group reads it.

        Raises:
            CorruptRecord: The text is no id of a prompt group.
            ForeignRecord: A rule is violated; the text names the value and the rule.
        """
        slot = IssuedGroup.parse(prompt_group_id).slot
        for problem in self._unissued_problems(slot, trainer_version):
            if not is_external(prompt_group_id):
                raise ForeignRecord(f"end request of prompt group {prompt_group_id}: {problem}")
        expected, shard = (
            compute_shard(prompt_group_id, shards=self.plan.partitions_per_version),
            record.partition % self.plan.partitions_per_version,
        )
        if shard != expected:
            raise ForeignRecord(
                f"end requests of prompt group {prompt_group_id} belong on partitions of shard "
                f"{expected}, got {shard} ({record.location})"
            )

    def _problems(self, record: Record, sample: SampleReady, trainer_version: int) -> Iterator[str]:
        try:
            issued = IssuedGroup.parse(sample.prompt_group_id)
        except CorruptRecord as error:
            yield str(error)
            return
        slot = issued.slot
        if (named := (slot.train_step, slot.group_index, issued.attempt)) != (
            sample.key.train_step,
            sample.key.group_index,
            sample.key.attempt,
        ):
            yield (
                f"its id names {named} where train_step, group_index and attempt are "
                f"{(sample.key.train_step, sample.key.group_index, sample.key.attempt)}"
            )
        yield from self._unissued_problems(slot, trainer_version)
        yield from self._size_problems(sample.key.samples_per_prompt)
        if record.key != sample.prompt_group_id:
            yield f"its key must be its prompt group, got {record.key[:80]!r}"
        if record.partition != (
            expected := self.plan.partition(sample.prompt_group_id, sample.policy_version)
        ):
            yield (
                f"samples of version {sample.policy_version} of its prompt group belong on "
                f"partition {expected}, got {record.partition}"
            )

    def _unissued_problems(self, slot: BatchSlot, trainer_version: int) -> Iterator[str]:
        yield from self._index_problems(slot.group_index)
        newest = trainer_version + self.plan.max_staleness
        if slot.train_step > newest:
            yield (
                f"prompt groups are issued up to train step {newest} at version "
                f"{trainer_version}, got {slot.train_step}"
            )

    def _index_problems(self, group_index: int) -> Iterator[str]:
        if group_index >= SLOTS_PER_PROMPT * self.prompts_per_step:
            yield (
                f"group_index must be below {SLOTS_PER_PROMPT} x run.prompts_per_step = "
                f"{SLOTS_PER_PROMPT * self.prompts_per_step}, got {group_index}"
            )

    def _size_problems(self, samples_per_prompt: int) -> Iterator[str]:
        if samples_per_prompt != self.samples_per_prompt:
            yield (
                f"samples_per_prompt must be run.samples_per_prompt = {self.samples_per_prompt}, "
                f"got {samples_per_prompt}"
            )
