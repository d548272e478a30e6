"""LoRA adapters of a loaded model, by `peft`: adds, initialises, replaces and lists them.

The layers stay apart: a target module computes `W x + alpha / rank * B (A x)`. Merged into bfloat16
weights, an update smaller than half a rounding step of W would be lost, and trainer and engine
would compute different policies.

Adapters keep the dtype of the model. They are named like the parameters in the model, such as
`model.layers.0.self_attn.q_proj.lora_A.default.weight`; `peft_name` gives the name in a folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from relax_events.errors import ConfigError, EnvironmentProblem, WeightsError
from relax_events.models.base_digest import compute_base_digest, require_same_base
from relax_events.models.causal_lm import replace_weights
from relax_events.models.families import Family
from relax_events.models.folder_weights import view_piece

if TYPE_CHECKING:
    from relax_events.config import LoRAConfig, ModelConfig

ADAPTER_NAME = "default"
ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.default\.weight")
PEFT_PREFIX = "base_model.model."
BASE_DIGEST = "base_model.digest"
"""Name of the digest in a trainer's state."""
PROBE_SEED = 20_260_102


def published_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return what a version of the model consists of, by name: its adapters, or without any all of
    its parameters, tied ones once.
    """
    every = dict(module.named_parameters())
    adapters = {name: one for name, one in every.items() if ADAPTER.fullmatch(name)}
    return adapters or every


def peft_name(name: str) -> str:
    """Return a parameter's name in a folder of adapters as `peft` writes it."""
    return PEFT_PREFIX + name.replace(f".{ADAPTER_NAME}.weight", ".weight")


def parameter_name(name: str) -> str:
    """Undo `peft_name`."""
    return name.removeprefix(PEFT_PREFIX).removesuffix(".weight") + f".{ADAPTER_NAME}.weight"


class Adapters:
    """The adapters in a model: no part of it but them is trained."""

    def __init__(
        self, module: nn.Module, config: LoRAConfig, *, language_model: nn.Module, path: Path
    ) -> None:
        """Add adapters that have no effect yet, and freeze all other parameters.

        Args:
            module: The whole model, on its device.
            config: Rank, scale and target modules.
            language_model: The part of the model with the target modules.
            path: The folder that the model was loaded from.
        Raises:
            ConfigError: A target module does not exist.
            EnvironmentProblem: `peft` is not installed.
        """
        targets = find_targets(module, config, language_model=language_model)
        _inject(module, config, targets)
        module.requires_grad_(False)
        self._path, self._module = path, module
        self._set_dtypes()
        self.initialise(seed=0)

    @classmethod
    def for_model(
        cls, module: nn.Module, config: ModelConfig, *, family: Family, path: Path
    ) -> Adapters | None:
        """Add the adapters of `model.lora` to a model; None where the section is missing.

        Raises:
            ConfigError, EnvironmentProblem: As the constructor.
        """
        if config.lora is None:
            return None
        return cls(module, config.lora, language_model=family.language_model(module), path=path)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the adapters, by name. Sharding a model replaces them."""
        return published_parameters(self._module)

    def _set_dtypes(self) -> None:
        """Give each adapter the dtype of the weights that it is added to."""
        for name, parameter in self.parameters.items():
            parameter.data = parameter.data.to(self._find_dtype(name))
            parameter.requires_grad_()

    def _find_dtype(self, name: str) -> torch.dtype:
        match = ADAPTER.fullmatch(name)
        assert match is not None, f"{name} is no adapter"
        return self._module.get_parameter(f"{match['module']}.base_layer.weight").dtype

    @property
    def base_digest(self) -> bytes:
        """Digest of the folder that the model was loaded from; computed once per process."""
        return compute_base_digest(self._path)

    @torch.no_grad()
    def initialise(self, *, seed: int) -> None:
        """Sample A uniformly from +-1 / sqrt(its columns), and set B to 0, so that the adapters
        have no effect: the same bits for a seed on any device and rank, sharded or not.

        Source: LoRA, section 4.1 (arXiv 2106.09685); `peft` samples A from the same range.
        """
        generator, parameters = torch.Generator().manual_seed(seed), self.parameters
        for name in sorted(parameters):
            piece, first = view_piece(parameters[name])
            if ".lora_B." in name:
                piece.zero_()
            else:
                values = sample_adapter(parameters[name].shape, generator)
                piece.copy_(values[first : first + len(piece)].to(self._find_dtype(name)))

    @contextmanager
    def randomised(self) -> Iterator[None]:
        """Give the adapters an effect within the block, for measurements of the whole model."""
        parameters = self.parameters
        kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        generator = torch.Generator().manual_seed(PROBE_SEED)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.copy_(sample_adapter(parameter.shape, generator))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, values in kept.items():
                    parameters[name].copy_(values)

    def replace(self, tensors: Mapping[str, Tensor], *, base_digest: bytes) -> None:
        """Load other adapters; on an error the old ones stay.

        Args:
            tensors: By name of the parameter.
            base_digest: Digest of the base model that they were trained on; empty where unknown.
        Raises:
            WeightsError: They are another base model's, or one is missing, unknown or of another
                shape; the text names it.
        """
        self.require_base(base_digest)
        parameters = self.parameters
        require_same_adapters(tensors, parameters)
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)

    def require_base(self, base_digest: bytes) -> None:
        """Require that adapters were trained on the model that is loaded here.

        Raises:
            WeightsError: They were not.
        """
        if base_digest:  # one's own is computed from the whole folder, when it is needed
            require_same_base(
                base_digest,
                self.base_digest,
                folder=self._path,
                what="the adapters were trained on",
            )


def replace_version(
    module: nn.Module,
    adapters: Adapters | None,
    tensors: Mapping[str, Tensor],
    *,
    base_digest: bytes,
) -> None:
    """Load other weights of the same model, or other adapters of it; on an error the old ones stay.

    Args:
        module: The model.
        adapters: In it; None where a version is all of its weights.
        tensors: By Hugging Face name.
        base_digest: Of the adapters' base model; empty for whole weights, or where unknown.
    Raises:
        WeightsError: A tensor is missing, unknown or of another shape, or the base model is
            another one; the text names it.
    """
    if adapters is None:
        replace_weights(module, tensors)
    else:
        adapters.replace(tensors, base_digest=base_digest)


def encode_base_digest(digest: bytes) -> dict[str, Tensor]:
    """Return a digest as a trainer's state has it; nothing of an empty one."""
    if not digest:
        return {}
    return {BASE_DIGEST: torch.frombuffer(bytearray(digest), dtype=torch.uint8)}


def require_same_adapters(tensors: Mapping[str, Tensor], expected: Mapping[str, Any]) -> None:
    """Require adapters of the same names and shapes.

    Raises:
        WeightsError: One is missing, unknown or of another shape; the text names it.
    """
    if different := sorted(tensors.keys() ^ expected.keys()):
        has, what = ("lacks", "needs") if different[0] in expected else ("has", "does not have")
        raise WeightsError(
            f"the version {has} {different[0]}, which the model with [model.lora] {what} "
            f"({len(different)} such in all); set rank and target_modules as the trainer has them"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise WeightsError(
                f"{name} must be {tuple(expected[name].shape)} as in the model, got "
                f"{tuple(tensor.shape)}; set model.lora.rank as the trainer has it"
            )


def find_targets(
    module: nn.Module, config: LoRAConfig, *, language_model: nn.Module
) -> dict[str, nn.Linear]:
    """Return the linear layers that get adapters, by their name in the model.

    Raises:
        ConfigError: A name of `model.lora.target_modules` fits no layer; the text lists the
            layers.
    """
    inside = {id(part) for part in language_model.modules()}
    linear = {
        name: part
        for name, part in module.named_modules()
        if type(part) is nn.Linear and id(part) in inside
    }
    if not config.target_modules:
        return linear
    matches = {
        target: [name for name in linear if f".{name}".endswith(f".{target}")]
        for target in config.target_modules
    }
    if missing := next((target for target, names in matches.items() if not names), None):
        kinds = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"model.lora.target_modules names {missing!r}, but the linear layers of the language "
            f"model are {', '.join(kinds)}; name some of them"
        )
    selected_names = {name for names in matches.values() for name in names}
    return {name: part for name, part in linear.items() if name in selected_names}


def _inject(module: nn.Module, config: LoRAConfig, targets: Mapping[str, nn.Linear]) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise EnvironmentProblem(
            f"[model.lora] needs peft, which can't be imported ({error}); install "
            "relax-events[lora]"
        ) from error
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # declared as an integer, used as a number
        lora_dropout=0.0,
        target_modules=list(targets),
        bias="none",
    )
    inject_adapter_in_model(settings, module, adapter_name=ADAPTER_NAME)


def sample_adapter(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Sample the values of an adapter's matrix in float32 on the CPU."""
    bound = 1 / math.sqrt(shape[1])
    return torch.rand(tuple(shape), generator=generator).mul_(2 * bound).sub_(bound)
