"""Shards a model over all ranks by FSDP2: weights, gradients and AdamW's moments.

Each decoder layer is gathered when it is needed, in the model's dtype, and freed after it; the
embeddings, the output head and the towers for images and audio stay gathered from the start of a
micro-batch to its end, so a rank whose micro-batch has no media runs no tower. Gradients are added
over ranks in at least float32, after each micro-batch. A rank keeps 16 bytes of each trained
parameter, divided by the number of ranks, and its part of a frozen one in the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from relax_events.config import TrainerConfig
from relax_events.errors import EnvironmentProblem
from relax_events.models.adapters import published_parameters
from relax_events.models.folder_weights import FolderWeights, view_piece
from relax_events.training.backend.flat_adamw import MOMENTS
from relax_events.training.backend.parameter_store import ParameterStore, copy_to_host, on_device
from relax_events.training.backend.state import StateShard, StateSource
from relax_events.training.backend.weight_stream import split_into_buckets
from relax_events.training.ranks import Ranks

CALL = "relax_call"
"""Name of the method of a sharded model within which its weights are whole."""


def shard_model(
    module: nn.Module,
    *,
    layers: nn.ModuleList,
    device: torch.device,
    weights: FolderWeights | None = None,
) -> None:
    """Shard a model in place: trainable weights in at least float32, frozen ones as they are.
    Collective.

    Args:
        module: The whole model; its parameters have one dtype.
        layers: Its decoder layers.
        device: Of this rank; a GPU must be the current one (`open_device`).
        weights: Of a model on `meta`: each rank fills its pieces. None of a loaded one.
    Raises:
        EnvironmentProblem: A shard lies on another device.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    dtype = next(module.parameters()).dtype
    master = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == master else dtype,
        reduce_dtype=master,
        cast_forward_inputs=False,
    )
    for part in [*layers, module]:
        # one layer at a time: its whole float32 weights are freed before the next layer's are made
        for parameter in part.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(master)
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for sharded in _sharded_modules(module):
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # a micro-batch that reaches no expert of a layer must not leave out its reduction
        sharded.set_reduce_scatter_unused_params(True)
    if weights is not None:
        weights.fill(module, device=device)
    _require_shards(module, device)
    setattr(module, CALL, _call)
    register_fsdp_forward_method(module, CALL)


def _require_shards(module: nn.Module, device: torch.device) -> None:
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.to_local().device != device:
            raise EnvironmentProblem(
                f"{name} was not sharded onto {device}, this rank's device, but lies on "
                f"{parameter.device}; give each rank a device of its own (LOCAL_RANK), or set "
                "trainer.sharding = 'none'"
            )


def call_with_weights(module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that uses a model's weights outside of its forward method. Collective where
    the model is sharded; then the result must be a tensor or a tuple of tensors.
    """
    if not isinstance(module, FSDPModule):
        return function(*args)
    result = getattr(module, CALL)(function, *args)
    if not torch.is_grad_enabled():
        module.reshard()  # a backward pass does this, and there will be none
    return result


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; a view among its results gets memory of its own, since FSDP2 attaches the
    start of the backward pass to the results.
    """
    result = function(*args)
    if isinstance(result, Tensor):
        return result.clone()
    return tuple(one.clone() for one in result)


def _sharded_modules(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


class ShardedParameters(ParameterStore):
    """The parameters of a model sharded by `shard_model`, and AdamW over this rank's pieces. Of a
    model with adapters, only they belong to the state.
    """

    def __init__(self, module: nn.Module, *, config: TrainerConfig, ranks: Ranks) -> None:
        """Create the optimizer's state. Weight decay applies to matrices, not to vectors.

        Args:
            module: The sharded model.
            config: AdamW's settings.
            ranks: All that hold a piece.
        """
        self._module, self._ranks = module, ranks
        self._parameters: dict[str, DTensor] = {}
        for name, parameter in published_parameters(module).items():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            self._parameters[name] = parameter
        self._trained = {
            name: nn.Parameter(
                copy_to_host(_local(parameter)) if config.offload_optimizer else _local(parameter)
            )
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        self._moments = {
            kind: {name: torch.zeros_like(piece.detach()) for name, piece in self._trained.items()}
            for kind in MOMENTS
        }
        self._offloads, self._steps = config.offload_optimizer, list[Tensor]()
        self._optimizer = self._make_optimizer(config)
        self.zero_gradients()

    def _make_optimizer(self, config: TrainerConfig) -> torch.optim.AdamW:
        matrices = [name for name in self._trained if self._parameters[name].ndim >= 2]
        vectors = [name for name in self._trained if self._parameters[name].ndim < 2]
        parts = [
            (names, decay) for names, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        ]
        groups = [
            {"params": [self._trained[name] for name in names], "weight_decay": decay}
            for names, decay in parts
            if names
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
        )
        for names, _ in parts:
            if not names:
                continue
            step = torch.zeros((), dtype=torch.float32, device=self._trained[names[0]].device)
            self._steps.append(step)
            for name in names:
                optimizer.state[self._trained[name]] = {"step": step.clone()} | {
                    kind: self._moments[kind][name] for kind in MOMENTS
                }
        return optimizer

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        for name in self._trained:
            self._parameters[name].grad = None

    def gradient_sum(self) -> Tensor:
        """Return the sum of this rank's pieces of the gradients."""
        sums = [_local(gradient).sum() for _, gradient in self._present_gradients()]
        return torch.stack(sums).sum() if sums else torch.zeros(())

    def _present_gradients(self) -> Iterator[tuple[str, DTensor]]:
        for name in self._trained:
            gradient = self._parameters[name].grad
            if gradient is not None:
                assert isinstance(gradient, DTensor), f"the gradient of {name} is not sharded"
                yield name, gradient

    def reduce_gradients(self, ranks: Ranks) -> None:
        """Do nothing: each backward pass has summed its gradients over ranks."""

    def normalise_gradients(self, normaliser: float) -> float:
        """Divide the gradients, and return their norm over all ranks. Collective."""
        squares = 0.0
        for _, gradient in self._present_gradients():
            piece = _local(gradient)
            piece /= normaliser
            squares += float(torch.linalg.vector_norm(piece)) ** 2
        return math.sqrt(float(self._ranks.all_gather(np.array([squares])).sum()))

    def update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """Scale the gradients, take one AdamW step, and zero the gradients."""
        for name, piece in self._trained.items():
            gradient = self._parameters[name].grad
            # weight decay and moments also apply to a parameter that no micro-batch reached
            piece.grad = (
                torch.zeros_like(piece) if gradient is None else _local(gradient).to(piece.device)  # type: ignore[arg-type]
            )
            if gradient_scale != 1.0:
                piece.grad *= gradient_scale
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for step in self._steps:
            step += 1
        if self._offloads:
            for name, piece in self._trained.items():
                _local(self._parameters[name]).copy_(piece.detach())
        for piece in self._trained.values():
            piece.grad = None
        self.zero_gradients()

    def memory(self, *, with_gradients: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors with all memory of this rank's pieces; see `ParameterStore`."""
        pieces = [_local(parameter) for parameter in self._parameters.values()]
        moments = [moment for kind in self._moments.values() for moment in kind.values()]
        gradients = [_local(gradient) for _, gradient in self._present_gradients()]
        others = on_device(moments, pieces[0].device)
        return [*pieces, *others, *(gradients if with_gradients else ())], []

    def rebuild(self, *, with_gradients: bool = False) -> None:
        """Compute what was not kept: nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what is whole on each rank: the optimizer's steps."""
        return {f"optimizer.step.{index}": step for index, step in enumerate(self._steps)}

    def shards(self) -> list[StateShard]:
        """Return this rank's pieces: `model.<name>`, `exp_avg.<name>`, `exp_avg_sq.<name>`."""
        pieces = [
            (f"model.{name}", parameter, _local(parameter))
            for name, parameter in self._parameters.items()
        ] + [
            (f"{kind}.{name}", self._parameters[name], moment)
            for kind, moments in self._moments.items()
            for name, moment in moments.items()
        ]
        return [
            StateShard(
                name=name,
                global_shape=tuple(parameter.shape),
                offset=(view_piece(parameter)[1], *(0 for _ in parameter.shape[1:])),
                tensor=piece.detach(),
            )
            for name, parameter, piece in pieces
        ]

    def _load_optimizer(self, state: StateSource) -> None:
        for name, group in zip(self.tensors(), self._optimizer.param_groups, strict=True):
            for piece in group["params"]:
                self._optimizer.state[piece]["step"].copy_(state.read(name))

    def _share_loaded(self) -> None:
        if self._offloads:
            for name, piece in self._trained.items():
                piece.copy_(_local(self._parameters[name]))

    def weight_buckets(self, *, max_bytes: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """Gather the weights on all devices, some at a time, and yield them on rank 0; see
        `TrainerBackend.weight_buckets`.
        """
        for names in split_into_buckets(self._parameters, max_bytes=max_bytes):
            bucket = {}
            for name in names:
                narrow = self._parameters[name].detach().to(dtype)
                assert isinstance(narrow, DTensor), f"{name} is not sharded"
                whole: Tensor = narrow.full_tensor()
                if self._ranks.rank == 0:
                    bucket[name] = whole
            yield bucket


def _local(tensor: DTensor) -> Tensor:
    """Return this rank's piece; it shares the memory."""
    piece: Tensor = tensor.to_local()
    return piece.detach()
