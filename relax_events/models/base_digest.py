"""The digest of a base model's folder, by which adapters name the model that they were trained on.

Imports no torch.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from relax_events.errors import ConfigError, WeightsError
from relax_events.model_folder.tensors import list_weight_files

CONFIG_FILE = "config.json"


def compute_base_digest(folder: Path) -> bytes:
    """Return the BLAKE3 digest of a model folder's `config.json` and weights: the files' names,
    sizes and bytes.

    Raises:
        ConfigError: A file can't be read.
    """
    paths = [folder / CONFIG_FILE, *list_weight_files(folder)]
    try:
        return _compute(
            tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
        )
    except OSError as error:
        raise ConfigError(
            f"the base model in {folder} can't be read: {error}; set model.path to its folder"
        ) from error


def require_same_base(theirs: bytes, ours: bytes, *, folder: Path, what: str) -> None:
    """Require that adapters were trained on the base model that is here.

    Args:
        theirs: Digest of the adapters' base model; empty where unknown.
        ours: Digest of the base model here.
        folder: Holds the base model here.
        what: Begins the error's text and names the adapters.
    Raises:
        WeightsError: They were not.
    """
    if theirs and theirs != ours:
        raise WeightsError(
            f"{what} a base model with digest {theirs.hex()}, and the one in {folder} has "
            f"{ours.hex()}; put the trainer's base model there"
        )


@lru_cache(maxsize=4)
def _compute(files: tuple[tuple[Path, int, int], ...]) -> bytes:
    digest = blake3(max_threads=blake3.AUTO)
    for path, num_bytes, _ in files:
        digest.update(f"{path.name}\0{num_bytes}\0".encode())
        digest.update_mmap(path)
    return digest.digest()
