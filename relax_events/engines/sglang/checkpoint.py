"""Model folders as a server reads them: tensor names and shapes, and a folder of the same layout
for every policy version.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_events.config import MediaConfig
from relax_events.errors import ConfigError, WeightsError
from relax_events.events.routed_experts import ExpertShape
from relax_events.media.token_layout import MediaLayout, OmniLayout
from relax_events.media.towers import load_feature_extractor
from relax_events.model_folder import (
    get_text_config,
    get_thinker_config,
    read_expert_counts,
    read_model_json,
)
from relax_events.model_folder.tensors import StoredTensors, read_layouts
from relax_events.weights.artifact_writer import split_into_files
from relax_events.weights.tensor_files import lay_out_file, write_weight_files

MEDIA_MODELS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe")
"""Models whose media the engine sends, by `model_type`: all read images and video, the last two
audio as well. Tests compare each with the trainer (`tests/engines`).
"""
GPU_KERNELS_ONLY = (
    "whose linear attention SGLang computes only by GPU kernels, which were not compared with "
    "the trainer"
)
UNTESTED_MEDIA_MODELS = {"qwen3_5": GPU_KERNELS_ONLY, "qwen3_5_moe": GPU_KERNELS_ONLY}
"""Why other model families that read media are not supported."""


FUSED_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)$")
"""Names of tensors with all experts of a layer, as in transformers. A checkpoint has one tensor per
expert, or the fused one transposed.
"""
OMNI_PART, THINKER = re.compile(r"(thinker|talker|code2wav)\."), "thinker."
"""Name prefixes of a complete Qwen3-Omni checkpoint. Its thinker is the model; other folders have
only the thinker.
"""
ROUTER = re.compile(r".*layers\.(\d+)\.mlp\.gate\.weight$")
MAX_FILE_BYTES = 1024**3
DEFAULT_MEDIA = MediaConfig()
REMEDY = "publish weights of the model in model.path"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Facts about a model's folder, read without loading the model.

    Attributes:
        path: The folder, in Hugging Face layout.
        shapes: Shape of every tensor, by its name in the folder, one tensor per expert; a
            thinker's names have no prefix.
        hidden_size: Width of the decoder.
        vocab_size: Number of token ids.
        max_context_tokens: The model's maximum context; 0 if unknown.
        num_layers: Layers of the decoder.
        has_tied_head: Whether the output layer shares the weights of the embedding.
        layout: Layout of media in the token sequence; None if the servers receive only text.
        extractor: Audio feature extractor; None if the model reads no audio.
        experts: Shape of recorded expert choices; None if they are not recorded.
        expert_layers: Indices of the layers that have experts.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    num_layers: int
    has_tied_head: bool
    layout: MediaLayout | None
    extractor: Any = None
    experts: ExpertShape | None = None
    expert_layers: tuple[int, ...] = ()

    @classmethod
    def read(
        cls, path: Path, *, media: MediaConfig = DEFAULT_MEDIA, records_experts: bool = False
    ) -> ModelFolder:
        """Read the facts from the folder.

        Args:
            path: The folder.
            media: Preprocessing settings of media.
            records_experts: Whether servers record the experts of each token.
        Raises:
            ConfigError: The folder is missing, has no language model in safetensors, or has no
                experts to record.
            DamagedTensors: A file of the weights is damaged; the text names it.
        """
        settings = read_model_json(path / "config.json")
        layout = (
            MediaLayout.from_folder(path, media)
            if settings.get("model_type") in MEDIA_MODELS
            else None
        )
        config, text = get_thinker_config(settings), get_text_config(settings)
        empty = {
            name: torch.empty(layout.shape, device="meta")
            for name, layout in read_layouts(path).items()
        }
        if not empty or not {"vocab_size", "hidden_size"} <= text.keys():
            raise ConfigError(
                f"model.path = {path} holds no language model in *.safetensors; engine "
                "'sglang' reads no other format"
            )
        folder = cls(
            path=path,
            shapes={
                name: tuple(part.shape)
                for name, part in folder_tensors(empty.items(), hidden_size=text["hidden_size"])
            },
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            max_context_tokens=text.get("max_position_embeddings", 0),
            num_layers=text.get("num_hidden_layers", 0),
            has_tied_head=bool(
                text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
            ),
            layout=layout,
            extractor=_extractor(path) if isinstance(layout, OmniLayout) else None,
        )
        return folder._with_experts(config) if records_experts else folder

    def _with_experts(self, config: Mapping[str, Any]) -> ModelFolder:
        mixture, layers = (
            read_expert_counts(config),
            sorted(int(match[1]) for name in self.shapes if (match := ROUTER.match(name))),
        )
        if mixture is None or not layers:
            raise ConfigError(
                "model.routing_replay needs a mixture of experts that engine 'sglang' supports, "
                f"but the model in {self.path} is not one; set model.routing_replay = 'none'"
            )
        num_experts, top_k = mixture
        return replace(
            self, experts=ExpertShape(len(layers), top_k, num_experts), expert_layers=tuple(layers)
        )

    def decode_experts(self, data: str) -> NDArray[np.generic]:
        """Decode the experts that a server returns for each token: [tokens, layers with experts,
        top_k].
        """
        assert self.experts is not None, "called for a folder without recorded experts"
        all_layers = np.frombuffer(b64decode(data), "<i4").reshape(
            -1, self.num_layers, self.experts.top_k
        )
        return self.experts.compact(all_layers[:, self.expert_layers])

    def encode_experts(self, chosen: NDArray[np.generic]) -> str:
        """Encode the experts of each token as a server does; layers without experts have zeros."""
        assert self.experts is not None, "called for a folder without recorded experts"
        all_layers = np.zeros((len(chosen), self.num_layers, self.experts.top_k), "<i4")
        all_layers[:, self.expert_layers] = chosen
        return b64encode(all_layers.data).decode()

    @property
    def max_expert_bytes_per_token(self) -> int:
        """Maximum bytes per token of a server's encoded experts; 0 if they are not recorded."""
        return (
            0
            if self.experts is None
            else 4 * ceil(np.dtype("<i4").itemsize * self.num_layers * self.experts.top_k / 3)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Load the folder's weights, by the names in `shapes`."""
        stored = StoredTensors.from_folder(self.path)
        return dict(folder_tensors(stored.items(), hidden_size=self.hidden_size))

    def match_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return other weights of this model under the tensor names of its folder.

        A server ignores unknown and missing names, and a wrong shape can crash it, so all three are
        checked here.

        Args:
            tensors: Tensors by Hugging Face name; experts may be fused or separate.
        Raises:
            WeightsError: A tensor is missing, unknown or of another shape; the text names it.
        """
        parts = {
            name: part
            for fused, tensor in tensors.items()
            for name, part in split_experts(fused, tensor)
        }
        if self.has_tied_head and "lm_head.weight" not in self.shapes:
            parts.pop("lm_head.weight", None)
        if unknown := sorted(parts.keys() - self.shapes.keys()):
            raise WeightsError(
                f"the model has no tensor {unknown[0]} ({len(unknown)} unknown in all); {REMEDY}"
            )
        if missing := sorted(self.shapes.keys() - parts.keys()):
            raise WeightsError(
                f"the weights lack {missing[0]} ({len(missing)} missing in all); {REMEDY}"
            )
        for name, tensor in parts.items():
            if tuple(tensor.shape) != self.shapes[name]:
                raise WeightsError(
                    f"{name} must be {self.shapes[name]} as in the model, got {tuple(tensor.shape)}"
                )
        return parts

    def write_version(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write a folder that a server can load or start from, and return it.

        Args:
            tensors: The result of `match_tensors`.
            folder: The folder to create; it must not exist.
        Raises:
            WeightsError: There is no space, or no permission to write.
        """
        try:
            folder.mkdir(parents=True)
            for file in self.path.iterdir():
                if ".safetensors" not in file.name:
                    (folder / file.name).symlink_to(file.resolve())
            files = [
                lay_out_file({name: tensors[name] for name in names})
                for names in split_into_files(tensors, max_file_bytes=MAX_FILE_BYTES)
            ]
            write_weight_files(folder, files, tensors.__getitem__, is_lasting=False)
        except OSError as error:
            raise WeightsError(
                f"weights can't be written to {folder} for the server: {error}; free space, or "
                "set engine.sglang.weights_directory"
            ) from error
        return folder


def find_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a non-finite value, which would crash a server.

    A value that is not finite is the largest or the smallest one: both are found in one pass,
    without a tensor of truth values.
    """
    return next(
        (
            name
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor)
        ),
        None,
    )


def _is_finite(tensor: Tensor) -> bool:
    if tensor.element_size() == 1:  # torch compares no 8-bit floats
        return bool(torch.isfinite(tensor.to(torch.bfloat16)).all())
    smallest, largest = torch.aminmax(tensor)
    return bool(torch.isfinite(smallest)) and bool(torch.isfinite(largest))


def split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors that a transformers tensor contains: one per expert if it is
    fused.
    """
    if (match := FUSED_EXPERTS.match(name)) is None or tensor.ndim != 3:
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        parts = (
            zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            if match[2] == "gate_up_proj"
            else [("down_proj", matrix)]
        )
        yield from ((f"{match[1]}.{expert}.{part}.weight", values) for part, values in parts)


def folder_tensors(
    named: Iterable[tuple[str, Tensor]], *, hidden_size: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's folder under the trainer's names: one per expert, a thinker's
    without prefix.

    Args:
        named: Name and tensor, as in the folder.
        hidden_size: Width of the decoder.
    """
    for name, tensor in named:
        if (part := OMNI_PART.match(name)) is not None and part[0] != THINKER:
            continue
        yield from split_experts(
            name.removeprefix(THINKER),
            to_transformers_layout(name, tensor, hidden_size=hidden_size),
        )


def to_transformers_layout(name: str, tensor: Tensor, *, hidden_size: int) -> Tensor:
    """Transpose fused experts to transformers' layout, if their shape shows that they are published
    transposed (Qwen3-VL).

    Source: `Transpose(check_dims=True)` in the conversions of transformers.
    """
    if (match := FUSED_EXPERTS.match(name)) is None or tensor.ndim != 3:
        return tensor
    is_transposed = tensor.shape[2 if match[2] == "gate_up_proj" else 1] != hidden_size
    return tensor.transpose(1, 2) if is_transposed else tensor


def _extractor(path: Path) -> Any:
    """Load the audio feature extractor, and check that the folder names the audio placeholder,
    which SGLang's processor reads.
    """
    settings = read_model_json(path / "tokenizer_config.json")
    special = settings.get("extra_special_tokens")
    if "audio_token" not in settings | (special if isinstance(special, dict) else {}):
        raise ConfigError(
            f"{path / 'tokenizer_config.json'} has no audio_token, which SGLang needs; use the "
            "model's folder as it was published, or delete a tiny one, so that it is created again"
        )
    return load_feature_extractor(path)
