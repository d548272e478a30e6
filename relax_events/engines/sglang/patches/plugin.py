"""Entry points that SGLang loads in every process it starts.

They let it accept preprocessed media, load the folders of such models, and run on a machine without
an accelerator. With an accelerator, or with SGLang's own CPU kernels selected, the platform is
unchanged. SGLang is imported only when a hook is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

PLATFORM = "relax_events.engines.sglang.patches.cpu_platform:TorchCpuPlatform"
CUDA_CALLS = ("torch.cuda.synchronize", "sglang.srt.mem_cache.pool_host.common._cuda_host_register")
"""CUDA calls that SGLang makes on every platform: before it hashes its weights, when it releases
memory, and to record experts.
"""


def choose_platform() -> str | None:
    """Return the platform that SGLang should use; None leaves the choice to SGLang. (Entry point in
    `sglang.srt.platforms`.)
    """
    return PLATFORM if _is_plain_cpu() else None


def replace_cuda_calls() -> None:
    """Replace CUDA calls by no-ops if there is no GPU. (Entry point in `sglang.srt.plugins`.)"""
    if not _is_plain_cpu():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for call in CUDA_CALLS:
        HookRegistry.register(call, _do_nothing, HookType.REPLACE)


def register_media() -> None:
    """Register the hooks for media in our format and for the models that read them. (Entry point in
    `sglang.srt.plugins`.)
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    omni, mixture = (
        "sglang.srt.models.qwen3_omni_moe.Qwen3OmniMoe",
        "sglang.srt.models.qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration",
    )
    for (target, module, name), kind in {
        (
            "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
            "media",
            "read_request",
        ): HookType.BEFORE,
        (
            "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor.process_mm_data_async",
            "media",
            "process_media",
        ): HookType.AROUND,
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.get_internal_state",
            "media",
            "add_media_format",
        ): HookType.AROUND,
        (
            "sglang.srt.managers.scheduler.Scheduler.flush_cache",
            "media",
            "clear_feature_cache",
        ): HookType.AFTER,
        ("transformers.AutoConfig.from_pretrained", "model", "wrap_thinker_config"): HookType.AFTER,
        (
            f"{omni}ForConditionalGeneration.load_weights",
            "model",
            "load_thinker",
        ): HookType.AROUND,
        (
            f"{omni}ThinkerForConditionalGeneration.get_audio_feature",
            "model",
            "encode_audio_separately",
        ): HookType.AROUND,
        (f"{mixture}.load_weights", "model", "load_mixture"): HookType.AROUND,
        (f"{mixture}.__init__", "model", "set_deepstack_layers"): HookType.AFTER,
    }.items():
        HookRegistry.register(target, _lazy_hook(module, name), kind)


def _lazy_hook(module: str, name: str) -> Callable[..., Any]:
    """Import our module at the first call: SGLang's modules can't be imported while plugins
    load.
    """

    def hook(*arguments: Any, **settings: Any) -> Any:
        return getattr(import_module(f"relax_events.engines.sglang.patches.{module}"), name)(
            *arguments, **settings
        )

    return hook


def _is_plain_cpu() -> bool:
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") not in ("", "0"):
        return False
    import torch

    return not torch.accelerator.is_available()


def _do_nothing(*_: Any, **__: Any) -> None:
    return
