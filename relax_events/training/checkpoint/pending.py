"""Completes a checkpoint after its copy: the ranks agree that all shards are written, and rank 0
writes the manifest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from hashlib import sha256
from typing import Any

import numpy as np

from relax_events.errors import ObjectError, RunFailed, StoreUnavailable
from relax_events.events.parts import CheckpointRef
from relax_events.objects import ObjectStore
from relax_events.runtime.failpoints import failpoint
from relax_events.training.ranks import Ranks

MANIFEST = "manifest.json"
RUNNING, WRITTEN, FAILED = 0, 1, 2


class PendingCheckpoint:
    """A checkpoint that is being written. `poll` and `wait` are collective; it is valid once they
    return its reference.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        ranks: Ranks,
        folder: str,
        header: dict[str, Any],
        written: Future[dict[str, Any]],
        check: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Made by `Checkpoints.save`; `written` gives the manifest's entry of this rank's shard."""
        self._check = check
        self._store = store
        self._ranks = ranks
        self._folder = folder
        self._header = header
        self._written = written
        self._reference: CheckpointRef | None = None

    @property
    def is_written_here(self) -> bool:
        """Whether this rank's shard is written, or has failed. Not collective."""
        return self._written.done()

    def poll(self) -> CheckpointRef | None:
        """Return the checkpoint's reference if every rank has written its shard, else None, without
        waiting for a write.

        Raises:
            ObjectError: A rank could not write its shard; raised on all, with its text.
        """
        if self._reference is not None:
            return self._reference
        states = self._ranks.all_gather(np.array([_state(self._written)], np.int64))[:, 0]
        if (states == FAILED).any():
            self._raise_failure()
        if (states == WRITTEN).all():
            self._reference = self._finish()
        return self._reference

    def wait(self, timeout_seconds: float) -> CheckpointRef:
        """Wait until every rank has written its shard.

        Args:
            timeout_seconds: Deadline.
        Raises:
            ObjectError: A rank could not write its shard.
            RunFailed: The deadline passed on a rank.
        """
        started = time.monotonic()
        wait_for([self._written], timeout=timeout_seconds)
        if (reference := self.poll()) is None:
            seconds = time.monotonic() - started
            raise RunFailed(
                f"checkpoint {self._folder} was not written on every rank after "
                f"{seconds:.1f} s; is the object store slow or full?"
            )
        return reference

    def _raise_failure(self) -> None:
        error = self._written.exception() if _state(self._written) == FAILED else None
        text = f"rank {self._ranks.rank}: {error}" if error else ""
        texts = [other.decode() for other in self._ranks.all_gather_bytes(text.encode()) if other]
        raise ObjectError(
            f"checkpoint {self._folder} was not written: {'; '.join(texts)}"
        ) from error

    def _finish(self) -> CheckpointRef:
        """Gather the shards' digests on rank 0, which writes the manifest and broadcasts its
        reference.
        """
        mine = json.dumps(self._written.result())
        shards = [json.loads(text) for text in self._ranks.all_gather_bytes(mine.encode())]
        manifest = b""
        if self._ranks.rank == 0:
            content = self._header | {"shards": shards}
            self._check(content)
            manifest = json.dumps(content, indent=1).encode()
        problem = self._write_manifest(manifest)
        if text := self._ranks.broadcast(
            problem.encode() if self._ranks.rank == 0 else None
        ).decode():
            raise ObjectError(f"checkpoint {self._folder}: the manifest was not written: {text}")
        digest = self._ranks.broadcast(sha256(manifest).digest() if self._ranks.rank == 0 else None)
        return CheckpointRef(
            self._header["policy_version"], self._store.uri(self._folder + MANIFEST), digest
        )

    def _write_manifest(self, manifest: bytes) -> str:
        """Write the manifest on rank 0; return the error text for the other ranks, or an empty
        text.
        """
        try:
            if self._ranks.rank == 0:
                failpoint("checkpoint.before_manifest")
                self._store.put_at(self._folder + MANIFEST, manifest)
        except (ObjectError, StoreUnavailable) as error:
            return str(error) or type(error).__name__
        return ""


def _state(written: Future[dict[str, Any]]) -> int:
    if not written.done():
        return RUNNING
    return FAILED if written.cancelled() or written.exception() else WRITTEN
