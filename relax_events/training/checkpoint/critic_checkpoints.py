"""Lists the checkpoints of a critic in its object store, and the offsets from which the log is
still needed with them. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

import structlog

from relax_events.errors import ObjectError
from relax_events.events.parts import CheckpointRef
from relax_events.objects import ObjectStore
from relax_events.training.checkpoint.pending import MANIFEST

log = structlog.get_logger()
FOLDER = "critic/checkpoints/"


@dataclass(frozen=True, slots=True)
class CriticCheckpoint:
    """A complete checkpoint. A critic that resumes from it reads advantage.samples from `consumed`
    on, by partition.
    """

    reference: CheckpointRef
    consumed: dict[int, int]


def list_critic_checkpoints(
    store: ObjectStore, *, digests: Mapping[int, bytes]
) -> Iterator[CriticCheckpoint]:
    """Yield the checkpoints that a critic can resume from, newest first. No record names them, so
    their digests are compared with those on the log.

    Incomplete checkpoints are skipped, and so are those of another history, such as an earlier run
    of the same name.

    Args:
        store: The run's.
        digests: The digest of the policy's weights by version, as the log's train steps recorded
            them.
    """
    for key in sorted(_manifest_keys(store), reverse=True):
        try:
            checkpoint = _read(store, key, digests)
        except (ObjectError, ValueError, KeyError) as error:
            log.warning(
                "critic_checkpoint.rejected",
                uri=store.uri(key),
                error=f"{type(error).__name__}: {error}",
            )
        else:
            if checkpoint is not None:
                yield checkpoint


def stored_checkpoint_versions(store: ObjectStore) -> list[int]:
    """Return the versions with a checkpoint, of any history and complete or not, in order."""
    return sorted(
        {int(key.removeprefix(FOLDER).partition("/")[0]) for key in _manifest_keys(store)}
    )


def _manifest_keys(store: ObjectStore) -> list[str]:
    try:
        return [key for key in store.list(FOLDER) if key.endswith(f"/{MANIFEST}")]
    except ObjectError as error:
        log.warning("critic_checkpoints.read_failed", error=str(error))
        return []


def _read(store: ObjectStore, key: str, digests: Mapping[int, bytes]) -> CriticCheckpoint | None:
    data = store.get_at(key)
    manifest = json.loads(data)
    version, extra = int(manifest["policy_version"]), manifest["extra"]
    is_ours = digests.get(version) == bytes.fromhex(extra["weights_digest"])
    if not is_ours or not all(
        store.exists(store.key(shard["uri"])) for shard in manifest["shards"]
    ):
        return None
    return CriticCheckpoint(
        CheckpointRef(version, store.uri(key), sha256(data).digest()), dict(extra["consumed"])
    )
