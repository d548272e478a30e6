"""SGLang on a plain CPU: every operation by its PyTorch form, no kernel of SGLang's. Named by
`plugin`, imported by SGLang alone.

SGLang 0.5.23 from the package index has kernels for GPUs only, and its own CPU platform wants
kernels that are built from source. A platform from outside is spared both.
"""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang is not there where types are checked
    """A CPU without kernels, graphs or Triton."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Attend by PyTorch."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Take the PyTorch form of every operation."""
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        """Name what the profiler watches."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Give what the profiler watches."""
        return torch.profiler.ProfilerActivity.CPU
