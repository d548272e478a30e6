"""What SGLang finds of ours by its entry points, in every process that it starts.

It can then take media as the worker has processed them and read the folders of models that do, and
serve on a machine without an accelerator. Where there is one, or the CPU kernels of SGLang's own
were asked for, nothing is done for the latter. Nothing of SGLang is imported before it asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

PLATFORM = "relax_events.engines.sglang.patches.cpu_platform:TorchCpuPlatform"
CUDA_CALLS = ("torch.cuda.synchronize", "sglang.srt.mem_cache.pool_host.common._cuda_host_register")
"""What SGLang calls on every platform: before it hashes its weights and when it releases memory;
and to record which experts tokens go through."""


def activate() -> str | None:
    """Name the platform that SGLang is to run on; None leaves the choice to SGLang. (Entry point in
    `sglang.srt.platforms`.)
    """
    return PLATFORM if _is_needed() else None


def replace_cuda_call() -> None:
    """Let what is meant for a GPU that is not there do nothing. (Entry point in
    `sglang.srt.plugins`.)
    """
    if not _is_needed():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for call in CUDA_CALLS:
        HookRegistry.register(call, _do_nothing, HookType.REPLACE)


def take_media() -> None:
    """Let requests bring media in our form beside SGLang's own, and models be read that take them.
    (Entry point in `sglang.srt.plugins`.)
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    omni, mixture = (
        "sglang.srt.models.qwen3_omni_moe.Qwen3OmniMoe",
        "sglang.srt.models.qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration",
    )
    for (target, module, name), kind in {
        (
            "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
            "media_intake",
            "read_request",
        ): HookType.BEFORE,
        (
            "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor.process_mm_data_async",
            "media_intake",
            "processed",
        ): HookType.AROUND,
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.get_internal_state",
            "media_intake",
            "with_mark",
        ): HookType.AROUND,
        (
            "sglang.srt.managers.scheduler.Scheduler.flush_cache",
            "media_intake",
            "forget_features",
        ): HookType.AFTER,
        ("transformers.AutoConfig.from_pretrained", "model_intake", "whole"): HookType.AFTER,
        (
            f"{omni}ForConditionalGeneration.load_weights",
            "model_intake",
            "load_thinker",
        ): HookType.AROUND,
        (
            f"{omni}ThinkerForConditionalGeneration.get_audio_feature",
            "model_intake",
            "heard_apart",
        ): HookType.AROUND,
        (f"{mixture}.load_weights", "model_intake", "load_mixture"): HookType.AROUND,
        (f"{mixture}.__init__", "model_intake", "note_depth"): HookType.AFTER,
    }.items():
        HookRegistry.register(target, _later(module, name), kind)


def _later(module: str, name: str) -> Callable[..., Any]:
    """Import what is ours when it is first called: SGLang's modules can't be imported while plugins
    are.
    """

    def hook(*arguments: Any, **settings: Any) -> Any:
        return getattr(import_module(f"relax_events.engines.sglang.{module}"), name)(
            *arguments, **settings
        )

    return hook


def _is_needed() -> bool:
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") not in ("", "0"):
        return False
    import torch

    return not torch.accelerator.is_available()


def _do_nothing(*_: Any, **__: Any) -> None:
    return
