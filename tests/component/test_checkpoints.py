"""Checkpoints: round trip, asynchrony, damage, retention; with the ranks of one process run one
after another.
"""

import dataclasses
import json
import threading
from hashlib import sha256

import numpy as np
import pytest
import torch

from relax_events.errors import ObjectError, RunFailed
from relax_events.objects import ObjectStore
from relax_events.training.backend.state import TrainerState
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.checkpoint.checkpoints import Checkpoints, _assign_tensors
from relax_events.training.ranks import SingleRank
from tests.unit.trainer_samples import make_samples, run_config

EXTRA = {"offsets": {"0": 12, "1": 7}, "id_window": ["g0", "g1"]}


def make_state(version=3, fill=1.0):
    tensors = {
        "model.a": torch.full((2, 3), fill),
        "exp_avg.a": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "optimizer.step.0": torch.tensor(4.0),
        "rng.torch": torch.get_rng_state(),
        "model.half": torch.ones(3, dtype=torch.bfloat16),
    }
    return TrainerState(policy_version=version, tensors=tensors)


@pytest.fixture
def store(tmp_path):
    return ObjectStore.open(tmp_path.as_uri())


@pytest.fixture
def checkpoints(store):
    with Checkpoints(store, ranks=SingleRank(), keep=2) as checkpoints:
        yield checkpoints


class GatedStore:
    """A store whose writes wait for a gate, and fail on request."""

    def __init__(self, store, error=None):
        self.store, self.error, self.gate = store, error, threading.Event()

    def put_at(self, key, data):
        if key.endswith(".safetensors"):
            assert self.gate.wait(30)
            if self.error:
                raise self.error
        return self.store.put_at(key, data)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_load_gives_back_what_was_saved(checkpoints):
    state = make_state()
    reference = checkpoints.save(state, extra=EXTRA).wait(30)
    restored = checkpoints.load(reference)
    assert reference.policy_version == restored.state.policy_version == 3
    assert restored.extra == EXTRA
    assert restored.state.tensors.keys() == state.tensors.keys()
    for name, tensor in state.tensors.items():
        assert restored.state.tensors[name].dtype == tensor.dtype
        assert torch.equal(restored.state.tensors[name], tensor)


def test_backend_resumes_bit_for_bit_from_a_checkpoint(checkpoints):
    samples = make_samples(8, seed=6)
    straight, restored = (TorchBackend(run_config(), ranks=SingleRank()) for _ in range(2))
    straight.accumulate(samples[:4])
    straight.step()
    pending = checkpoints.save(straight.state(), extra={})
    straight.accumulate(samples[4:])
    expected = straight.step()
    restored.load_state(checkpoints.load(pending.wait(30)).state)
    restored.accumulate(samples[4:])
    assert restored.step() == expected
    theirs = collect_weights(restored)
    assert all(
        torch.equal(value, theirs[name]) for name, value in collect_weights(straight).items()
    )


def test_save_snapshots_values_and_returns_before_the_write(store):
    gated = GatedStore(store)
    with Checkpoints(gated, ranks=SingleRank(), keep=2) as checkpoints:
        state = make_state(fill=1.0)
        pending = checkpoints.save(state, extra={})
        state.tensors["model.a"].fill_(2.0)
        assert pending.poll() is None
        assert not any(key.endswith("manifest.json") for key in store.list("checkpoints/"))
        gated.gate.set()
        reference = pending.wait(30)
        assert pending.poll() == reference
        assert torch.equal(checkpoints.load(reference).state.tensors["model.a"], torch.ones(2, 3))


def test_wait_timeout_error_names_the_checkpoint(store):
    gated = GatedStore(store)
    with Checkpoints(gated, ranks=SingleRank(), keep=2) as checkpoints:
        pending = checkpoints.save(make_state(), extra={})
        with pytest.raises(
            RunFailed,
            match=r"checkpoint checkpoints/00000003/.* was not written on every rank after 0\.0 s",
        ):
            pending.wait(0.0)
        gated.gate.set()


def test_poll_reports_the_store_error_of_a_failed_write(store):
    gated = GatedStore(store, error=ObjectError("the disk is full"))
    gated.gate.set()
    with Checkpoints(gated, ranks=SingleRank(), keep=2) as checkpoints:
        pending = checkpoints.save(make_state(), extra={})
        with pytest.raises(
            ObjectError,
            match=r"checkpoint checkpoints/00000003/.* was not written: rank 0: the disk is full",
        ):
            pending.wait(30)
    assert store.list("checkpoints/") == []


def only(store, ending):
    (key,) = [key for key in store.list("checkpoints/") if key.endswith(ending)]
    return key


def damage(store, key, change):
    store.put_at(key, change(store.get_at(key)))


@pytest.mark.parametrize(
    "change",
    [lambda data: data[:-1], lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: b""],
)
@pytest.mark.parametrize("ending", [".safetensors", "manifest.json"])
def test_load_error_names_truncated_or_altered_object(store, checkpoints, change, ending):
    reference = checkpoints.save(make_state(), extra={}).wait(30)
    key = only(store, ending)
    damage(store, key, change)
    with pytest.raises(ObjectError, match=f"{key} was altered"):
        checkpoints.load(reference)


@pytest.mark.parametrize("ending", [".safetensors", "manifest.json"])
def test_load_names_the_object_that_is_missing(store, checkpoints, ending):
    reference = checkpoints.save(make_state(), extra={}).wait(30)
    key = only(store, ending)
    store.delete([key])
    with pytest.raises(ObjectError, match=key):
        checkpoints.load(reference)


def rewrite_manifest(store, reference, **changes):
    """Change the manifest and the reference alike, as a faulty writer would."""
    key = only(store, "manifest.json")
    data = json.dumps(json.loads(store.get_at(key)) | changes).encode()
    store.put_at(key, data)
    return dataclasses.replace(reference, digest=sha256(data).digest())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format": 9}, "must be of format 1 or 2 and version 3, got 9 and 3"),
        ({"policy_version": 4}, "must be of format 1 or 2 and version 3, got 1 and 4"),
        ({"tensors": ["model.a", "model.lost"]}, "exp_avg.a is not in both manifest and shards"),
    ],
)
def test_load_refuses_an_inconsistent_manifest(store, checkpoints, changes, text):
    reference = rewrite_manifest(
        store, checkpoints.save(make_state(), extra={}).wait(30), **changes
    )
    with pytest.raises(ObjectError, match=text):
        checkpoints.load(reference)


def test_load_refuses_a_shard_that_is_not_safetensors(store, checkpoints):
    reference = checkpoints.save(make_state(), extra={}).wait(30)
    wrong = store.put_at("checkpoints/wrong", b"not safetensors at all")
    shard = {"uri": wrong.uri, "digest": wrong.digest.hex(), "num_bytes": wrong.num_bytes}
    with pytest.raises(
        ObjectError, match=r"checkpoints/wrong can't be used: .* is damaged: its header"
    ):
        checkpoints.load(rewrite_manifest(store, reference, shards=[shard]))


def test_load_refuses_a_reference_into_another_store(checkpoints):
    reference = checkpoints.save(make_state(), extra={}).wait(30)
    with pytest.raises(
        ObjectError, match=r"memory://other/x lies outside the object store .*; set objects.uri"
    ):
        checkpoints.load(dataclasses.replace(reference, uri="memory://other/x"))


def versions(store):
    return [
        key.split("/")[1] for key in store.list("checkpoints/") if key.endswith("manifest.json")
    ]


def test_prune_keeps_the_newest(store, checkpoints):
    references = [
        checkpoints.save(make_state(version), extra={}).wait(30) for version in (1, 2, 3, 4)
    ]
    assert checkpoints.prune(references[-1]) == 4
    assert versions(store) == ["00000003", "00000004"]
    assert checkpoints.load(references[-1]).state.policy_version == 4
    assert checkpoints.prune(references[-1]) == 0


def test_prune_keeps_checkpoints_newer_than_the_last_logged_one(store, checkpoints):
    references = [
        checkpoints.save(make_state(version), extra={}).wait(30) for version in (1, 2, 3, 4)
    ]
    checkpoints.prune(references[2])
    assert versions(store) == ["00000002", "00000003", "00000004"]


def test_prune_removes_half_written_saves(store, checkpoints):
    store.put_at("checkpoints/00000002/dead/shard-00000-of-00002.safetensors", b"torn")
    reference = checkpoints.save(make_state(3), extra={}).wait(30)
    assert checkpoints.prune(reference) == 1
    assert versions(store) == ["00000003"]


def test_a_second_save_of_a_version_leaves_the_first_whole(checkpoints):
    first = checkpoints.save(make_state(fill=1.0), extra={}).wait(30)
    second = checkpoints.save(make_state(fill=2.0), extra={}).wait(30)
    assert first.uri != second.uri
    assert float(checkpoints.load(first).state.tensors["model.a"][0, 0]) == 1.0


def test_close_can_be_repeated(store):
    checkpoints = Checkpoints(store, ranks=SingleRank(), keep=2)
    checkpoints.save(make_state(), extra={})
    checkpoints.close()
    checkpoints.close()
    assert only(store, ".safetensors")


def test_each_tensor_is_assigned_to_one_rank_with_balanced_bytes():
    generator = np.random.default_rng(0)
    tensors = {
        f"t{index}": torch.zeros(int(size))
        for index, size in enumerate(generator.integers(1, 1000, 60))
    }
    shares = [_assign_tensors(tensors, rank=rank, size=3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    loads = [sum(tensors[name].nbytes for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(tensor.nbytes for tensor in tensors.values())


class OtherRankFails(SingleRank):
    """Another rank next to this one, which can't read what this one can."""

    def __init__(self, unreadable):
        self.unreadable, self.num_asked = unreadable, 0

    def all_gather_bytes(self, data):
        self.num_asked += 1
        return [data, b"the other rank's disk failed" if self.num_asked <= self.unreadable else b""]


def saved(checkpoints, *versions):
    """Save states of these versions; return their references, newest first."""
    return [checkpoints.save(make_state(version), extra=EXTRA).wait(30) for version in versions][
        ::-1
    ]


@pytest.mark.parametrize("damage", ["missing", "altered", "no shard"])
def test_next_older_checkpoint_is_taken_when_the_newest_cant_be_read(checkpoints, store, damage):
    newest, older = saved(checkpoints, 3, 6)
    key = store.key(newest.uri)
    if damage == "missing":
        store.delete([key])
    elif damage == "altered":
        store.delete([key])
        store.put_at(key, b"{}")
    else:
        store.delete(
            [name for name in store.list("checkpoints/00000006/") if name.endswith(".safetensors")]
        )
    restored = checkpoints.load_newest([newest, older])
    assert (restored.reference, restored.state.policy_version) == (older, 3)


def test_no_checkpoint_is_taken_when_none_can_be_read(checkpoints, store):
    references = saved(checkpoints, 3, 6)
    store.delete([store.key(reference.uri) for reference in references])
    assert checkpoints.load_newest(references) is None
    assert checkpoints.load_newest([]) is None


def test_all_ranks_load_the_newest_checkpoint_readable_by_every_rank(store):
    with Checkpoints(store, ranks=SingleRank(), keep=2) as checkpoints:
        newest, older = saved(checkpoints, 3, 6)
    with Checkpoints(store, ranks=OtherRankFails(1), keep=2) as checkpoints:
        assert checkpoints.load_newest([newest, older]).reference == older
