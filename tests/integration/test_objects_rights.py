"""Each role with its own credential on a bucket that enforces the policies of `relax store`: what
the role does is allowed, and the rest is refused with a clear error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_events.config import load_run_config
from relax_events.engines.protocol import GeneratedSample
from relax_events.errors import StoreUnavailable
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.objects import ObjectStore
from relax_events.objects.backends import Deadlines
from relax_events.objects.claim_check import fetch_array, store_array
from relax_events.objects.download import download
from relax_events.objects.marker import claim_store
from relax_events.objects.outages import outages
from relax_events.objects.rights import (
    CHECKPOINTS,
    CRITIC,
    FOLDERS,
    MARKER,
    MARKER_WRITERS,
    MEDIA,
    PARTIALS,
    ROLE_STORE_RIGHTS,
    SAMPLES,
    STORE_RIGHTS,
    WEIGHTS,
)
from relax_events.objects.version_objects import build_version_folder, delete_objects_before
from relax_events.ops.store_policies import build_store_policies
from relax_events.roles.handover import PartialSamples
from relax_events.training.backend.state import TrainerState
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.ranks import SingleRank
from relax_events.weights.artifact_reader import read_weights
from relax_events.weights.artifact_writer import delete_weights, write_weights
from tests.s3_server import S3Server, environment

pytestmark = pytest.mark.integration

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
URI = "s3://bucket/runs"
DEADLINES = Deadlines(connect_seconds=30, retry_seconds=30, max_retries=0)
Open = Callable[[str], ObjectStore]


@pytest.fixture
def server() -> Iterator[S3Server]:
    server = S3Server()
    config = load_run_config(CONFIG, ["run.id=one", f"objects.uri={URI}"], environment={})
    server.policies = build_store_policies(config)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    thread.join(timeout=60)
    server.server_close()


@pytest.fixture
def open_as(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return what opens the run's store as a role, whose access key is its name."""
    settings = environment("127.0.0.1", server.server_port)
    for name in settings:
        monkeypatch.delenv(name, raising=False)

    def open_store(role: str) -> ObjectStore:
        path = tmp_path / f"{role}.env"
        given = settings | {"AWS_ACCESS_KEY_ID": role}
        path.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
        monkeypatch.setenv("OBJECTS_CREDENTIALS_FILE", str(path))
        return ObjectStore.open(f"{URI}/one", deadlines=DEADLINES)

    claim_store(open_store("operator"), run_id="one")
    return open_store


def fill(server: S3Server) -> None:
    """Put an object into each folder, as the server itself."""
    for folder in FOLDERS:
        server.objects[f"/bucket/runs/one/{folder}00000001/a"] = b"here"


@pytest.mark.parametrize("role", STORE_RIGHTS)
def test_role_reads_its_folders_and_no_other(server: S3Server, open_as: Open, role: str) -> None:
    fill(server)
    store = open_as(role)
    assert claim_store(store, run_id="one").run_id == "one"
    for folder in FOLDERS:
        if folder in STORE_RIGHTS[role].reads:
            assert store.get_at(f"{folder}00000001/a") == b"here"
            assert not store.exists(f"{folder}00000001/none")
        else:
            with pytest.raises(StoreUnavailable, match="refuses it to this process's credential"):
                store.get_at(f"{folder}00000001/a")


@pytest.mark.parametrize("role", STORE_RIGHTS)
def test_role_writes_and_deletes_in_its_folders_alone(
    server: S3Server, open_as: Open, role: str
) -> None:
    fill(server)
    store, rights = open_as(role), STORE_RIGHTS[role]
    for folder in FOLDERS:
        key = f"{folder}00000001/a"
        if folder in rights.writes:
            store.put_at(key, b"new")
        else:
            with pytest.raises(StoreUnavailable, match=f"can't write .*{key}: the store refuses"):
                store.put_at(key, b"new")
            assert server.objects[f"/bucket/runs/one/{key}"] == b"here"
        if folder in rights.deletes:
            store.delete([key])
        else:
            with pytest.raises(StoreUnavailable, match=f"can't delete .*{key}: the store refuses"):
                store.delete([key])
            assert f"/bucket/runs/one/{key}" in server.objects


@pytest.mark.parametrize("role", sorted(ROLE_STORE_RIGHTS.keys() - set(MARKER_WRITERS)))
def test_role_claims_no_store_but_takes_the_claim_of_the_controller(
    server: S3Server, open_as: Open, role: str
) -> None:
    del server.objects[f"/bucket/runs/one/{MARKER}"]
    store = open_as(role)
    with pytest.raises(StoreUnavailable, match=r"can.t write .*: the store refuses it"):
        claim_store(store, run_id="one")

    def start_controller(_: float) -> None:
        claim_store(open_as("controller"), run_id="one", cluster_id="here")

    outages.start_waiting(deadline_seconds=3600, pause=start_controller)
    try:
        mark = claim_store(store, run_id="one")
    finally:
        outages.stop_waiting()
    assert (mark.run_id, mark.cluster_id) == ("one", "here")
    with pytest.raises(StoreUnavailable, match="refuses"):
        store.put_at(MARKER, b"{}")


@pytest.mark.parametrize("role", ROLE_STORE_RIGHTS)
def test_role_reads_no_other_run(server: S3Server, open_as: Open, role: str) -> None:
    open_as(role)
    server.objects["/bucket/runs/two/weights/a"] = b"of another run"
    other = ObjectStore.open(f"{URI}/two", deadlines=DEADLINES)
    with pytest.raises(StoreUnavailable, match="refuses"):
        other.get_at("weights/a")


def test_weights_of_the_trainer_are_read_by_rollout_and_not_replaced(open_as: Open) -> None:
    trainer = open_as("trainer")
    tensors = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3)}
    reference, _ = write_weights(trainer, tensors, policy_version=3)
    rollout = open_as("rollout")
    assert torch.equal(read_weights(rollout, reference).tensors["a"], tensors["a"])
    with pytest.raises(StoreUnavailable, match="refuses"):
        write_weights(rollout, tensors, policy_version=3)
    with pytest.raises(StoreUnavailable, match="refuses"):
        read_weights(open_as("reward"), reference)
    delete_weights(open_as("trainer"), 3)
    assert trainer.list(WEIGHTS) == []


def test_checkpoint_is_restored_and_pruned_by_the_trainer_alone(open_as: Open) -> None:
    def saved_as(role: str, folder: str) -> Checkpoints:
        return Checkpoints(open_as(role), ranks=SingleRank(), keep=1, folder=folder)

    state = TrainerState(policy_version=1, tensors={"model.a": torch.arange(4.0)})
    with saved_as("trainer", CHECKPOINTS) as checkpoints:
        reference = checkpoints.save(state, extra={}).wait(60)
        assert checkpoints.load(reference).state.policy_version == 1
        with (
            saved_as("rollout", CHECKPOINTS) as foreign,
            pytest.raises(StoreUnavailable, match="refuses"),
        ):
            foreign.load(reference)
    with saved_as("critic", f"{CRITIC}{CHECKPOINTS}") as checkpoints:
        assert checkpoints.load(checkpoints.save(state, extra={}).wait(60)).extra == {}


def test_arrays_and_unfinished_samples_go_from_role_to_role(open_as: Open) -> None:
    values = np.arange(5, dtype=np.float32)
    for writer in ("rollout", "reference", "actor-forward", "critic", "teacher", "advantage"):
        stored = store_array(values, open_as(writer), folder=build_version_folder(2))
        for reader in ("reward", "judge", "advantage", "trainer", "critic"):
            assert np.array_equal(fetch_array(stored, open_as(reader)), values)
    sample = GeneratedSample(
        sample_id="g/0",
        prompt_group_id="g",
        tokens=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, dtype=np.float32),
        segments=(VersionSegment(0, 3),),
        finish_reason=FinishReason.ABORT,
    )
    partials = PartialSamples(open_as("rollout"))
    assert partials.keep("g", [sample]) == 3
    assert set(partials.find("g", num_samples=2)) == {0}
    partials.forget(["g"])
    assert open_as("operator").list(PARTIALS) == []
    assert delete_objects_before(open_as("controller"), 3) == 1
    assert open_as("operator").list(SAMPLES) == []


def test_media_of_prompts_are_written_by_the_prompter(open_as: Open, tmp_path: Path) -> None:
    reference = open_as("prompter").put(b"an image")
    assert open_as("operator").key(reference.uri).startswith(MEDIA)
    for reader in ("rollout", "judge", "trainer", "critic", "evaluator"):
        assert open_as(reader).get(reference) == b"an image"
    assert download(open_as("trainer"), reference, tmp_path / "x").read_bytes() == b"an image"
