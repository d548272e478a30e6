"""What SGLang finds of ours by its entry points, in every process that it starts.

It can then take media as the worker has processed them, and serve on a machine without an accelerator. Where there is one, or the CPU kernels of
SGLang's own were asked for, nothing is done for the latter. Nothing of SGLang is imported before it asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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


def take_media() -> None:
    """Let requests bring media in our form beside SGLang's own. (Entry point in `sglang.srt.plugins`.)"""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for (target, name), kind in {
        ("managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", "read_request"): HookType.BEFORE,
        ("multimodal.processors.qwen_vl.QwenVLImageProcessor.process_mm_data_async", "processed"): HookType.AROUND,
        ("managers.tokenizer_manager.TokenizerManager.get_internal_state", "with_mark"): HookType.AROUND,
        ("managers.scheduler.Scheduler.flush_cache", "forget_features"): HookType.AFTER,
    }.items():
        HookRegistry.register(f"sglang.srt.{target}", _later(name), kind)


def _later(name: str) -> Callable[..., Any]:
    """Import what takes media in when it is first called: SGLang's modules can't be imported while plugins are."""

    def hook(*arguments: Any, **settings: Any) -> Any:
        from relax_events.engines.sglang import media_intake

        return getattr(media_intake, name)(*arguments, **settings)

    return hook


def _is_needed() -> bool:
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") not in ("", "0"):
        return False
    import torch

    return not torch.accelerator.is_available()


def _do_nothing(*_: Any, **__: Any) -> None:
    return
