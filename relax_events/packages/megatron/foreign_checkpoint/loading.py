"""Loads a foreign distributed checkpoint into a model of megatron-core.

megatron-core and torch unpickle three kinds of bytes in it: `.metadata`, `common.pt`, and entries
that are no tensors. None of them is left to the libraries: the metadata goes through `metadata.py`,
a conversion needs nothing of `common.pt`, and entries that are no tensors are not read. Tensors
are read by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Never, cast

import orjson
from megatron.core.dist_checkpointing import load
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from relax_events.api.errors import ConfigError
from relax_events.packages.megatron.foreign_checkpoint.metadata import read_metadata
from relax_events.regular_files import read_regular_text

CONFIG_FILE = "metadata.json"
MAX_CONFIG_BYTES = 1 << 20
FORMAT = {"sharded_backend": "torch_dist", "common_backend": "torch"}


def load_foreign_checkpoint(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load the tensors of a distributed checkpoint, as megatron-core's `load` does.

    Args:
        state: megatron-core's sharded state of the model.
        folder: The checkpoint's folder.
    Returns:
        The state with the tensors of the checkpoint.
    Raises:
        ConfigError: The folder holds a link or a special file, a file of another format, or
            entries that would run code or lie outside of their file.
    """
    _check_folder(folder)
    _check_format(folder / CONFIG_FILE)
    strategy = _TensorsOnly(read_metadata(folder))
    _, tensors = extract_matching_values(state, lambda value: isinstance(value, ShardedObject))
    loaded: dict[str, Any] = load(
        tensors, str(folder), sharded_strategy=strategy, common_strategy=_NoCommonState()
    )
    return loaded


def _check_folder(folder: Path) -> None:
    """Refuse links and special files, which lead out of the folder or never end."""
    for path in sorted(folder.iterdir()):
        mode = os.lstat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(
                f"{path} is a link or a special file, and a distributed checkpoint holds only "
                "files; copy the checkpoint with its files"
            )


def _check_format(path: Path) -> None:
    """Refuse the formats whose loaders unpickle, such as zarr's."""
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes; copy the checkpoint")
    try:
        config = orjson.loads(read_regular_text(path))
        written = {key: config[key] for key in FORMAT}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} can't be read ({type(error).__name__}: {error}); copy the checkpoint again"
        ) from error
    if written != FORMAT:
        raise ConfigError(
            f"{path} says {written}, and only checkpoints with {FORMAT} are read; convert it by "
            "megatron-core first"
        )


class _NoCommonState(TorchCommonLoadStrategy):  # type: ignore[misc]  # untyped
    """Leaves `common.pt` unread: options of the training that wrote the checkpoint."""

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        del checkpoint_dir
        return {}

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Never:
        del checkpoint_dir
        raise _other_entry(", ".join(sorted(sharded_objects_state_dict)))


class _TensorsOnly(torch_strategies.TorchDistLoadShardedStrategy):  # type: ignore[misc]  # untyped
    """Loads by torch's reader with checked metadata."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._metadata = metadata

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        readers: list[_TensorReader] = []

        def open_reader(path: Any, cache_metadata: bool = False) -> _TensorReader:
            del cache_metadata  # metadata is read before
            readers.append(_TensorReader(path, self._metadata))
            return readers[-1]

        with _replaced_reader(open_reader):
            loaded = super().load(sharded_state_dict, checkpoint_dir)
        if not readers:
            raise RuntimeError("megatron-core opened the checkpoint by a reader of its own")
        return loaded


@contextmanager
def _replaced_reader(open_reader: Callable[..., FileSystemReader]) -> Iterator[None]:
    """Let megatron-core's strategy open our reader and planner: it has no argument for them."""
    replaced = {"_get_filesystem_reader": open_reader, "MCoreLoadPlanner": _TensorPlanner}
    before = {name: getattr(torch_strategies, name) for name in replaced}
    try:
        for name, value in replaced.items():
            setattr(torch_strategies, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch_strategies, name, value)


class _TensorPlanner(torch_strategies.MCoreLoadPlanner):  # type: ignore[misc]  # untyped
    """Refuses entries that torch would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> Never:
        del value
        raise _other_entry(read_item.storage_index.fqn)


class _TensorReader(FileSystemReader):
    """Reads tensors at file positions that were checked."""

    def __init__(self, path: Any, metadata: Metadata) -> None:
        super().__init__(path)
        self._checked = metadata

    def read_metadata(self) -> Metadata:
        return self._checked

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.storage_index not in self.storage_data:
                raise ConfigError(
                    f"{self.path} lacks the bytes of {item.storage_index}; copy the checkpoint "
                    "again"
                )
        return super().read_data(plan, planner)

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """Return the bytes of an entry; torch calls it before it reads a tensor."""
        if sinfo.offset + sinfo.length > os.fstat(file.fileno()).st_size:
            raise ConfigError(
                f"{self.path}/{sinfo.relative_path} ends before the entry of {sinfo.length} bytes "
                f"at {sinfo.offset}; copy the checkpoint again"
            )
        _check_not_packed(file.fileno(), sinfo)
        return super()._slice_file(file, sinfo)


def _check_not_packed(descriptor: int, sinfo: _StorageInfo) -> None:
    """Refuse an entry that becomes larger in memory than in its file."""
    before = sinfo.offset % mmap.ALLOCATIONGRANULARITY
    start, length = sinfo.offset - before, sinfo.length + before
    try:
        with (
            mmap.mmap(descriptor, length, offset=start, access=mmap.ACCESS_READ) as content,
            zipfile.ZipFile(cast("IO[bytes]", content)) as archive,
        ):
            size = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise ConfigError(
            f"the entry at {sinfo.offset} of {sinfo.relative_path} is no tensor as torch saves it "
            f"({error}); copy the checkpoint again"
        ) from error
    if size > sinfo.length:
        raise ConfigError(
            f"the entry at {sinfo.offset} of {sinfo.relative_path} has {sinfo.length} bytes and "
            f"unpacks to {size}; torch writes tensors unpacked, don't load this checkpoint"
        )


def _other_entry(name: str) -> ConfigError:
    return ConfigError(
        f"entry {name} is no tensor, and only tensors are read because others run code; give a "
        "checkpoint whose weights are tensors"
    )
