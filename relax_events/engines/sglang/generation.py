"""Generate samples on a server until each has finished, even if its requests fail.

A sample is finished when its `SampleState.finish_reason` is set. If a request ends earlier, for
any reason, the sample keeps its tokens so far and is sent again:

    add --> waits for the gate --> request --> tokens arrive --> finished: `on_result`
                  ^                                  |
                  +-- aborted, server lost, ended ---+

The gate is closed while the server is down, loads weights or sleeps.
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
from relax_events.engines.requests import SampleState
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.client import ServerRejected, ServerUnavailable, SGLangClient
from relax_events.engines.sglang.inflight import InflightRequest, UnknownVersion
from relax_events.engines.sglang.media_features import build_image_data
from relax_events.events.parts import FinishReason

log = structlog.get_logger()
ABORT_SECONDS = 20.0
"""How long a server may take to end aborted requests."""
CHECK_SECONDS = 0.02
PAUSE_SECONDS = 0.5
"""Pause before a request without tokens is repeated."""
MAX_EMPTY_REQUESTS = 8
"""Consecutive requests without a token after which their sample fails."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A policy version in a server.

    Attributes:
        policy_version: The version.
        name: The server's name of it, unique to each load; it also separates prefix caches.
        folder: The folder of its weights.
    """

    policy_version: int
    name: str
    folder: Path

    @classmethod
    def new(cls, policy_version: int, folder: Path) -> ServedVersion:
        """Name a version uniquely."""
        return cls(policy_version, f"{policy_version}-{secrets.token_hex(4)}", folder)


class Generation:
    """All samples on one server; see the module's docstring. Used in one event loop."""

    def __init__(
        self,
        client: SGLangClient,
        *,
        served: ServedVersion,
        model: ModelFolder,
        on_result: Callable[[GeneratedSample], None],
    ) -> None:
        self.gate = asyncio.Event()
        self.served = served
        self.last_progress = time.monotonic()
        self.num_finished = self.num_tokens = 0
        self._num_prefilled = self._num_cached = self._num_recomputed = 0
        self.is_lost = False
        self.distrust_reason = ""
        """Why the server's results can no longer be trusted; empty while they can."""
        self._client, self._model, self._on_result = client, model, on_result
        self._samples: dict[str, SampleState] = {}
        self._requests: dict[str, InflightRequest] = {}
        self._versions = {served.name: served.policy_version}
        self._swapped: set[int] = set()
        self._removed: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rejection = ""

    @property
    def sample_ids(self) -> frozenset[str]:
        """Samples that have not finished."""
        return frozenset(self._samples)

    @property
    def num_requests(self) -> int:
        """In-flight requests."""
        return len(self._requests)

    @property
    def usage(self) -> EngineUsage:
        """Samples in progress, and the server's counts of ended requests."""
        num_decoding = len(self._requests)
        return EngineUsage(
            num_decoding=num_decoding,
            num_waiting=max(0, len(self._samples) - num_decoding),
            num_generated=self.num_tokens,
            num_prefilled=self._num_prefilled,
            num_cached=self._num_cached,
            num_recomputed=self._num_recomputed,
        )

    def add(self, samples: Sequence[SampleState]) -> None:
        """Start to generate samples."""
        self._samples |= {sample.sample_id: sample for sample in samples}
        self._start_task(samples, num_empty=0)

    def begin_weight_update(self, served: ServedVersion, *, is_swapped: bool) -> None:
        """Prepare for other weights, loaded with or without running samples."""
        self._versions[served.name] = served.policy_version
        if is_swapped:
            self._swapped.add(served.policy_version)
        for request in self._requests.values():
            request.mark_weight_update()

    def reject(self, error: str) -> None:
        """Fail every sample with an error, new ones as well; an empty error ends this."""
        self._rejection = error
        for sample in list(self._samples.values()) if error else ():
            self._end(sample, FinishReason.ERROR, error=error)

    async def remove(self, sample_ids: Iterable[str] | None) -> list[SampleState]:
        """Remove the named samples, or all of them without ids, and return them with their tokens;
        samples that finish meanwhile become results.
        """
        removed_ids = {
            name
            for name in (self._samples if sample_ids is None else sample_ids)
            if name in self._samples
        }
        self._removed |= removed_ids
        try:
            await self.abort_requests(lambda request: request.sample.sample_id in removed_ids)
        except (ServerUnavailable, ServerRejected) as error:
            # Tokens that the server has not sent are lost; it aborts when the stream closes.
            log.warning("samples.truncated", error=str(error))
            for request in [
                one for one in self._requests.values() if one.sample.sample_id in removed_ids
            ]:
                self._finish_request(request)
        self._removed -= removed_ids
        return [self._samples.pop(name) for name in sorted(removed_ids & self._samples.keys())]

    async def abort_requests(self, is_selected: Callable[[InflightRequest], bool]) -> None:
        """Abort the selected requests, and wait for their last tokens. While the gate is open,
        their samples are sent again.

        Raises:
            ServerUnavailable, ServerRejected: The server did not end them in time.
        """
        if self.is_lost:
            raise ServerUnavailable("the server is lost, and its last tokens with it")
        deadline = time.monotonic() + ABORT_SECONDS
        while requests := [request for request in self._requests.values() if is_selected(request)]:
            if time.monotonic() > deadline:
                raise ServerUnavailable(
                    f"{len(requests)} aborted requests did not end within {ABORT_SECONDS:g} s"
                )
            # Repeated, because the server ignores an abort that arrives before its request.
            for request in requests:
                await self._client.abort(request.rid)
            await asyncio.sleep(CHECK_SECONDS)

    async def close(self) -> None:
        """Cancel all requests."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_task(self, samples: Sequence[SampleState], *, num_empty: int) -> None:
        task = asyncio.get_running_loop().create_task(
            self._generate(list(samples), num_empty=num_empty)
        )
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.distrust_reason = f"its response could not be parsed: {error!r}"

    async def _generate(self, samples: list[SampleState], *, num_empty: int) -> None:
        """Send requests for samples until each has finished, was removed or continues in another
        task.

        Args:
            samples: The samples; samples that continue in another task are removed from the list.
            num_empty: Consecutive requests for them that ended without a token.
        """
        while True:
            await self.gate.wait()
            if self._rejection:
                self.reject(self._rejection)
            samples[:] = [
                one
                for one in samples
                if self._samples.get(one.sample_id) is one and one.sample_id not in self._removed
            ]
            if not samples:
                return
            if num_empty == MAX_EMPTY_REQUESTS:
                self._fail(
                    samples,
                    f"the server ended {MAX_EMPTY_REQUESTS} requests for it without a token",
                )
                continue
            outcome = await self._request_once(samples, num_empty=num_empty)
            num_empty = num_empty + 1 if outcome == "empty" else 0
            if samples and outcome != "tokens":
                await asyncio.sleep(PAUSE_SECONDS)

    async def _request_once(
        self, samples: list[SampleState], *, num_empty: int
    ) -> Literal["tokens", "empty", "unavailable"]:
        """Send one request for samples and add its tokens; return whether it had any, or the server
        was unavailable.
        """
        served, first, is_available = self.served, samples[0], True
        requests = {
            request.rid: request
            for request in (
                InflightRequest(sample, secrets.token_hex(8), served.policy_version)
                for sample in samples
            )
        }
        if not self._requests:
            self.last_progress = time.monotonic()
        self._requests |= requests
        try:
            prompts = [request.prompt for request in requests.values()]
            media = (
                build_image_data(samples, self._model, weights=served.name) if first.media else []
            )
            settings = {
                "sampling": first.sampling,
                "extra_key": served.name,
                "num_top": first.top_tokens.shape[1],
            }
            stream = self._client.generate(prompts, media=media, **settings)
            async for event in stream:
                self.last_progress = time.monotonic()
                request = requests[event["meta_info"]["id"]]
                request.add_event(event)
                self.num_tokens += len(event["output_ids"])
                if request.has_finished:
                    self._finish_request(request)
                    samples.remove(request.sample)
                    if request.sample.sample_id in self._samples:
                        self._start_task(
                            [request.sample], num_empty=0 if request.tokens else num_empty + 1
                        )
        except ServerUnavailable as error:
            log.warning("request.failed", num_samples=len(samples), error=str(error))
            is_available = False
        except ServerRejected as error:
            self._fail(samples, str(error))
        finally:
            for request in requests.values():
                self._finish_request(request)
        if any(request.tokens for request in requests.values()):
            return "tokens"
        return "empty" if is_available else "unavailable"

    def _finish_request(self, request: InflightRequest) -> None:
        """Add a request's tokens to its sample, once; a finished sample becomes a result."""
        if self._requests.pop(request.rid, None) is None:
            return
        sample = request.sample
        self._num_prefilled += request.num_prompt_tokens - request.num_cached_tokens
        self._num_cached += request.num_cached_tokens
        self._num_recomputed += len(sample.tokens) if request.num_prompt_tokens else 0
        try:
            request.update_sample(versions=self._versions, swapped=self._swapped)
        except UnknownVersion as error:
            self.distrust_reason = str(error)
            return
        version = self.served.policy_version
        if not np.isfinite(sample.logprobs).all():
            self._end(
                sample,
                FinishReason.ERROR,
                error=(
                    f"policy version {version} returned a non-finite log-probability; are its "
                    "weights finite?"
                ),
            )
        elif (
            (reason := sample.finish_reason) is not None
            and self._client.records_experts
            and len(sample.experts) != len(sample.sequence) - 1
        ):
            recorded = f"{len(sample.experts)} of {len(sample.sequence) - 1} tokens"
            self._end(
                sample,
                FinishReason.ERROR,
                error=f"the server recorded the experts of only {recorded}",
            )
        elif reason is not None:
            self._end(sample, reason)
        elif request.rejection:
            self._end(
                sample, FinishReason.ERROR, error=f"the server rejected it: {request.rejection}"
            )

    def _fail(self, samples: Iterable[SampleState], error: str) -> None:
        for sample in samples:
            self._end(sample, FinishReason.ERROR, error=error)

    def _end(self, sample: SampleState, reason: FinishReason, *, error: str = "") -> None:
        if self._samples.get(sample.sample_id) is sample:
            self._on_result(
                sample.to_generated(reason, error=error)
            )  # before the deletion, so that a sample is always in the engine or in the results
            self.num_finished += 1
            del self._samples[sample.sample_id]
