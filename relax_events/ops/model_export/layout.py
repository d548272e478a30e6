"""Decides which tensors an exported folder holds and where each comes from: names and shapes only.

The folder has the tensors of the base folder, under the same names. The trainer publishes the
parameters of the model in transformers, which differ from the base folder's tensors in four ways:

    base folder                        published
    thinker.model.norm.weight          model.norm.weight       a thinker's names have no prefix
    ...mlp.experts.3.up_proj.weight    ...mlp.experts.gate_up_proj    experts of a layer are fused
    ...experts.down_proj, transposed   ...experts.down_proj    as Qwen3-VL publishes them
    lm_head.weight, tied               model.embed_tokens.weight      tied tensors are there once

Tensors that the trained model does not have, such as a talker or layers for speculative decoding,
are copied from the base folder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from relax_events.errors import WeightsError
from relax_events.model_folder.tensors import TensorLayout
from relax_events.models.parameters import ModelParameters
from relax_events.weights.artifact_writer import split_by_bytes

OTHER_PARTS = ("talker.", "code2wav.")
"""Parts of a complete Qwen3-Omni checkpoint that are not trained."""
THINKER = "thinker."
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
FUSED_NAMES = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
ROW_PARTS = {"gate_proj": (0, 2), "up_proj": (1, 2), "down_proj": (0, 1)}
REMEDY = "give the run's base model as --base"


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """The part of a published tensor that becomes one tensor of the folder.

    Attributes:
        name: Of the published tensor.
        expert: Index in the first dimension; None for the whole tensor.
        row_part: Which of how many equal parts of the expert's rows.
        is_transposed: Whether the last two dimensions are swapped.
    """

    name: str
    expert: int | None = None
    row_part: tuple[int, int] = (0, 1)
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor of the exported folder; without a source it is the base folder's."""

    name: str
    layout: TensorLayout
    source: TrainedPart | None = None


def plan_tensors(
    base: Mapping[str, TensorLayout],
    trained: Mapping[str, TensorLayout],
    parameters: ModelParameters,
    *,
    dtype: str,
) -> list[ExportedTensor]:
    """Return the tensors of the exported folder, in natural order of their names.

    Args:
        base: The tensors of the base folder.
        trained: The published tensors of the version.
        parameters: Of the model in the base folder.
        dtype: `model.dtype` of the run.
    Raises:
        WeightsError: A tensor is missing, unknown, or of another shape or dtype; the text names it
            and the remedy.
    """
    _require_complete(trained, parameters)
    planned = [
        _plan_tensor(name, base[name], trained, parameters, dtype=dtype)
        for name in sorted(base, key=natural_order)
    ]
    _require_all_used(planned, trained)
    return planned


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in names by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _require_complete(trained: Mapping[str, TensorLayout], parameters: ModelParameters) -> None:
    """Require that every trained parameter was published, and nothing else."""
    names = parameters.shapes.keys() | parameters.tied.keys()
    if unknown := sorted(trained.keys() - names):
        raise WeightsError(
            f"the base model has no parameter {unknown[0]}, which the run published "
            f"({len(unknown)} such in all); {REMEDY}"
        )
    if missing := sorted(parameters.shapes.keys() - trained.keys() - parameters.frozen):
        raise WeightsError(
            f"the run published no {missing[0]}, which the base model has ({len(missing)} such in "
            f"all); {REMEDY}"
        )
    for name, layout in sorted(trained.items()):
        shape = parameters.shapes.get(name, layout.shape)
        if layout.shape != shape:
            raise WeightsError(
                f"{name} must be {list(shape)} as in the base model, the run published "
                f"{list(layout.shape)}; {REMEDY}"
            )


def _plan_tensor(
    name: str,
    layout: TensorLayout,
    trained: Mapping[str, TensorLayout],
    parameters: ModelParameters,
    *,
    dtype: str,
) -> ExportedTensor:
    model_name = name.removeprefix(THINKER)
    if name.startswith(OTHER_PARTS):
        return ExportedTensor(name, layout)
    whole = model_name if model_name in trained else parameters.tied.get(model_name, model_name)
    if whole in trained:
        source = _whole_part(name, layout.shape, whole, trained[whole].shape)
    elif (expert := EXPERT.fullmatch(model_name)) and (
        fused := f"{expert[1]}.{FUSED_NAMES[expert[3]]}"
    ) in trained:
        source = TrainedPart(fused, int(expert[2]), ROW_PARTS[expert[3]])
        _require_expert_fits(name, layout.shape, source, trained[fused].shape)
    else:  # frozen, or no parameter of the trained model
        return ExportedTensor(name, layout)
    published = trained[source.name].dtype
    if published not in (dtype, layout.dtype):
        raise WeightsError(
            f"{name} must be {dtype} as model.dtype or {layout.dtype} as in the base model, the "
            f"run published {published}; {REMEDY}"
        )
    return ExportedTensor(name, TensorLayout(published, layout.shape), source)


def _whole_part(
    name: str, shape: tuple[int, ...], whole: str, published: tuple[int, ...]
) -> TrainedPart:
    if shape == published:
        return TrainedPart(whole)
    if len(shape) == 3 and shape == (published[0], *published[:0:-1]):
        return TrainedPart(whole, is_transposed=True)
    raise _wrong_shape(name, shape, published)


def _require_expert_fits(
    name: str, shape: tuple[int, ...], source: TrainedPart, fused: tuple[int, ...]
) -> None:
    _, num_parts = source.row_part
    expected = (fused[1] // num_parts, *fused[2:]) if len(fused) == 3 else ()
    if shape != expected or source.expert is None or source.expert >= fused[0]:
        raise _wrong_shape(name, shape, fused)


def _wrong_shape(name: str, shape: tuple[int, ...], published: tuple[int, ...]) -> WeightsError:
    return WeightsError(
        f"{name} is {list(shape)} in the base folder, and the run published {list(published)}; "
        f"{REMEDY}"
    )


def _require_all_used(planned: list[ExportedTensor], trained: Mapping[str, TensorLayout]) -> None:
    """Require that the folder holds all of every published tensor."""
    used = Counter(tensor.source.name for tensor in planned if tensor.source)
    parts = Counter(
        tensor.source.name
        for tensor in planned
        if tensor.source and tensor.source.expert is not None
    )
    for name, layout in sorted(trained.items()):
        if name not in used:
            raise WeightsError(
                f"the base folder has no tensor that holds {name} of the trained model, so the "
                "exported folder could not be in its layout; save the base model by transformers, "
                f"and {REMEDY}"
            )
        count = layout.shape[0] * (2 if name.endswith("gate_up_proj") else 1)
        if parts[name] not in (0, count):
            raise WeightsError(
                f"the base folder holds {parts[name]} of the {count} tensors that {name} is made "
                f"of; {REMEDY}"
            )


def split_into_shards(
    tensors: list[ExportedTensor], *, max_shard_bytes: int
) -> Iterator[list[ExportedTensor]]:
    """Split tensors, in order, into files of at most this size; a larger tensor gets a file of its
    own.
    """
    return split_by_bytes(
        tensors, lambda tensor: tensor.layout.num_bytes, max_bytes=max_shard_bytes
    )


def count_trained(tensors: list[ExportedTensor]) -> int:
    """Return how many tensors of the folder hold trained weights."""
    return sum(tensor.source is not None for tensor in tensors)
