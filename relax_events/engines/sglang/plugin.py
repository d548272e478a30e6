"""What SGLang finds of ours by its entry points, in every process that it starts: it can then serve on a machine without an accelerator.

Where there is one, or the CPU kernels of SGLang's own were asked for, nothing happens here. Nothing of SGLang is imported before it asks.
"""

from __future__ import annotations

import os
from typing import Any

PLATFORM = "relax_events.engines.sglang.cpu_platform:TorchCpuPlatform"
CUDA_CALLS = ("torch.cuda.synchronize", "sglang.srt.mem_cache.pool_host.common._cuda_host_register")
"""What SGLang calls on every platform: before it hashes its weights and when it releases memory; and to record which experts tokens go through."""


def activate() -> str | None:
    """Name the platform that SGLang is to run on; None leaves the choice to SGLang. (Entry point in `sglang.srt.platforms`.)"""
    return PLATFORM if _is_needed() else None


def replace_cuda_call() -> None:
    """Let what is meant for a GPU that is not there do nothing. (Entry point in `sglang.srt.plugins`.)"""
    if not _is_needed():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for call in CUDA_CALLS:
        HookRegistry.register(call, _do_nothing, HookType.REPLACE)


def _is_needed() -> bool:
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") not in ("", "0"):
        return False
    import torch

    return not torch.accelerator.is_available()


def _do_nothing(*_: Any, **__: Any) -> None:
    return
