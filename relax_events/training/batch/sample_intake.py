"""Prepares samples for the trainer: `SampleIntake` decodes and checks the records of its input, and
`SampleMedia` adds media to packed micro-batches.

A valid sample goes to the batch assembler; an unusable record becomes a dead letter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from weakref import finalize

import numpy as np

from relax_events.config import RunConfig
from relax_events.errors import CorruptRecord, ForeignRecord, PoisonSample, RelaxError
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import Event, PromptGroupEnded, SampleReady
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import MediaSequence
from relax_events.models.families import Family
from relax_events.objects.claim_check import count_array_bytes, list_arrays
from relax_events.objects.store import list_media
from relax_events.runtime.issue_rules import IssueRules
from relax_events.runtime.record_io import NUM_AHEAD, UNUSABLE, ArraysAhead
from relax_events.runtime.validation import (
    check_ended,
    check_ready,
    check_trainable,
    needed_fields,
    require_allowed_event,
)
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan
from relax_events.topics.plan import allowed_outcomes
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.batch.assembly import BatchAssembler, HeldSample, LocatedSample
from relax_events.training.batch.packing import PackedBatch
from relax_events.training.batch.paths import sampled_tokens, split_paths
from relax_events.training.batch.row_layout import TokenSequence, read_array

Position = tuple[int, int]
"""Partition and offset of a record."""
MAX_HELD_BYTES = 4 * 1024**3
"""Of fetched arrays that wait for their step. Above it a sample waits as its record, and its arrays
are fetched again."""


class HeldArrays:
    """Counts the bytes of arrays that were fetched and are still held, by whomever."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._room = max_bytes

    def hold(self, event: Event) -> bool:
        """Return whether there is room for the arrays of an event; they take it until they are
        freed.
        """
        arrays = list_arrays(event)
        if sum(array.nbytes for array in arrays) > self._room:
            return False
        for array in arrays:
            self._room -= array.nbytes
            finalize(array, self._free, array.nbytes).atexit = False
        return True

    def _free(self, num_bytes: int) -> None:
        self._room += num_bytes


class SampleIntake:
    """Decides what becomes of each record of the trainer's input."""

    def __init__(
        self,
        worker: Worker,
        backend: TrainerBackend,
        assembler: BatchAssembler,
        *,
        library: MediaLibrary,
        topic: str,
        keeps_decoded: bool,
    ) -> None:
        """Take what decides.

        Args:
            worker: Of the trainer.
            backend: Knows the vocabulary and the experts.
            assembler: Receives usable samples.
            library: Fetches media.
            topic: Of the samples.
            keeps_decoded: Whether the assembler may hold decoded samples; it holds records where
                other ranks may train them.
        """
        self._worker, self._backend, self._assembler = worker, backend, assembler
        self._config: RunConfig = worker.config
        self._terms = IssueRules.from_config(worker.config)
        self._needed = needed_fields(worker.config.algorithm)
        self._library, self._topic, self._keeps_decoded = library, topic, keeps_decoded
        self._fetched = HeldArrays()

    def add_all(self, records: Iterable[Record], version: int) -> Iterator[None]:
        """Hand the samples of records to the assembler of the step at `version`, and yield after
        each record; if a sample is unusable, its record becomes a dead letter, and its prompt group
        fails.
        """
        for record, events in self._worker.records.decode_all(records):
            self._add(record, events, version)
            yield

    def _add(self, record: Record, events: Sequence[Event], version: int) -> None:
        reason = "record could not be decoded"
        if events:
            try:
                for admitted in self._admitted(record, events, version):
                    keeps_decoded = self._keeps_decoded and (
                        count_array_bytes(admitted) <= len(record.value)
                        or self._fetched.hold(admitted)
                    )
                    self._assembler.add(
                        record
                        if keeps_decoded or len(events) == 1
                        else replace(record, value=self._worker.records.codec.encode(admitted)),
                        admitted,
                        trainer_version=version,
                        keep_decoded=keeps_decoded,
                    )
            # its producer is unknown: the prompt group that it names may have valid samples
            except ForeignRecord as error:
                self._worker.records.dead_letter(record, error)
                self._assembler.skip(record)
                return
            except PoisonSample as error:
                self._worker.records.dead_letter(record, error)
                reason = f"poison: {error}"
            else:
                return
        try:
            self._terms.check_end(record, record.key, trainer_version=version)
        except (CorruptRecord, ForeignRecord):
            self._assembler.skip(record)
        else:
            self._assembler.reject(record, reason, trainer_version=version)

    def _admitted(
        self, record: Record, events: Sequence[Event], version: int
    ) -> Sequence[SampleReady | PromptGroupEnded]:
        """Return the samples of a record if they can be trained, or the end that a role asks for if
        it may; raises ForeignRecord, and PoisonSample as `require_trainable`.
        """
        entity, first = TopicPlan.parse_entity(record.topic), events[0]
        for event in events:
            require_allowed_event(entity, event)
            if isinstance(event, SampleReady):
                self._terms.check_sample(record, event, trainer_version=version)
        if isinstance(first, PromptGroupEnded):
            ended = check_ended(first, allowed=allowed_outcomes(entity))
            self._terms.check_end(record, ended.prompt_group_id, trainer_version=version)
            return [ended]
        samples = check_ready(events)
        self.require_trainable(*samples)
        return samples

    def require_trainable(self, *samples: SampleReady) -> None:
        """Check that samples can be trained, and get their media; raises PoisonSample as
        `check_trainable`, or where the media can't be had.
        """
        for sample in samples:
            if media := list_media(sample):
                self._library.prefetch(media)
                self._require_fit(sample)
        backend = self._backend
        algorithm, bound = self._config.algorithm, self._config.trainer.max_abs_advantage
        check_trainable(
            *samples,
            algorithm=algorithm,
            needed=self._needed,
            max_abs_advantage=bound,
            vocab_size=backend.vocab_size,
            experts=backend.experts,
        )

    def _require_fit(self, sample: SampleReady) -> None:
        """Reject a sample with a path whose placeholders don't match its media."""
        try:
            for path in split_paths([sample]):
                self._library.require_fit(
                    read_array(path, "tokens"), ~sampled_tokens(path), list_media(path)
                )
        except PoisonSample as error:
            raise PoisonSample(f"sample {sample.sample_id}: {error}") from error

    def restore(self, held_samples: Sequence[HeldSample]) -> list[LocatedSample]:
        """Return samples that the assembler held. Of those that it held as records, which were
        found trainable on arrival, the records are decoded and their arrays fetched again.
        """
        records = self._worker.records
        encoded = [one for one in held_samples if isinstance(one, Record)]
        events = records.fetch_samples(*(records.decode_value(one.value) for one in encoded))
        decoded = {
            id(one): self._locate(event, (one.partition, one.offset))
            for one, event in zip(encoded, events, strict=True)
        }
        return [one if isinstance(one, LocatedSample) else decoded[id(one)] for one in held_samples]

    def plan_decoding(
        self, encoded: Sequence[tuple[bytes, Position]], ahead: ArraysAhead
    ) -> list[Callable[[], LocatedSample]]:
        """Return for each of some samples a function that decodes it; another rank may have found
        it trainable. The arrays of the next `NUM_AHEAD` samples are fetched meanwhile.

        Args:
            encoded: The values of their records, with partitions and offsets, in the order in which
                they will be decoded.
            ahead: What fetches the arrays.
        """
        records, upcoming = self._worker.records, deque(encoded)

        def decode(index: int) -> LocatedSample:
            while upcoming and len(encoded) - len(upcoming) <= index + NUM_AHEAD:
                with suppress(*UNUSABLE):  # raised again when it is this sample's turn
                    for sample in split_samples(records.decode_value(upcoming.popleft()[0])):
                        ahead.begin(sample)
            value, position = encoded[index]
            (event,) = records.fetch_samples(records.decode_value(value), ahead=ahead)
            return self._locate(event, position)

        return [partial(decode, index) for index in range(len(encoded))]

    @staticmethod
    def _locate(event: Event, position: Position) -> LocatedSample:
        (sample,) = check_ready([event])
        return LocatedSample(sample, *position)

    def reject(self, locations: list[tuple[int, int]], error: RelaxError) -> None:
        """Write records that were read before to the dead letters."""
        reader = LogReader(self._worker.connection)
        try:
            for record in reader.read_at(self._topic, set(locations)).values():
                self._worker.records.dead_letter(record, error)
        finally:
            reader.close()


class SampleMedia:
    """Adds the media inputs for placeholders and the matching rotary positions to packed samples;
    text samples do not change.
    """

    def __init__(self, family: Family, library: MediaLibrary) -> None:
        """Use a model family and a media library.

        Args:
            family: Of the model.
            library: Of the run.
        """
        self._family, self._library = family, library

    def add_to(self, batch: PackedBatch, samples: Sequence[TokenSequence]) -> PackedBatch:
        """Return a packed batch with the media of its samples.

        Args:
            batch: Packed from these samples.
            samples: In packed order.
        Raises:
            PoisonSample: A media item can't be read, or a sample's tokens and media don't match;
                the text names the sample.
        """
        if not any(list_media(sample) for sample in samples):
            return batch
        paths = split_paths(samples)
        if batch.parts:
            rest = iter(paths)
            return replace(
                batch,
                parts=tuple(
                    self.add_to(part, list(islice(rest, len(part.num_path_tokens))))
                    for part in batch.parts
                ),
            )
        lengths = [len(read_array(path, "tokens")) for path in paths]
        cells_by_path = np.split(batch.cells, np.cumsum(lengths)[:-1])
        sequences = [
            self._sequence(path, cells) for path, cells in zip(paths, cells_by_path, strict=True)
        ]
        return replace(
            batch, media=self._family.build_inputs(sequences, position_ids=batch.position_ids)
        )

    def _sequence(self, sample: TokenSequence, cells: np.ndarray) -> MediaSequence:
        name, is_input = f"sample {sample.sample_id}", ~sampled_tokens(sample)
        try:
            media = [self._library.load(reference) for reference in list_media(sample)]
        except PoisonSample as error:
            raise PoisonSample(f"{name}: {error}") from None
        return MediaSequence(name, read_array(sample, "tokens"), is_input, media, cells)
