"""Which models servers are sent media for: those that were held beside the trainer, each with all
that it reads (`tests/engines`).

Weights as a server reads them: names and shapes of a model's folder, and a folder of the same form
    for every further policy version.
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
import orjson
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_events.config import MediaConfig
from relax_events.errors import ConfigError, WeightsError
from relax_events.events.routed_experts import ExpertShape
from relax_events.media.token_layout import MediaLayout, OmniLayout
from relax_events.media.towers import extractor_of
from relax_events.model_folder import mixture_of, read_settings, text_of, thinker_of
from relax_events.weights.artifact_writer import file_shares

SEEING = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe")
"""As `config.json` names them; they read pictures and clips, and the last two hear as well."""
ON_GPUS = (
    "whose linear attention SGLang computes by kernels for GPUs, where nobody has held it beside "
    "the trainer"
)
UNSEEN = {"qwen3_5": ON_GPUS, "qwen3_5_moe": ON_GPUS}
"""Why families that read media are not among them."""


FUSED_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)$")
"""All experts of a layer in one tensor, as transformers keeps them; a checkpoint has them one by
one, or turned."""
WHOLE, THINKER = re.compile(r"(thinker|talker|code2wav)\."), "thinker."
"""Parts of a whole Qwen3-Omni; its thinker is the model, which other folders hold alone."""
ROUTER = re.compile(r".*layers\.(\d+)\.mlp\.gate\.weight$")
HEADER_LENGTH_BYTES = 8
MAX_FILE_BYTES = 1024**3
AS_PUBLISHED = MediaConfig()
REMEDY = "publish weights of the model in model.path"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder, as far as it is known without loading it.

    Attributes:
        path: Hugging Face layout.
        shapes: Of every tensor, by its name in the folder, experts one by one, a thinker's as if it
            were there alone.
        hidden_size: Width of the decoder.
        vocab_size: Token ids lie below this.
        max_context_tokens: That the model was made for.
        num_layers: Of its decoder.
        has_tied_head: Whether the output layer has no weights of its own.
        layout: How media stand among the tokens; None where servers are sent text alone for the
            model.
        extractor: Makes the spectra of what it hears.
        experts: Those whose choice is recorded; None where it is not.
        expert_layers: Which layers have experts.
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
        cls, path: Path, *, media: MediaConfig = AS_PUBLISHED, records_experts: bool = False
    ) -> ModelFolder:
        """Read what the folder says of itself.

        Args:
            path: Of the folder.
            media: How media are shown to the model.
            records_experts: Whether its servers are to tell which experts each token goes through.
        Raises:
            ConfigError: It is missing, holds no language model in safetensors, or no experts where
                these are to be recorded.
        """
        settings = read_settings(path / "config.json")
        layout = (
            MediaLayout.from_folder(path, media) if settings.get("model_type") in SEEING else None
        )
        config, text = thinker_of(settings), text_of(settings)
        empty = {
            name: torch.empty(shape, device="meta")
            for file in sorted(path.glob("*.safetensors"))
            for name, shape in _header(file)
        }
        if not empty or not {"vocab_size", "hidden_size"} <= text.keys():
            raise ConfigError(
                f"model.path = {path} holds no language model in *.safetensors; engine "
                "'sglang' reads no other form"
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
        return folder._recording(config) if records_experts else folder

    def _recording(self, config: Mapping[str, Any]) -> ModelFolder:
        mixture, layers = (
            mixture_of(config),
            sorted(int(found[1]) for name in self.shapes if (found := ROUTER.match(name))),
        )
        if mixture is None or not layers:
            rule = (
                "the experts of a mixture that engine 'sglang' knows, and the model in "
                f"{self.path} has none"
            )
            raise ConfigError(
                f"model.routing_replay replays {rule}; set model.routing_replay = 'none'"
            )
        num_experts, top_k = mixture
        return replace(
            self, experts=ExpertShape(len(layers), top_k, num_experts), expert_layers=tuple(layers)
        )

    def chosen_experts(self, data: str) -> NDArray[np.generic]:
        """Read what a server tells of each token: [tokens, layers with experts, top_k]."""
        assert self.experts is not None, "asked of a folder that records no experts"
        of_all_layers = np.frombuffer(b64decode(data), "<i4").reshape(
            -1, self.num_layers, self.experts.top_k
        )
        return self.experts.compact(of_all_layers[:, self.expert_layers])

    def told_experts(self, chosen: NDArray[np.generic]) -> str:
        """Write what a server tells of each token, as `chosen_experts` reads it; layers without
        experts have zeros.
        """
        assert self.experts is not None, "asked of a folder that records no experts"
        of_all_layers = np.zeros((len(chosen), self.num_layers, self.experts.top_k), "<i4")
        of_all_layers[:, self.expert_layers] = chosen
        return b64encode(of_all_layers.data).decode()

    @property
    def told_expert_bytes(self) -> int:
        """What a token takes at most in what a server tells of the experts; 0 where they are not
        recorded.
        """
        return (
            0
            if self.experts is None
            else 4 * ceil(np.dtype("<i4").itemsize * self.num_layers * self.experts.top_k / 3)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Load the folder's own weights, by the names of `shapes`."""
        files = (
            safetensors.torch.load_file(file) for file in sorted(self.path.glob("*.safetensors"))
        )
        return dict(
            folder_tensors(
                (pair for file in files for pair in file.items()), hidden_size=self.hidden_size
            )
        )

    def fitted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give other weights of this model under the names that its folder has.

        A server takes names that it doesn't know and does without those that are missing, and a
        wrong shape can end it: so all three are found out here.

        Args:
            tensors: By Hugging Face name, experts in one tensor or one by one.
        Raises:
            WeightsError: A tensor is missing, unknown or of another shape; the text names it.
        """
        given = {
            name: part
            for whole, tensor in tensors.items()
            for name, part in single_tensors(whole, tensor)
        }
        if self.has_tied_head and "lm_head.weight" not in self.shapes:
            given.pop("lm_head.weight", None)
        if unknown := sorted(given.keys() - self.shapes.keys()):
            raise WeightsError(
                f"the model has no tensor {unknown[0]} ({len(unknown)} unknown in all); {REMEDY}"
            )
        if missing := sorted(self.shapes.keys() - given.keys()):
            raise WeightsError(
                f"the weights lack {missing[0]} ({len(missing)} missing in all); {REMEDY}"
            )
        for name, tensor in given.items():
            if tuple(tensor.shape) != self.shapes[name]:
                raise WeightsError(
                    f"{name} must be {self.shapes[name]} as in the model, got {tuple(tensor.shape)}"
                )
        return given

    def write_version(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write a folder that a server can load these weights from, or be started on, and return
        it.

        Args:
            tensors: As `fitted` gives them.
            folder: Is made; must not be there.
        Raises:
            WeightsError: There is no room, or no right to write.
        """
        try:
            folder.mkdir(parents=True)
            for file in self.path.iterdir():
                if ".safetensors" not in file.name:
                    (folder / file.name).symlink_to(file.resolve())
            files: dict[str, str] = {}
            for number, names in enumerate(file_shares(tensors, max_file_bytes=MAX_FILE_BYTES)):
                own = {
                    name: tensors[name].clone(memory_format=torch.contiguous_format)
                    for name in names
                }
                safetensors.torch.save_file(
                    own,
                    folder / (file_name := f"model-{number:05}.safetensors"),
                    metadata={"format": "pt"},
                )
                files |= dict.fromkeys(names, file_name)
            (folder / "model.safetensors.index.json").write_bytes(
                orjson.dumps({"metadata": {}, "weight_map": files})
            )
        except (OSError, safetensors.SafetensorError) as error:
            remedy = "make room, or set engine.sglang.weights_directory"
            raise WeightsError(
                f"weights can't be written to {folder} for the server: {error}; {remedy}"
            ) from error
        return folder


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name the first tensor with a value that is no finite number; a server that computes with one
    dies of it.
    """
    return next(
        (
            name
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
        ),
        None,
    )


def single_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Give the tensors of a checkpoint that one of transformers' holds."""
    if (found := FUSED_EXPERTS.match(name)) is None or tensor.ndim != 3:
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        parts = (
            zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            if found[2] == "gate_up_proj"
            else [("down_proj", matrix)]
        )
        yield from ((f"{found[1]}.{expert}.{part}.weight", values) for part, values in parts)


def folder_tensors(
    named: Iterable[tuple[str, Tensor]], *, hidden_size: int
) -> Iterator[tuple[str, Tensor]]:
    """Give the tensors of a model's folder as a trainer means them: experts one by one, a thinker's
    as if it were there alone.

    Args:
        named: As they lie there.
        hidden_size: Of the decoder.
    """
    for name, tensor in named:
        if (part := WHOLE.match(name)) is not None and part[0] != THINKER:
            continue
        yield from single_tensors(
            name.removeprefix(THINKER), as_kept(name, tensor, hidden_size=hidden_size)
        )


def as_kept(name: str, tensor: Tensor, *, hidden_size: int) -> Tensor:
    """Turn fused experts of a folder as transformers keeps them: Qwen3-VL is published with them
    turned, and shapes tell.

    Source: `Transpose(check_dims=True)` in the conversions of transformers.
    """
    if (found := FUSED_EXPERTS.match(name)) is None or tensor.ndim != 3:
        return tensor
    is_turned = tensor.shape[2 if found[2] == "gate_up_proj" else 1] != hidden_size
    return tensor.transpose(1, 2) if is_turned else tensor


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Read names and shapes off the begin of a safetensors file."""
    with file.open("rb") as data:
        num_bytes = int.from_bytes(data.read(HEADER_LENGTH_BYTES), "little")
        header: dict[str, Any] = orjson.loads(data.read(num_bytes))
    return (
        (name, tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"
    )


def _extractor(path: Path) -> Any:
    """Load what makes spectra of sounds, once the folder names what stands in for them: SGLang's
    processor asks for the name.
    """
    settings = read_settings(path / "tokenizer_config.json")
    more = settings.get("extra_special_tokens")
    if "audio_token" not in settings | (more if isinstance(more, dict) else {}):
        remedy = (
            "take the model's folder as it was published, or delete a tiny one, so that it is "
            "made anew"
        )
        raise ConfigError(
            f"{path / 'tokenizer_config.json'} names no audio_token, which SGLang asks for; "
            f"{remedy}"
        )
    return extractor_of(path)
