"""A server's memory on its device, released while others use the device and taken again.

    no request runs ──▶ cache flushed ──▶ memory released ──▶ others work
          ──▶ memory taken again ──▶ weights loaded and verified

SGLang frees memory only on a GPU. On a CPU the same calls succeed, and the server keeps everything.
It dies when memory is released under a running request, or taken twice.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from relax_events.config import EngineConfig, SGLangConfig

if TYPE_CHECKING:
    from relax_events.engines.sglang.client import SGLangClient

log = structlog.get_logger()
MEMORY_SAVER = "--enable-memory-saver"
"""SGLang's argument without which a server on a GPU frees nothing."""
WEIGHTS_BACKUP = "--enable-weights-cpu-backup"
"""SGLang's argument to keep weights in the host's memory while the GPU's are released."""


def with_memory_saver(config: EngineConfig) -> EngineConfig:
    """Return a section whose servers release their memory in their sleep. Their weights come back
    from the folder of their version; only servers that are sent no folder keep a copy of them.
    """
    sglang = config.sglang
    added = [MEMORY_SAVER] if sglang.weight_updates == "disk" else [MEMORY_SAVER, WEIGHTS_BACKUP]
    arguments = (*sglang.arguments, *(one for one in added if one not in sglang.arguments))
    return config.model_copy(update={"sglang": sglang.model_copy(update={"arguments": arguments})})


def frees_memory(config: SGLangConfig) -> bool:
    """Return whether servers release their memory in their sleep: those with `MEMORY_SAVER` that
    the worker starts.
    """
    return MEMORY_SAVER in config.arguments and not config.urls


class ServerMemory:
    """The memory of one server; all calls have deadlines. After an error the state is unknown."""

    def __init__(self, client: SGLangClient, *, keeps_weights: bool) -> None:
        """Start with all memory taken.

        Args:
            client: Of the server.
            keeps_weights: Whether the released weights come back unchanged.
        """
        self._client, self.keeps_weights = client, keeps_weights
        self.is_released = False
        """Whether the memory is released."""

    async def release(self) -> None:
        """Wait until nothing runs, and release the memory; does nothing if it is released.

        Raises:
            ServerRejected, ServerUnavailable: It is unknown whether the memory is released.
        """
        if self.is_released:
            return
        started = time.monotonic()
        await self._client.flush_cache()
        await self._client.release_memory()
        self.is_released = True
        seconds = round(time.monotonic() - started, 3)
        log.info("engine.memory_released", engine=self._client.url, seconds=seconds)

    async def resume(self) -> None:
        """Take the memory again; without `keeps_weights` the weights must be loaded then. Does
        nothing if it is taken.

        Raises:
            ServerRejected, ServerUnavailable: It is unknown whether the memory is taken.
        """
        if not self.is_released:
            return
        started = time.monotonic()
        await self._client.resume_memory()
        self.is_released = False
        seconds = round(time.monotonic() - started, 3)
        log.info("engine.memory_resumed", engine=self._client.url, seconds=seconds)
