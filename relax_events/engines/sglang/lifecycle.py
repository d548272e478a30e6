"""A server's life: it comes up, changes its weights, and is lost or closed.

No sample is generated on weights that are not proven. At the start the server holds the model's
folder, and its checksums show how it puts tensors together; after each load they have to be those
of the version.
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
from relax_events.engines.sglang.client import ServerGone, ServerRefused, SGLangClient
from relax_events.engines.sglang.generation import Generation, Served
from relax_events.engines.sglang.process import ServerProcess
from relax_events.engines.sglang.weight_checksums import Fingerprints
from relax_events.errors import ConfigError, EngineFailed, EnvironmentProblem, WeightsError

log = structlog.get_logger()
LOOK_SECONDS = 0.2
Tell = Callable[[GeneratedSample | None], None]
"""Takes what ended; None when nothing will any more."""


class Serving:
    """See the module's docstring. Used within one event loop, `expected` apart."""

    def __init__(
        self,
        client: SGLangClient,
        process: ServerProcess | None,
        *,
        config: SGLangConfig,
        served: Served,
        model: ModelFolder,
        tell: Tell,
    ) -> None:
        self.generation = Generation(client, served=served, model=model, hand_out=tell)
        self.failure: EngineFailed | None = None
        self._client, self._process, self._config, self._tell = client, process, config, tell
        self._fingerprints = Fingerprints({}, dtype=torch.float32)
        self._expected: Mapping[str, str] = {}
        self._is_up = self._is_asleep = False
        self._lost = ""
        self._watching: asyncio.Task[None] | None = None

    async def open(self, model: ModelFolder, settings: ModelConfig) -> None:
        """Bring the server up on the model's folder, and find out how its weights are proven.

        Raises:
            ConfigError: It is of another version, or its weights can't be proven.
            EnvironmentProblem: It does not come up; the text ends with its log.
        """
        try:
            await self._bring_up()
            await self._client.require_supported(takes_media=model.layout is not None)
            if self._process is None:  # whoever was here before us may have left other weights
                await self._client.load_weights(
                    model.path, name=self.generation.served.name, flush_cache=True
                )
            await self._learn(model.tensors(), dtype=getattr(torch, settings.dtype))
        except (ServerGone, ServerRefused) as error:
            raise EnvironmentProblem(f"engine 'sglang' can't use the server: {error}") from error
        self._set_up()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def expected(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Give the checksums that the server must have once it has loaded these weights; from any
        thread.
        """
        return self._fingerprints.of(tensors)

    async def load(
        self, served: Served, expected: Mapping[str, str], *, on_running: Literal["swap", "restart"]
    ) -> None:
        """Change the weights under what runs; on an error the old ones serve, or the server is
        lost.

        Raises:
            WeightsError: The server is not there, refused the weights, or holds others after all.
        """
        generation, keeps_cache = self.generation, False
        if not self._is_up:
            raise WeightsError(
                f"policy version {served.policy_version} is not served: the server is lost"
            )
        generation.gate.clear()
        try:
            if on_running == "swap":  # what waits must not begin on the cache of the old weights
                await generation.ground(lambda flight: not flight.tokens)
                keeps_cache = generation.num_flights > 0
            elif (
                self._client.records_experts
            ):  # a server that retracts forgets which experts drew the tokens so far
                await generation.ground(lambda _: True)
            generation.announce(served, is_swapped=keeps_cache)
            if is_paused := generation.num_flights > 0:
                await self._client.pause("in_place" if keeps_cache else "retract")
            await self._client.load_weights(
                served.folder, name=served.name, flush_cache=not keeps_cache
            )
            await self._prove(expected)
            if is_paused:
                await self._client.go_on()
        except (ServerGone, ServerRefused) as error:
            await self._go_back()
            raise WeightsError(
                f"policy version {served.policy_version} is not served: {error}"
            ) from error
        generation.served, self._expected = served, expected
        generation.refuse("")
        self._is_asleep = False
        self._set_up()

    async def refuse(self, error: str) -> None:
        """End what runs and what comes with an error, until other weights are loaded."""
        await self.sleep()
        self.generation.refuse(error)
        self.wake()

    async def sleep(self) -> None:
        """Take what runs off the server, and let it wait."""
        self._is_asleep = True
        self.generation.gate.clear()
        try:
            await self.generation.ground(lambda _: True)
        except (ServerGone, ServerRefused) as error:
            self._lost = str(error)

    def wake(self) -> None:
        """Let what waits go on."""
        self._is_asleep = False
        if self._is_up:
            self._set_up()

    async def close(self) -> None:
        """End everything but the server."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.generation.close()
        await self._client.close()

    def _set_up(self) -> None:
        self._is_up = True
        if not self._is_asleep:
            self.generation.last_progress = time.monotonic()
            self.generation.gate.set()

    async def _bring_up(self) -> None:
        """Start the server, if it is ours, and wait for it."""
        served, deadline = self.generation.served, time.monotonic() + self._config.start_seconds
        if self._process is not None:
            self._process.start(served.folder, name=served.name)
        while not await self._client.is_ready():
            if self._process is not None and (ending := self._process.ending()) is not None:
                raise EnvironmentProblem(ending)
            if time.monotonic() > deadline:
                said = f"; the end of its log:\n{self._process.log_tail()}" if self._process else ""
                limit = f"engine.sglang.start_seconds = {self._config.start_seconds:g}"
                raise EnvironmentProblem(
                    f"the SGLang server at {self._client.url} was not ready within {limit}{said}"
                )
            await asyncio.sleep(LOOK_SECONDS)
        if self._process is not None:
            self._process.note_shared_memory()

    async def _learn(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
        self._fingerprints, unproven = Fingerprints.learnt(
            await self._client.checksums(), tensors, dtype=dtype
        )
        self._expected = self._fingerprints.of(tensors)
        if unproven and self._config.unproven_weights == "refuse":
            rule = (
                f"the server's checksums can't be computed here: not of {unproven[0]} "
                f"({len(unproven)} tensors in all)"
            )
            raise ConfigError(
                f"{rule}; set engine.sglang.unproven_weights = 'accept' to take its word for "
                "what it has loaded"
            )
        if unproven:
            log.warning("weights.unproven", tensor=unproven[0], num_tensors=len(unproven))

    async def _prove(self, expected: Mapping[str, str]) -> None:
        """Hold the server's checksums beside those that it must have.

        Raises:
            ServerRefused: One differs; the text names the tensor.
            ServerGone: It does not say.
        """
        held = await self._client.checksums()
        if wrong := next(
            (name for name, digest in expected.items() if held.get(name) != digest), None
        ):
            raise ServerRefused(f"the server holds other values in {wrong}")

    async def _go_back(self) -> None:
        """Go on with the version at hand after a load that failed; where the server does not hold
        it any more, it is lost.
        """
        with suppress(ServerGone, ServerRefused):
            await self._prove(self._expected)
            await self._client.go_on()
            self._set_up()
            return
        self._is_up, self._lost = False, "a load of weights left it with neither version"

    async def _watch(self) -> None:
        """Look after the server until it is lost, and end it then if it is ours."""
        while not (trouble := self._trouble()):
            await asyncio.sleep(LOOK_SECONDS)
        self.generation.gate.clear()
        self.generation.is_lost = True
        if self._process is not None:
            self._process.kill()
        self.failure = EngineFailed(f"the SGLang server at {self._client.url} is lost: {trouble}")
        self._tell(None)

    def _trouble(self) -> str:
        generation = self.generation
        if generation.doubt:
            return f"it can't be trusted, let it serve nobody else: {generation.doubt}"
        if self._process is not None and (ending := self._process.ending()) is not None:
            return ending
        silent_seconds = time.monotonic() - generation.last_progress
        if (
            generation.gate.is_set()
            and generation.sample_ids
            and silent_seconds > self._config.stall_seconds
        ):
            return f"no token for {silent_seconds:.0f} s (engine.sglang.stall_seconds)"
        return self._lost
