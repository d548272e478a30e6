"""SGLang platform for a plain CPU: every operation in PyTorch, no kernel. Named by `plugin`,
imported only by SGLang.

SGLang 0.5.23 from the package index has kernels for GPUs only, and its own CPU platform needs
kernels built from source. An out-of-tree platform needs neither.
"""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # mypy runs without SGLang
    """A CPU without kernels, graphs or Triton."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Use PyTorch's attention."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Use the PyTorch implementation of every operation."""
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        """Name the profiled activity."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return the profiled activity."""
        return torch.profiler.ProfilerActivity.CPU
