"""Reads the weights of a checkpoint tensor by tensor from files of this machine, without the
optimizer's state and for models that are larger than the memory.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from relax_events.errors import ObjectError, WeightsError
from relax_events.events.parts import CheckpointRef
from relax_events.model_folder.tensors import TensorLayout
from relax_events.models.adapters import BASE_DIGEST
from relax_events.objects import ObjectStore
from relax_events.training.checkpoint.checkpoints import read_manifest, shard_references
from relax_events.training.checkpoint.stored_state import StoredState

MODEL = "model."
"""Prefix of the weights' names in a checkpoint."""
WIDE_DTYPES = ("float32", "float64")


class CheckpointTensors:
    """The weights of a checkpoint; implements `Tensors`.

    Trained weights are stored in master precision. Their layout has the dtype that the trainer
    publishes, to which the reader of a tensor converts it.
    """

    def __init__(
        self, store: ObjectStore, reference: CheckpointRef, folder: Path, *, dtype: str
    ) -> None:
        """Copy the checkpoint's shards into a folder.

        Args:
            store: The store that holds it.
            reference: The checkpoint.
            folder: Exists, and stays until the last tensor is read.
            dtype: `model.dtype` of the run.
        Raises:
            WeightsError: An object is missing or altered; the text names it.
            EnvironmentProblem: The folder can't be written.
        """
        try:
            manifest = read_manifest(store, reference)
            shards = shard_references(manifest)
            self._state = StoredState(store, manifest, shards, folder=folder)
        except (ObjectError, WeightsError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"checkpoint {reference.uri} can't be used: {error}") from error
        self.policy_version = reference.policy_version
        self.layouts = {
            name.removeprefix(MODEL): TensorLayout(
                dtype if (stored := self._state.dtype_name(name)) in WIDE_DTYPES else stored, shape
            )
            for name, shape in self._state.shapes.items()
            if name.startswith(MODEL)
        }
        self.base_digest = (
            self._state.read(BASE_DIGEST).numpy().tobytes()
            if BASE_DIGEST in self._state.shapes
            else b""
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor in the precision of the checkpoint; see `Tensors`."""
        return self._state.read(MODEL + name)
