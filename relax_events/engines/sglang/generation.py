"""Carries samples through a server until each has ended, whatever happens to the requests that are
made for it.

A sample knows by itself when it is whole (`rows.Sample.finish_reason`). A request that ends before,
for whatever reason, brings what it has, and the sample is sent again with its tokens so far:

    add --> waits for the gate --> request --> tokens come --> whole: handed out
                  ^                                  |
                  +-- aborted, server gone, ended --+        (the gate is shut while the server is down, changes its weights or sleeps)
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import structlog

from relax_events.engines.protocol import EngineUsage, GeneratedSample
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.client import ServerGone, ServerRefused, SGLangClient
from relax_events.engines.sglang.inflight import Flight, UnknownVersion
from relax_events.engines.sglang.media_features import requested
from relax_events.engines.transformers.rows import Sample
from relax_events.events.parts import FinishReason

log = structlog.get_logger()
GROUND_SECONDS = 20.0
"""How long a server may take to end requests that were aborted."""
LOOK_SECONDS = 0.02
PAUSE_SECONDS = 0.5
"""Before a request is made again that brought nothing."""
MAX_BARREN = 8
"""Requests that may end without a token, one after the other, before their sample is given up."""


@dataclass(frozen=True, slots=True)
class Served:
    """A policy version in a server.

    Attributes:
        policy_version: Which.
        name: What the server calls it, another one at each load. It keeps prefix caches apart, too.
        folder: Where its weights lie.
    """

    policy_version: int
    name: str
    folder: Path

    @classmethod
    def of(cls, policy_version: int, folder: Path) -> Served:
        """Give a version a name that it has never had."""
        return cls(policy_version, f"{policy_version}-{secrets.token_hex(4)}", folder)


class Generation:
    """See the module's docstring. Used within one event loop."""

    def __init__(
        self,
        client: SGLangClient,
        *,
        served: Served,
        model: ModelFolder,
        hand_out: Callable[[GeneratedSample], None],
    ) -> None:
        self.gate = asyncio.Event()
        self.served = served
        self.last_progress = time.monotonic()
        self.num_handed_out = self.num_tokens = 0
        self._num_prefilled = self._num_reused = self._num_resumed = 0
        self.is_lost = False
        self.doubt = ""
        """Why the server can't be trusted any more."""
        self._client, self._model, self._hand_out = client, model, hand_out
        self._samples: dict[str, Sample] = {}
        self._flights: dict[str, Flight] = {}
        self._versions = {served.name: served.policy_version}
        self._swapped: set[int] = set()
        self._leaving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unfit = ""

    @property
    def sample_ids(self) -> frozenset[str]:
        """Samples that have not ended."""
        return frozenset(self._samples)

    @property
    def num_flights(self) -> int:
        """Requests under way."""
        return len(self._flights)

    @property
    def usage(self) -> EngineUsage:
        """What is carried, and what the server has said of requests that ended."""
        num_decoding = len(self._flights)
        return EngineUsage(
            num_decoding=num_decoding,
            num_waiting=max(0, len(self._samples) - num_decoding),
            num_drawn=self.num_tokens,
            num_prefilled=self._num_prefilled,
            num_reused=self._num_reused,
            num_resumed=self._num_resumed,
        )

    def add(self, samples: Sequence[Sample]) -> None:
        """Begin to carry samples."""
        self._samples |= {sample.sample_id: sample for sample in samples}
        self._begin(samples, num_barren=0)

    def announce(self, served: Served, *, is_swapped: bool) -> None:
        """Other weights are about to be loaded, under running samples or not."""
        self._versions[served.name] = served.policy_version
        if is_swapped:
            self._swapped.add(served.policy_version)
        for flight in self._flights.values():
            flight.note_change()

    def refuse(self, error: str) -> None:
        """End every sample with an error, those to come as well; an empty one lets them be
        generated again.
        """
        self._unfit = error
        for sample in list(self._samples.values()) if error else ():
            self._end(sample, FinishReason.ERROR, error=error)

    async def withdraw(self, sample_ids: Iterable[str] | None) -> list[Sample]:
        """Take samples out, all of them without ids, with what they have; those that end meanwhile
        are handed out.
        """
        wanted = {
            name
            for name in (self._samples if sample_ids is None else sample_ids)
            if name in self._samples
        }
        self._leaving |= wanted
        try:
            await self.ground(lambda flight: flight.sample.sample_id in wanted)
        except (ServerGone, ServerRefused) as error:
            log.warning(
                "samples.cut_off", error=str(error)
            )  # what the server still has of them is lost; it ends them when the stream breaks
            for flight in [one for one in self._flights.values() if one.sample.sample_id in wanted]:
                self._land(flight)
        self._leaving -= wanted
        return [self._samples.pop(name) for name in sorted(wanted & self._samples.keys())]

    async def ground(self, chosen: Callable[[Flight], bool]) -> None:
        """End requests, and wait until they have brought what they have. While the gate is open,
        their samples set out again.

        Raises:
            ServerGone, ServerRefused: The server did not do it in time.
        """
        if self.is_lost:
            raise ServerGone("the server is lost, and nobody can be asked for the last tokens")
        deadline = time.monotonic() + GROUND_SECONDS
        while flights := [flight for flight in self._flights.values() if chosen(flight)]:
            if time.monotonic() > deadline:
                raise ServerGone(
                    f"{len(flights)} aborted requests did not end within {GROUND_SECONDS:g} s"
                )
            for flight in flights:  # again and again: an abort that overtakes its request is lost
                await self._client.abort(flight.rid)
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        """Drop everything."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, samples: Sequence[Sample], *, num_barren: int) -> None:
        task = asyncio.get_running_loop().create_task(
            self._carry(list(samples), num_barren=num_barren)
        )
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.doubt = f"what it answered is not understood: {error!r}"

    async def _carry(self, samples: list[Sample], *, num_barren: int) -> None:
        """Make requests for samples until each has ended, left or gone on alone.

        Args:
            samples: Loses those that go on alone.
            num_barren: Requests for them that have ended without a token, one after the other.
        """
        while True:
            await self.gate.wait()
            if self._unfit:
                self.refuse(self._unfit)
            samples[:] = [
                one
                for one in samples
                if self._samples.get(one.sample_id) is one and one.sample_id not in self._leaving
            ]
            if not samples:
                return
            if num_barren == MAX_BARREN:
                self._give_up(
                    samples, f"the server ended {MAX_BARREN} requests for it without a token"
                )
                continue
            ending = await self._fly(samples, num_barren=num_barren)
            num_barren = num_barren + 1 if ending == "nothing" else 0
            if samples and ending != "tokens":
                await asyncio.sleep(PAUSE_SECONDS)

    async def _fly(
        self, samples: list[Sample], *, num_barren: int
    ) -> Literal["tokens", "nothing", "gone"]:
        """Make one request for samples, leave them with what came, and tell whether any tokens did,
        or the server was gone without one.
        """
        served, first, is_there = self.served, samples[0], True
        flights = {
            flight.rid: flight
            for flight in (
                Flight(sample, secrets.token_hex(8), served.policy_version) for sample in samples
            )
        }
        if not self._flights:
            self.last_progress = time.monotonic()
        self._flights |= flights
        try:
            prompts = [flight.prompt for flight in flights.values()]
            media = requested(samples, self._model, weights=served.name) if first.media else []
            settings = {
                "sampling": first.sampling,
                "extra_key": served.name,
                "num_top": first.top_tokens.shape[1],
            }
            stream = self._client.generate(prompts, media=media, **settings)
            async for event in stream:
                self.last_progress = time.monotonic()
                flight = flights[event["meta_info"]["id"]]
                flight.take(event)
                self.num_tokens += len(event["output_ids"])
                if flight.has_landed:
                    self._land(flight)
                    samples.remove(flight.sample)
                    if flight.sample.sample_id in self._samples:
                        self._begin(
                            [flight.sample], num_barren=0 if flight.tokens else num_barren + 1
                        )
        except ServerGone as error:
            log.warning("request.broken", num_samples=len(samples), error=str(error))
            is_there = False
        except ServerRefused as error:
            self._give_up(samples, str(error))
        finally:
            for flight in flights.values():
                self._land(flight)
        if any(flight.tokens for flight in flights.values()):
            return "tokens"
        return "nothing" if is_there else "gone"

    def _land(self, flight: Flight) -> None:
        """Take a request's tokens over into its sample, once, and hand the sample out if it is
        whole.
        """
        if self._flights.pop(flight.rid, None) is None:
            return
        sample = flight.sample
        self._num_prefilled += flight.num_prompt_tokens - flight.num_cached_tokens
        self._num_reused += flight.num_cached_tokens
        self._num_resumed += len(sample.tokens) if flight.num_prompt_tokens else 0
        try:
            flight.land(versions=self._versions, swapped=self._swapped)
        except UnknownVersion as error:
            self.doubt = str(error)
            return
        version = self.served.policy_version
        if not np.isfinite(sample.logprobs).all():
            self._end(
                sample,
                FinishReason.ERROR,
                error=(
                    f"policy version {version} gave no finite log-probability; are its weights "
                    "finite?"
                ),
            )
        elif (
            (reason := sample.finish_reason) is not None
            and self._client.records_experts
            and len(sample.experts) != len(sample.sequence) - 1
        ):
            known = f"{len(sample.experts)} of {len(sample.sequence) - 1} tokens"
            self._end(
                sample,
                FinishReason.ERROR,
                error=f"the server told of {known} which experts they went through",
            )
        elif reason is not None:
            self._end(sample, reason)
        elif flight.refusal:
            self._end(sample, FinishReason.ERROR, error=f"the server refused it: {flight.refusal}")

    def _give_up(self, samples: Iterable[Sample], error: str) -> None:
        for sample in samples:
            self._end(sample, FinishReason.ERROR, error=error)

    def _end(self, sample: Sample, reason: FinishReason, *, error: str = "") -> None:
        if self._samples.get(sample.sample_id) is sample:
            self._hand_out(
                sample.ended(reason, error=error)
            )  # first, so that nobody finds the engine empty and the sample nowhere
            self.num_handed_out += 1
            del self._samples[sample.sample_id]
