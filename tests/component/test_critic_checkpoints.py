"""A critic continues only from complete checkpoints whose history is the log's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog.testing
import torch

from relax_events.objects import ObjectStore
from relax_events.training.backend.state import TrainerState
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.checkpoint.critic_checkpoints import FOLDER, list_critic_checkpoints
from relax_events.training.ranks import SingleRank

DIGESTS = {2: b"two", 4: b"four", 6: b"six"}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(tmp_path.as_uri())


def save(store: ObjectStore, version: int, digest: bytes) -> None:
    extra = {"weights_digest": digest.hex(), "consumed": [[0, 10 * version], [3, version]]}
    with Checkpoints(store, ranks=SingleRank(), keep=9, folder=FOLDER) as checkpoints:
        state = TrainerState(
            policy_version=version, tensors={"model.a": torch.full((2,), float(version))}
        )
        checkpoints.save(state, extra=extra).wait(10.0)


def found(store: ObjectStore, digests: dict[int, bytes] = DIGESTS) -> list[int]:
    return [one.reference.policy_version for one in list_critic_checkpoints(store, digests=digests)]


def test_critic_checkpoints_are_listed_newest_first_with_their_positions(
    store: ObjectStore,
) -> None:
    for version, digest in DIGESTS.items():
        save(store, version, digest)
    assert found(store) == [6, 4, 2]
    newest = next(list_critic_checkpoints(store, digests=DIGESTS))
    assert newest.consumed == {0: 60, 3: 6}
    with Checkpoints(store, ranks=SingleRank(), keep=9, folder=FOLDER) as checkpoints:
        assert checkpoints.load(newest.reference).state.tensors["model.a"].tolist() == [6.0, 6.0]
        assert checkpoints.prune(newest.reference) == 0


def test_critic_checkpoints_are_pruned_separately_from_the_trainers(store: ObjectStore) -> None:
    for version, digest in DIGESTS.items():
        save(store, version, digest)
    with (
        Checkpoints(store, ranks=SingleRank(), keep=1) as trainers,
        Checkpoints(store, ranks=SingleRank(), keep=1, folder=FOLDER) as critics,
    ):
        mine = trainers.save(
            TrainerState(policy_version=1, tensors={"model.a": torch.zeros(1)}), extra={}
        ).wait(10.0)
        assert trainers.prune(mine) == 0
        assert critics.prune(next(list_critic_checkpoints(store, digests=DIGESTS)).reference) == 4
        assert trainers.load(mine).state.policy_version == 1
    assert found(store) == [6]


def test_critic_checkpoint_of_other_step_digests_is_skipped(store: ObjectStore) -> None:
    # Its topics were deleted, and the run began again under the same name with other steps, or has
    # not come so far.
    for version, digest in DIGESTS.items():
        save(store, version, digest)
    assert found(store, {2: b"two", 4: b"other"}) == [2]
    assert found(store, {}) == []


def test_incomplete_critic_checkpoint_is_skipped_and_reported(store: ObjectStore) -> None:
    for version, digest in DIGESTS.items():
        save(store, version, digest)
    shard = next(
        key
        for key in store.list(FOLDER)
        if key.startswith(f"{FOLDER}00000006") and key.endswith(".safetensors")
    )
    store.delete([shard])
    assert found(store) == [4, 2]
    torn = next(
        key
        for key in store.list(FOLDER)
        if key.startswith(f"{FOLDER}00000004") and key.endswith("manifest.json")
    )
    store.delete([torn])
    store.put_at(torn, json.dumps({"policy_version": 4}).encode())
    with structlog.testing.capture_logs() as logged:
        assert found(store) == [2]
    assert [line["event"] for line in logged] == ["critic_checkpoint.rejected"]


def test_no_critic_checkpoint_is_found_before_the_first_save(store: ObjectStore) -> None:
    assert found(store) == []
