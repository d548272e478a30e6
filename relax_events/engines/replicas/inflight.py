"""The samples in a router: which replica has each, and its tokens so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from relax_events.engines.protocol import GeneratedSample, GenerationRequest, SampleRequest
from relax_events.engines.replicas.replica import Replica
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason


@dataclass(slots=True, eq=False)
class InflightSample:
    """One sample.

    Attributes:
        request: The request of its prompt group.
        sample: Its next request to an engine, with the tokens that earlier replicas generated.
        replica: The replica that generates it; None while it waits for one.
    """

    request: GenerationRequest
    sample: SampleRequest
    replica: Replica | None = None

    def add_partial(self, partial: GeneratedSample) -> None:
        """Keep the tokens that a replica generated before it was lost."""
        self.sample = replace(
            self.sample,
            tokens=partial.tokens,
            logprobs=partial.logprobs,
            segments=partial.segments,
            top_tokens=partial.top_tokens,
            routed_experts=partial.routed_experts,
        )

    def to_generated(self, reason: FinishReason, *, error: str = "") -> GeneratedSample:
        """Return the sample with its tokens so far as a result."""
        sample = self.sample
        return GeneratedSample(
            sample_id=sample.sample_id,
            prompt_group_id=self.request.prompt_group_id,
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            segments=sample.segments,
            finish_reason=reason,
            error=error,
            top_tokens=sample.top_tokens,
            routed_experts=sample.routed_experts,
        )


class InflightSamples:
    """All samples in a router. A result counts only if it comes from the replica that has the
    sample.
    """

    def __init__(self) -> None:
        self._all: dict[str, InflightSample] = {}
        self._waiting: dict[str, InflightSample] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_waiting(self) -> int:
        """Samples that no replica has."""
        return len(self._waiting)

    def add(self, entries: Iterable[InflightSample]) -> None:
        """Add samples that no replica has.

        Raises:
            PoisonSample: One has the id of another sample; none is added.
        """
        added: dict[str, InflightSample] = {}
        for entry in entries:
            if (sample_id := entry.sample.sample_id) in self._all or sample_id in added:
                raise PoisonSample(
                    f"prompt group {entry.request.prompt_group_id}: sample {sample_id} is already "
                    "running; give every sample its own id"
                )
            added[sample_id] = entry
        self._all |= added
        self._waiting |= added

    def assign(self, entries: Iterable[InflightSample], replica: Replica) -> None:
        """Record that a replica has samples now."""
        for entry in entries:
            del self._waiting[entry.sample.sample_id]
            entry.replica = replica
            replica.num_samples += 1

    def finish(
        self, samples: Iterable[GeneratedSample], replica: Replica
    ) -> Iterator[GeneratedSample]:
        """Remove the samples that a replica finished; yield the ones assigned to it."""
        for sample in samples:
            entry = self._all.get(sample.sample_id)
            if entry is not None and entry.replica is replica:
                del self._all[sample.sample_id]
                replica.num_samples -= 1
                yield sample

    def finish_waiting(
        self, entries: Iterable[InflightSample], reason: FinishReason, *, error: str = ""
    ) -> list[GeneratedSample]:
        """Remove samples that no replica has, and return them as results."""
        results = [entry.to_generated(reason, error=error) for entry in entries]
        for sample in results:
            del self._all[sample.sample_id], self._waiting[sample.sample_id]
        return results

    def unassign(self, replica: Replica, partial: Iterable[GeneratedSample]) -> int:
        """Let all samples of a lost replica wait, with the tokens that it returned; return their
        number.
        """
        returned = {sample.sample_id: sample for sample in partial}
        unassigned = {name: entry for name, entry in self._all.items() if entry.replica is replica}
        for name, entry in unassigned.items():
            entry.replica = None
            if (sample := returned.get(name)) is not None:
                entry.add_partial(sample)
        self._waiting |= unassigned
        replica.num_samples = 0
        return len(unassigned)

    def waiting(self) -> list[tuple[GenerationRequest, list[InflightSample]]]:
        """Return the samples that no replica has, grouped by request."""
        by_request: dict[int, list[InflightSample]] = {}
        for entry in self._waiting.values():
            by_request.setdefault(id(entry.request), []).append(entry)
        return [(entries[0].request, entries) for entries in by_request.values()]

    def by_replica(
        self, sample_ids: Collection[str] | None
    ) -> dict[Replica | None, list[InflightSample]]:
        """Return the named samples, or all of them without names, by the replica that has them."""
        entries: dict[Replica | None, list[InflightSample]] = {}
        for entry in self._all.values():
            if sample_ids is None or entry.sample.sample_id in sample_ids:
                entries.setdefault(entry.replica, []).append(entry)
        return entries
