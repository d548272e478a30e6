"""Samples on their way through a router: which engine has them, and what of them is known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from relax_events.engines.protocol import GeneratedSample, GenerationRequest, SampleRequest
from relax_events.engines.replicas.replica import Member
from relax_events.errors import PoisonSample
from relax_events.events.parts import FinishReason


@dataclass(slots=True, eq=False)
class Journey:
    """One sample.

    Attributes:
        request: It came with this.
        sample: As an engine is asked for it: with what earlier ones have drawn.
        member: Has it; None while it waits for one.
    """

    request: GenerationRequest
    sample: SampleRequest
    member: Member | None = None

    def take(self, partial: GeneratedSample) -> None:
        """Take over what an engine drew before it was lost."""
        self.sample = replace(
            self.sample,
            tokens=partial.tokens,
            logprobs=partial.logprobs,
            segments=partial.segments,
            top_tokens=partial.top_tokens,
            routed_experts=partial.routed_experts,
        )

    def ended(self, reason: FinishReason, *, error: str = "") -> GeneratedSample:
        """Hand the sample out as it is."""
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


class Journeys:
    """All samples in a router. A sample that a member brings counts only while it is that
    member's.
    """

    def __init__(self) -> None:
        self._all: dict[str, Journey] = {}
        self._waiting: dict[str, Journey] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_waiting(self) -> int:
        """Samples that no member has."""
        return len(self._waiting)

    def add(self, journeys: Iterable[Journey]) -> None:
        """Begin, with samples that no member has.

        Raises:
            PoisonSample: One has the id of another; none is begun.
        """
        begun: dict[str, Journey] = {}
        for journey in journeys:
            if (sample_id := journey.sample.sample_id) in self._all or sample_id in begun:
                name = f"prompt group {journey.request.prompt_group_id}"
                raise PoisonSample(
                    f"{name}: sample {sample_id} is running already; give every sample an id "
                    "of its own"
                )
            begun[sample_id] = journey
        self._all |= begun
        self._waiting |= begun

    def give(self, journeys: Iterable[Journey], member: Member) -> None:
        """Note that a member has samples now."""
        for journey in journeys:
            del self._waiting[journey.sample.sample_id]
            journey.member = member
            member.num_samples += 1

    def end(self, samples: Iterable[GeneratedSample], member: Member) -> Iterator[GeneratedSample]:
        """Take samples out that a member brings; give those that it had."""
        for sample in samples:
            journey = self._all.get(sample.sample_id)
            if journey is not None and journey.member is member:
                del self._all[sample.sample_id]
                member.num_samples -= 1
                yield sample

    def end_waiting(
        self, journeys: Iterable[Journey], reason: FinishReason, *, error: str = ""
    ) -> list[GeneratedSample]:
        """Take samples out that no member has."""
        ended = [journey.ended(reason, error=error) for journey in journeys]
        for sample in ended:
            del self._all[sample.sample_id], self._waiting[sample.sample_id]
        return ended

    def take_from(self, member: Member, partial: Iterable[GeneratedSample]) -> int:
        """Let all samples of a member wait, with what it has brought of them; return how many."""
        brought = {sample.sample_id: sample for sample in partial}
        stranded = {
            name: journey for name, journey in self._all.items() if journey.member is member
        }
        for name, journey in stranded.items():
            journey.member = None
            if (sample := brought.get(name)) is not None:
                journey.take(sample)
        self._waiting |= stranded
        member.num_samples = 0
        return len(stranded)

    def waiting(self) -> list[tuple[GenerationRequest, list[Journey]]]:
        """Give the samples that no member has, with the request that each came with."""
        together: dict[int, list[Journey]] = {}
        for journey in self._waiting.values():
            together.setdefault(id(journey.request), []).append(journey)
        return [(journeys[0].request, journeys) for journeys in together.values()]

    def by_member(self, sample_ids: Collection[str] | None) -> dict[Member | None, list[Journey]]:
        """Give the named samples, all of them without names, by who has them."""
        found: dict[Member | None, list[Journey]] = {}
        for journey in self._all.values():
            if sample_ids is None or journey.sample.sample_id in sample_ids:
                found.setdefault(journey.member, []).append(journey)
        return found
