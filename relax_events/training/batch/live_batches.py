"""Fills train batches from ready prompt groups, in agreement with the other ranks. Each rank trains
the prompt groups of its partitions, as they become ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson

from relax_events.config import RunConfig
from relax_events.errors import RelaxError
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.runtime.record_io import UNUSABLE
from relax_events.runtime.worker import Worker
from relax_events.staleness import ReadyGroup, ReadyGroups
from relax_events.telemetry.traces import TracedWork
from relax_events.topics.names import TRAINER_INPUTS, TRAINING_SAMPLES
from relax_events.training.batch.assembly import BatchAssembler
from relax_events.training.batch.batch_opener import BatchOpener
from relax_events.training.batch.sample_intake import SampleIntake
from relax_events.training.batch.step_batch import StepBatch, UntrainableGroup
from relax_events.training.device_turns import DeviceTurns
from relax_events.training.ranks import Ranks
from relax_events.training.step_commits import StepCommits
from relax_events.training.step_record import RankStepResult

IDLE_SECONDS = 0.5
MAX_PARTS = 8
"""Of a step: smaller ones are not trained early."""
ROUND_SECONDS = 0.1
"""Wait for records between two rounds of collectives, where there are several ranks."""


class LiveBatches:
    """Reads samples, and gives each train step its prompt groups."""

    def __init__(
        self,
        worker: Worker,
        reader: LogReader,
        opener: BatchOpener,
        *,
        assembler: BatchAssembler,
        intake: SampleIntake,
        commits: StepCommits,
        turns: DeviceTurns,
    ) -> None:
        self._turns = turns
        self._worker, self._reader, self._opener = worker, reader, opener
        self._ranks: Ranks = opener.ranks
        self._config: RunConfig = worker.config
        self._assembler, self._intake, self._commits = assembler, intake, commits
        self._ready = ReadyGroups(
            order=worker.config.run.sample_order,
            prompts_per_step=worker.config.run.prompts_per_step,
        )
        """Of all ranks, equal on all of them."""
        self._traced: list[TracedWork] = []

    def assign(self, positions: Mapping[tuple[str, int], int]) -> None:
        """Read this rank's partitions, from these positions (by entity and partition) on."""
        plan, at, num_ranks = self._worker.plan, self._ranks.at, self._ranks.topology.data
        self._reader.assign(
            {
                (plan.topic(entity), partition): positions.get((entity, partition), 0)
                for entity in TRAINER_INPUTS
                for partition in range(plan.num_sample_partitions)
                if at.is_data_leader
                and partition % plan.partitions_per_version % num_ranks == at.data
            }
        )

    def end_traces(self) -> None:
        """End the traces of the step's prompt groups: they are trained."""
        for work in self._traced:
            work.end()

    def fill(self, version: int) -> RankStepResult | None:
        """Train prompt groups as they become ready, until the ranks have trained a step's; return
        this rank's part, None when the drain came first.
        """
        share = self._share = self._begin(version)
        remaining, self._traced = self._config.run.prompts_per_step, []
        self._bounds = self._opener.smaller.bounds(version)
        self._assembler.advance(version)
        num_taken = remaining
        while remaining:
            if not num_taken:
                self._train_early(remaining)
                self._commits.commit_step()
                self._turns.end()
            self._read(version, wait=not num_taken)
            if self._commits.agree_to_drain():
                return None
            self._commits.commit_outcomes()
            num_taken, mine = self._choose(version, remaining)
            if num_taken and not self._turns.begin(self._commits.agree_to_drain):
                return None
            remaining -= num_taken
            for group in mine:
                self._begin_trace(group, share, version)
                self._feed(group)
            if not remaining:
                remaining = self._finish_batch(version)
            self._worker.lifecycle.tick(working=num_taken > 0)
        return share

    def end_left(self, version: int) -> None:
        """End the prompt groups that the run's last step left, as their records arrive, until the
        drain. Then rollout workers end theirs at the same time, so the drain waits until no record
        comes for a moment, and takes all that the log has.

        Args:
            version: The run's last policy version.
        """
        self._assembler.advance(version)
        is_draining, has_ended = False, True
        while has_ended or not is_draining:
            is_draining = self._commits.agree_to_drain()
            self._read(version, wait=True)
            has_ended = self._commits.commit_outcomes()
            self._worker.lifecycle.tick(working=False)
        positions = dict(self._reader.positions)
        self._take(self._reader.read_to_end(positions, from_offsets=positions), version)
        self._commits.commit_outcomes()

    def _train_early(self, num_missing: int) -> None:
        """Train what would wait for the missing prompt groups, once it is as much as they are: the
        time would pass unused, and a step gets few more micro-batches.
        """
        run = self._config.run
        smallest = max(num_missing, run.prompts_per_step // MAX_PARTS)
        if (
            self._opener.trains_at_once
            and self._batch.num_pending >= smallest * run.samples_per_prompt
        ):
            self._batch.flush()

    def _begin(self, version: int) -> RankStepResult:
        """Begin a step; return what records this rank's part of it."""
        self._batch: StepBatch = self._opener.streamed(version)
        return self._batch.share

    def _finish_batch(self, version: int) -> int:
        """Train what is pending, end what could not be trained as failed, and return how many
        prompt groups the ranks still miss for it.
        """
        self._batch.flush()
        refused = self._batch.pop_untrainable()
        for group in refused:
            self._fail(group, version)
        return sum(
            int.from_bytes(count, "big")
            for count in self._ranks.all_gather_bytes(len(refused).to_bytes(4, "big"))
        )

    def _fail(self, group: UntrainableGroup, version: int) -> None:
        """End a prompt group of this rank's partitions as failed, and write its invalid records to
        the dead letters.
        """
        reason = str(group.error)
        if group.positions:
            self._intake.reject(group.positions, group.error)
            reason = f"poison: {group.error}"
        else:
            self._share.num_too_large += 1
        self._assembler.fail(
            group.prompt_group_id,
            reason,
            policy_version=group.policy_version,
            trainer_version=version,
        )

    def _read(self, version: int, *, wait: bool) -> None:
        """Hand new records to the assembler; wait for some only when there was nothing left to
        train.
        """
        seconds = IDLE_SECONDS if self._ranks.size == 1 else ROUND_SECONDS
        with self._commits.phases.measure("wait"):
            records = self._reader.fetch(1000, timeout_seconds=seconds if wait else 0.0)
        self._take(records, version)

    def _take(self, records: Iterable[Record], version: int) -> None:
        with self._commits.phases.measure("decode"):
            for _ in self._intake.add_all(records, version):
                self._worker.lifecycle.record_progress()

    def _choose(self, version: int, remaining: int) -> tuple[int, list[ReadyGroup]]:
        """Agree on the prompt groups of this round; return how many all ranks take, and those of
        this rank.
        """
        changes = (*self._assembler.pop_changes(), self._assembler.pop_ended_slots())
        for text in self._ranks.all_gather_bytes(orjson.dumps(changes)):
            ready, removed, ended = orjson.loads(text)
            self._ready.apply([ReadyGroup(**row) for row in ready], removed, ended)
        is_whole = self._config.run.mode == "sync" or self._turns.are_taken
        if is_whole and self._ready.count_eligible(version) < remaining:
            return 0, []  # one order for all runs, and the engines have the device until then
        chosen = self._ready.take(remaining, trainer_version=version)
        return len(chosen), [group for group in chosen if self._assembler.is_ready(group)]

    def _feed(self, group: ReadyGroup) -> None:
        """Train a prompt group of this rank, as far as it closes micro-batches."""
        longest = max(max(paths) for paths in self._assembler.lengths(group))
        held_samples = self._assembler.take(group)
        if problem := self._bounds.describe_too_long(longest):
            error = RelaxError(problem)
            self._batch.exclude(
                UntrainableGroup(group.prompt_group_id, group.policy_version, [], error)
            )
            return
        try:
            with (
                self._commits.phases.measure("decode"),
                self._worker.lifecycle.piece("read a prompt group"),
            ):
                samples = self._intake.restore(held_samples)
        except UNUSABLE as error:  # it could be had when its record came
            locations = [(held.partition, held.offset) for held in held_samples]
            self._batch.exclude(
                UntrainableGroup(group.prompt_group_id, group.policy_version, locations, error)
            )
        else:
            self._batch.feed(samples)

    def _begin_trace(self, group: ReadyGroup, share: RankStepResult, step: int) -> None:
        traces = self._worker.records.traces
        traces.record_wait(group.prompt_group_id, TRAINING_SAMPLES)
        staleness = step - group.policy_version
        self._traced.append(
            traces.begin(
                "train",
                group.prompt_group_id,
                topic=TRAINING_SAMPLES,
                train_step=step,
                staleness=staleness,
            )
        )
        share.trace_headers.append(dict(traces.get_headers(group.prompt_group_id)))
