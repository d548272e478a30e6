"""Lifecycle of a server: it starts, loads weights, and is lost or closed.

No sample is generated on unverified weights. At the start the server holds the model's folder, and
its checksums show how it concatenates tensors; after each load they must equal the
version's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal

import structlog
import torch
from torch import Tensor

from relax_events.config import ModelConfig, SGLangConfig
from relax_events.engines.protocol import GeneratedSample
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.client import ServerRejected, ServerUnavailable, SGLangClient
from relax_events.engines.sglang.generation import Generation, ServedVersion
from relax_events.engines.sglang.memory import WEIGHTS_BACKUP, ServerMemory, frees_memory
from relax_events.engines.sglang.process import ServerProcess
from relax_events.engines.sglang.weight_checksums import WeightChecksums, name_by_rank
from relax_events.engines.sglang.weight_group import WeightGroup
from relax_events.errors import ConfigError, EngineFailed, EnvironmentProblem, WeightsError

log = structlog.get_logger()
CHECK_SECONDS = 0.2
ResultCallback = Callable[[GeneratedSample | None], None]
"""Receives finished samples; None when the server is lost."""


class ServerLifecycle:
    """One server and its samples; see the module's docstring. Used in one event loop, except
    `expected`.
    """

    def __init__(
        self,
        client: SGLangClient,
        process: ServerProcess | None,
        *,
        config: SGLangConfig,
        served: ServedVersion,
        model: ModelFolder,
        on_result: ResultCallback,
    ) -> None:
        self.generation = Generation(client, served=served, model=model, on_result=on_result)
        self.failure: EngineFailed | None = None
        self._client, self._process, self._config, self._on_result = (
            client,
            process,
            config,
            on_result,
        )
        self._checksums = WeightChecksums({}, dtype=torch.float32)
        self._group = (
            WeightGroup(client, seconds=config.start_seconds)
            if config.weight_updates == "distributed"
            else None
        )
        self._memory = (
            ServerMemory(client, keeps_weights=WEIGHTS_BACKUP in config.arguments)
            if frees_memory(config)
            else None
        )
        self._is_proven = True
        """Whether checksums prove what the server holds."""
        self._expected: Mapping[str, str] = {}
        self._is_ready = self._is_asleep = False
        self._loss_reason = ""
        self._watch_task: asyncio.Task[None] | None = None

    async def open(self, model: ModelFolder, settings: ModelConfig) -> None:
        """Start the server on the model's folder, and infer how its weights are verified.

        Raises:
            ConfigError: The server's version is not supported, or its weights can't be verified.
            EnvironmentProblem: The server does not start; the text ends with its log.
        """
        try:
            await self._start()
            await self._client.require_supported(takes_media=model.layout is not None)
            tensors = model.tensors()
            if self._group is not None:
                await self._group.open(await self._client.require_one_group())
            if self._process is None:  # an external server may hold the weights of an earlier run
                await self._put(self.generation.served, tensors, flush_cache=True)
            await self._infer_checksums(tensors, dtype=getattr(torch, settings.dtype))
        except (ServerUnavailable, ServerRejected) as error:
            raise EnvironmentProblem(f"engine 'sglang' can't use the server: {error}") from error
        self._mark_ready()
        self._watch_task = asyncio.get_running_loop().create_task(self._watch())

    async def load(
        self,
        served: ServedVersion,
        tensors: Mapping[str, Tensor],
        *,
        on_running: Literal["swap", "restart"],
    ) -> None:
        """Load weights while samples run; on an error the server keeps the old ones, or is lost.
        Without checksums that prove which ones it holds, it is lost.

        Raises:
            WeightsError: The server is lost, rejected the weights, or reports other checksums.
        """
        generation, keeps_cache = self.generation, False
        expected = await asyncio.to_thread(self._checksums.compute, tensors)
        if not self._is_ready:
            raise WeightsError(
                f"policy version {served.policy_version} is not served: the server is lost"
            )
        generation.gate.clear()
        try:
            if self._memory is not None:
                await self._memory.resume()
            if (
                on_running == "swap"
            ):  # samples without tokens must not start on the cache of the old weights
                await generation.abort_requests(lambda request: not request.tokens)
                keeps_cache = generation.num_requests > 0
            elif self._client.records_experts:  # a server that retracts loses the recorded experts
                await generation.abort_requests(lambda _: True)
            generation.begin_weight_update(served, is_swapped=keeps_cache)
            if is_paused := generation.num_requests > 0:
                await self._client.pause("in_place" if keeps_cache else "retract")
            await self._put(served, tensors, flush_cache=not keeps_cache)
            await self._verify(expected)
            if is_paused:
                await self._client.resume()
        except (ServerUnavailable, ServerRejected) as error:
            await self._roll_back()
            raise WeightsError(
                f"policy version {served.policy_version} is not served: {error}"
            ) from error
        generation.served, self._expected = served, expected
        generation.reject("")
        self._is_asleep = False
        self._mark_ready()

    async def reject(self, error: str) -> None:
        """Fail running and new samples with an error, until other weights are loaded."""
        await self._halt()
        self.generation.reject(error)
        self._is_asleep = False
        if self._is_ready:
            self._mark_ready()

    async def sleep(self) -> None:
        """Remove the running samples from the server, let them wait, and release its memory. A
        server that does not release it is killed.
        """
        await self._halt()
        if self._memory is None or not self._is_ready:
            return
        try:
            await self._memory.release()
        except (ServerUnavailable, ServerRejected) as error:
            self._lose(f"it did not release its memory: {error}")
            if self._process is not None:
                self._process.kill()

    async def _halt(self) -> None:
        """Remove the running samples from the server, and let them wait."""
        self._is_asleep = True
        self.generation.gate.clear()
        try:
            await self.generation.abort_requests(lambda _: True)
        except (ServerUnavailable, ServerRejected) as error:
            self._loss_reason = str(error)

    async def wake(self) -> None:
        """Take the memory again with the weights that it had, and continue the waiting samples; if
        that fails, the server is lost.
        """
        if self._memory is not None and self._memory.is_released and self._is_ready:
            try:
                await self._memory.resume()
                if not self._memory.keeps_weights:
                    await self._put(self.generation.served, {}, flush_cache=True)
                await self._verify(self._expected)
            except (ServerUnavailable, ServerRejected) as error:
                self._lose(f"it did not take its memory again: {error}")
        self._is_asleep = False
        if self._is_ready:
            self._mark_ready()

    def _lose(self, reason: str) -> None:
        self._is_ready, self._loss_reason = False, reason

    async def close(self) -> None:
        """Close the client and all requests; the server continues."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        await self.generation.close()
        if self._group is not None:
            await self._group.close()
        await self._client.close()

    def _mark_ready(self) -> None:
        self._is_ready = True
        if not self._is_asleep:
            self.generation.last_progress = time.monotonic()
            self.generation.gate.set()

    async def _start(self) -> None:
        """Start the server, unless it is external, and wait until it is ready."""
        served, deadline = self.generation.served, time.monotonic() + self._config.start_seconds
        if self._process is not None:
            self._process.start(served.folder, name=served.name)
        while not await self._client.is_ready():
            if (
                self._process is not None
                and (exit_text := self._process.describe_exit()) is not None
            ):
                raise EnvironmentProblem(exit_text)
            if time.monotonic() > deadline:
                tail = f"; the end of its log:\n{self._process.log_tail()}" if self._process else ""
                raise EnvironmentProblem(
                    f"the SGLang server at {self._client.url} was not ready within "
                    f"engine.sglang.start_seconds = {self._config.start_seconds:g}{tail}"
                )
            await asyncio.sleep(CHECK_SECONDS)
        if self._process is not None:
            self._process.record_shared_memory()

    async def _put(
        self, served: ServedVersion, tensors: Mapping[str, Tensor], *, flush_cache: bool
    ) -> None:
        """Load weights into the server, from their folder or by broadcast; errors as for the
        client's calls.
        """
        if self._group is None:
            await self._client.load_weights(
                served.folder, name=served.name, flush_cache=flush_cache
            )
        else:
            await self._group.send(tensors, name=served.name, flush_cache=flush_cache)

    async def _infer_checksums(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
        reported = await self._client.checksums()
        self._checksums, unverified = await asyncio.to_thread(
            WeightChecksums.infer, reported, tensors, dtype=dtype
        )
        self._expected = {
            name: digest
            for name, digest in name_by_rank(reported).items()
            if name in self._checksums.names
        }
        if unverified and self._config.on_unverified_weights == "refuse":
            raise ConfigError(
                f"the server's checksums can't be verified for {len(unverified)} tensors, such as "
                f"{unverified[0]}; set engine.sglang.on_unverified_weights = 'accept' to load "
                "weights without verification"
            )
        self._is_proven = not unverified
        if unverified:
            log.warning("weights.unverified", tensor=unverified[0], num_tensors=len(unverified))

    async def _verify(self, expected: Mapping[str, str]) -> None:
        """Compare the server's checksums with the expected ones.

        Raises:
            ServerRejected: One differs; the text names the tensor.
            ServerUnavailable: The call failed.
        """
        reported = name_by_rank(await self._client.checksums())
        if different := next(
            (name for name, digest in expected.items() if reported.get(name) != digest), None
        ):
            raise ServerRejected(f"the server has other values in {different}")

    async def _roll_back(self) -> None:
        """Continue with the old version after a failed load; a server that no longer has it is
        lost.
        """
        can_continue = self._is_proven and (self._group is None or not self._group.is_broken)
        with suppress(ServerUnavailable, ServerRejected):
            if not can_continue:
                raise ServerRejected("nothing proves which weights the server holds")
            await self._verify(self._expected)
            await self._client.resume()
            self._mark_ready()
            return
        self._lose(
            "after a failed load of weights it has neither version"
            if can_continue
            else "after a failed load of weights nothing proves which version it has"
        )

    async def _watch(self) -> None:
        """Watch the server until it is lost; then kill it, unless it is external."""
        while not (failure := self._find_failure()):
            await asyncio.sleep(CHECK_SECONDS)
        self.generation.gate.clear()
        self.generation.is_lost = True
        if self._process is not None:
            self._process.kill()
        self.failure = EngineFailed(f"the SGLang server at {self._client.url} is lost: {failure}")
        self._on_result(None)

    def _find_failure(self) -> str:
        generation = self.generation
        if self._loss_reason:
            return self._loss_reason
        if generation.distrust_reason:
            return (
                "its results can't be trusted, don't use it for other runs: "
                f"{generation.distrust_reason}"
            )
        if self._process is not None and (exit_text := self._process.describe_exit()) is not None:
            return exit_text
        idle_seconds = time.monotonic() - generation.last_progress
        if (
            generation.gate.is_set()
            and generation.sample_ids
            and idle_seconds > self._config.stall_seconds
        ):
            return f"no token for {idle_seconds:.0f} s (engine.sglang.stall_seconds)"
        return ""
