"""Runs megatron-core on a machine without a GPU, over gloo.

megatron-core calls torch.cuda in many functions and has no setting for the CPU. These calls get
equivalents on the CPU; no file of megatron-core is changed, and with a GPU no call is replaced.
Every replacement is needed: each one left out breaks a pipeline, a mixture of experts or every
model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


@contextlib.contextmanager
def cuda_calls_on_cpu() -> Iterator[None]:
    """Let calls of megatron-core run on the CPU in this context, where there is no GPU."""
    _name_missing_function()
    if torch.cuda.is_available():
        yield
        return
    _replace_functions()
    # what megatron-core compiles for a GPU is computed as it is written
    with torch.compiler.set_stance("force_eager"), _CpuDevice():
        yield


class _CpuDevice(TorchFunctionMode):
    """Rewrites arguments that name a CUDA device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        named = dict(kwargs or {})
        if _is_cuda(named.get("device")):
            named["device"] = CPU
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(value) else value for value in args)
        return func(*args, **named)


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _NoStream:
    """Replaces a CUDA stream or event, on which nothing has to wait."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record_event(self, *_: object) -> _NoStream:
        """Return an event that has happened."""
        return _NoStream()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _do_nothing

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...


def _do_nothing(*_: object, **__: object) -> None: ...


@cache
def _name_missing_function() -> None:
    """Name what 0.16.1 reads without transformer-engine too, on a GPU as on a CPU."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@cache
def _replace_functions() -> None:
    """Replace, once in a process, the functions that would start CUDA."""
    _replace_device_functions(torch.cuda)
    import megatron.core.tensor_parallel.random as generators
    from megatron.core.transformer.moe import token_dispatcher

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    def keep_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
    for module in modules:
        module.get_rng_state, module.set_rng_state = get_state, set_state
        module.manual_seed = seed
    generators._get_cuda_rng_state = get_state  # noqa: SLF001
    generators._set_cuda_rng_state = set_state  # noqa: SLF001
    # the original returns tensors of the CPU as they are, also where numbers are needed
    token_dispatcher.maybe_move_tensor_to_cpu = keep_on_cpu
    _replace_uneven_collectives()


def _replace_uneven_collectives() -> None:
    """Let ranks gather and reduce parts of unequal lengths, which gloo can't in one call."""
    from megatron.core.tensor_parallel import mappings

    even_gather, even_reduce = (
        mappings._gather_along_first_dim,  # noqa: SLF001
        mappings._reduce_scatter_along_first_dim,  # noqa: SLF001
    )

    def gather(
        values: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            result: torch.Tensor = even_gather(values, group, None, use_global_buffer)
            return result
        parts = [values.new_empty(size, *values.shape[1:]) for size in sizes]
        parts[group.rank()] = values.contiguous()
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)
        return torch.cat(parts)

    def reduce(
        values: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            result: torch.Tensor = even_reduce(values, group, None, use_global_buffer)
            return result
        total = values.clone()
        dist.all_reduce(total, group=group)
        start = sum(sizes[: group.rank()])
        return total[start : start + sizes[group.rank()]].clone()

    mappings._gather_along_first_dim = gather  # noqa: SLF001
    mappings._reduce_scatter_along_first_dim = reduce  # noqa: SLF001


def _replace_device_functions(cuda: Any) -> None:
    cuda.current_device = lambda: CPU
    # each has a function of its own: torch's compiler keeps a table of them
    cuda.synchronize, cuda.empty_cache = (lambda *_, **__: None for _ in range(2))
    cuda.set_device, cuda.nvtx.range_push = (lambda *_, **__: None for _ in range(2))
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _NoStream()
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.nvtx.range_pop = lambda: None
