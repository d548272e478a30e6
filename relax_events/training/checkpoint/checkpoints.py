"""Writes and reads the trainer's checkpoints in the object store, when they are due and in parallel
to the next steps.

Each rank writes its shard on its own thread, from a copy. Rank 0 writes the manifest once every
rank's shard is acknowledged; the manifest makes the checkpoint valid:

    checkpoints/<policy version>/<save id>/shard-<rank>-of-<ranks>.safetensors
    checkpoints/<policy version>/<save id>/manifest.json

A save never overwrites an earlier one, so a crash leaves older checkpoints intact. The ranks agree
in `poll` that all shards are written, rather than on the threads, so that no collective runs
concurrently with the trainer's own.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
from blake3 import blake3
from torch import Tensor

from relax_events.config.training import TrainerConfig
from relax_events.errors import ObjectError
from relax_events.events.parts import CheckpointRef, ObjectRef
from relax_events.objects import ObjectStore
from relax_events.runtime.failpoints import failpoint
from relax_events.training.backend.state import TrainerState
from relax_events.training.checkpoint.pending import MANIFEST, PendingCheckpoint
from relax_events.training.checkpoint.stored_state import (
    MismatchedShards,
    StoredState,
    describe_piece,
    piece_key,
)
from relax_events.training.ranks import Ranks
from relax_events.weights.file_content import FileContent

log = structlog.get_logger()
PREFIX = "checkpoints/"
FORMAT = 1
"""Every tensor is whole, in one of the shards."""
SHARDED_FORMAT = 2
"""Some tensors are in pieces, which their shards' entries in the manifest list."""


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """A checkpoint that was read and verified; `extra` is the caller's value from saving."""

    reference: CheckpointRef
    state: StoredState
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. `save`, `load_newest` and `PendingCheckpoint` are collective,
    `load` and `prune` are not.
    """

    def __init__(
        self, store: ObjectStore, *, ranks: Ranks, keep: int, folder: str = PREFIX
    ) -> None:
        """Start the writer's thread.

        Args:
            store: The run's object store.
            ranks: All ranks of the trainer.
            keep: How many of the newest checkpoints `prune` leaves, at least 1.
            folder: Key prefix in the store, ending in a slash.
        """
        self._store = store
        self._ranks = ranks
        self._keep = max(1, keep)
        self._prefix = folder
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._last: Future[dict[str, Any]] | None = None
        self._last_weights: tuple[int, list[str]] | None = None

    def save(self, state: TrainerState, *, extra: Mapping[str, Any]) -> PendingCheckpoint:
        """Copy this rank's share of the tensors, and write it in the background; returns once the
        copy is made.

        Collective. The tensors may change as soon as it returns.

        Args:
            state: What this rank holds; whole tensors are the same on all ranks.
            extra: Anything that JSON can hold, such as offsets; rank 0's is kept.
        """
        save_id = self._ranks.broadcast(
            secrets.token_hex(4).encode() if self._ranks.rank == 0 else None
        ).decode()
        folder = f"{self._prefix}{state.policy_version:08d}/{save_id}/"
        share = _assign_tensors(state.tensors, rank=self._ranks.rank, size=self._ranks.size)
        pieces = [shard for shard in state.shards if shard.tensor.numel()]
        mine = {name: state.tensors[name] for name in share}
        mine |= {piece_key(shard.name, shard.offset): shard.tensor for shard in pieces}
        file, described = FileContent.of(mine), [describe_piece(shard) for shard in pieces]
        key = f"{folder}shard-{self._ranks.rank:05d}-of-{self._ranks.size:05d}.safetensors"
        written = self._last = self._writer.submit(self._write_shard, key, file, described)
        header = {
            "format": SHARDED_FORMAT if state.shards else FORMAT,
            "policy_version": state.policy_version,
            "tensors": sorted(state.tensors),
            "extra": dict(extra),
        }
        return PendingCheckpoint(
            self._store,
            ranks=self._ranks,
            folder=folder,
            header=header,
            written=written,
            check=self._compare_with_last,
        )

    def _compare_with_last(self, manifest: Mapping[str, Any]) -> None:
        """Warn where two successive checkpoints of different versions have the same weights: the
        trainer may be saving a copy that no longer follows the model. Rank 0 only.
        """
        version = manifest["policy_version"]
        weights = [shard["weights"] for shard in manifest["shards"]]
        if self._last_weights is not None and weights == self._last_weights[1]:
            log.warning(
                "checkpoint.weights_unchanged",
                policy_version=version,
                previous_version=self._last_weights[0],
            )
        self._last_weights = (version, weights)

    def _write_shard(
        self, key: str, file: FileContent, pieces: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Write this rank's shard, and return the manifest's entry of it."""
        failpoint("checkpoint.before_shard")
        reference: ObjectRef = self._store.put_at(key, file.content)
        return {
            "uri": reference.uri,
            "digest": reference.digest.hex(),
            "num_bytes": reference.num_bytes,
            "weights": _digest_weights(file),
            "pieces": pieces,
        }

    def load(self, reference: CheckpointRef) -> RestoredCheckpoint:
        """Open a checkpoint, whatever the number of ranks that wrote it, and verify every byte. Its
        tensors are read from mapped files when they are asked for.

        Raises:
            ObjectError: An object is missing, incomplete or altered; the text names it.
        """
        manifest = read_manifest(self._store, reference)
        shards = shard_references(manifest)
        with tempfile.TemporaryDirectory(prefix="relax-checkpoint-") as folder:
            try:
                state = StoredState(self._store, manifest, shards, folder=Path(folder))
            except MismatchedShards as error:
                raise ObjectError(
                    f"checkpoint {reference.uri}: {error}; restore from another checkpoint"
                ) from error
        return RestoredCheckpoint(reference, state, manifest["extra"])

    def load_newest(self, references: Sequence[CheckpointRef]) -> RestoredCheckpoint | None:
        """Read the newest checkpoint that every rank can read; collective. Others are
        skipped with a log event.

        Args:
            references: Newest first.
        Returns:
            None where the store has no checkpoint.
        Raises:
            StoreUnavailable: The store does not answer.
        """
        for reference in references:
            restored, problem = None, ""
            try:
                restored = self.load(reference)
            except ObjectError as error:
                problem = str(error)
            problems = {
                rank: text.decode()
                for rank, text in enumerate(self._ranks.all_gather_bytes(problem.encode()))
                if text
            }
            if restored is not None and not problems:
                return restored
            log.error(
                "checkpoint.read_failed",
                uri=reference.uri,
                policy_version=reference.policy_version,
                errors=problems,
            )
        return None

    def prune(self, committed: CheckpointRef) -> int:
        """Delete checkpoints older than the newest ones; return the number of deleted objects. Rank
        0 only.

        Args:
            committed: The newest checkpoint on the log. It and the newest older ones are kept;
                newer ones too, since their records may not be committed yet. Incomplete saves at or
                below its version are deleted.
        """
        committed_folder = self._store.key(committed.uri).removesuffix(MANIFEST)
        folders: dict[str, list[str]] = {}
        for key in self._store.list(self._prefix):
            folders.setdefault(key.rpartition("/")[0] + "/", []).append(key)
        old = [
            folder
            for folder in folders
            if folder != committed_folder and self._version(folder) <= committed.policy_version
        ]
        complete = sorted(
            (folder for folder in old if f"{folder}{MANIFEST}" in folders[folder]),
            key=self._version,
            reverse=True,
        )
        kept = set(complete[: self._keep - 1])
        to_delete = sorted(
            (key for folder in old if folder not in kept for key in folders[folder]),
            key=lambda key: not key.endswith(MANIFEST),
        )
        if to_delete:
            self._store.delete(to_delete)
        for folder in self._store.list_folders(self._prefix):
            if self._version(folder) <= committed.policy_version:
                self._store.delete_unfinished(folder)
        return len(to_delete)

    def _version(self, folder: str) -> int:
        return int(folder.removeprefix(self._prefix).partition("/")[0])

    def close(self, *, timeout_seconds: float = 60.0) -> None:
        """Wait for pending writes until the deadline; a checkpoint that is incomplete by then never
        becomes valid.

        Args:
            timeout_seconds: How long to wait.
        """
        if self._last is not None:
            wait_for([self._last], timeout=timeout_seconds)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_manifest(store: ObjectStore, reference: CheckpointRef) -> dict[str, Any]:
    """Read a checkpoint's manifest and verify it.

    Raises:
        ObjectError: It is missing or altered, or of another format; the text names it.
    """
    data = store.get_at(store.key(reference.uri))
    if (seen := sha256(data).digest()) != reference.digest:
        raise ObjectError(
            f"checkpoint manifest {reference.uri} was altered: SHA-256 must be "
            f"{reference.digest.hex()}, got {seen.hex()}; restore from another checkpoint"
        )
    manifest: dict[str, Any] = json.loads(data)
    if (
        manifest["format"] not in (FORMAT, SHARDED_FORMAT)
        or manifest["policy_version"] != reference.policy_version
    ):
        raise ObjectError(
            f"checkpoint manifest {reference.uri} must be of format {FORMAT} or "
            f"{SHARDED_FORMAT} and version {reference.policy_version}, "
            f"got {manifest['format']} and {manifest['policy_version']}"
        )
    return manifest


def shard_references(manifest: Mapping[str, Any]) -> list[ObjectRef]:
    """Return the objects of a manifest's shards."""
    return [
        ObjectRef(shard["uri"], bytes.fromhex(shard["digest"]), shard["num_bytes"])
        for shard in manifest["shards"]
    ]


def _assign_tensors(tensors: Mapping[str, Tensor], *, rank: int, size: int) -> list[str]:
    """Return the names of this rank's tensors: largest first, each assigned to the rank with the
    fewest bytes.
    """
    loads, mine = [0] * size, []
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += tensors[name].nbytes
        if lightest == rank:
            mine.append(name)
    return mine


def _digest_weights(file: FileContent) -> str:
    """Return a digest of the weights alone, by which two checkpoints are compared."""
    digest = blake3(max_threads=blake3.AUTO)
    for name in sorted(name for name in file.spans if name.startswith("model.")):
        digest.update(name.encode())
        digest.update(file.content[file.spans[name]])
    return digest.hexdigest()


class CheckpointSchedule:
    """Starts one checkpoint at a time, and knows the newest one that is written."""

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks, config: TrainerConfig) -> None:
        self._checkpoints, self._ranks, self._config = checkpoints, ranks, config
        self._pending: PendingCheckpoint | None = None
        self._started_at = time.monotonic()
        self.written: CheckpointRef | None = None
        """The newest written checkpoint, which the next step's record names."""

    def restart_clock(self) -> None:
        """Count the time to the next checkpoint from now."""
        self._started_at = time.monotonic()

    def poll(self) -> None:
        """Take note of a checkpoint that has been written."""
        if self._pending is not None and (reference := self._pending.poll()) is not None:
            self._pending, self.written = None, reference
            log.info("checkpoint.written", policy_version=reference.policy_version)

    def start_if_due(self, policy_version: int, save: Callable[[], PendingCheckpoint]) -> None:
        """Start a checkpoint with `save` when one is due and none is being written. It becomes real
        when a later step's record names it. Collective.
        """
        if self._pending is not None or not self._is_due(policy_version):
            return
        self._started_at = time.monotonic()
        self._pending = save()

    def _is_due(self, version: int) -> bool:
        """Return whether a checkpoint is due by steps, or by rank 0's clock; all ranks get the same
        answer.
        """
        seconds = time.monotonic() - self._started_at
        is_due = self._config.checkpoint_is_due(version, seconds=seconds)
        if self._ranks.size == 1:
            return is_due
        return self._ranks.broadcast(bytes([is_due]) if self._ranks.rank == 0 else None) == bytes(
            [True]
        )
