"""A store belongs to the run that its marker names; another run is rejected, and objects of two
runs never mix.
"""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import pytest

from relax_events.cli.models import prepare
from relax_events.config import RunConfig, load_run_config
from relax_events.errors import ConfigError, ObjectError
from relax_events.events.parts import ObjectRef
from relax_events.history.runs.deletion import stores_overlap
from relax_events.objects import ObjectStore
from relax_events.objects.marker import claim_store, read_marker, require_marker
from relax_events.objects.rights import MARKER


def run_of(folder: Path, name: str, uri: str) -> RunConfig:
    tree = {
        "run": {"id": name, "directory": str(folder)},
        "model": {"path": str(folder)},
        "data": {"source": "arithmetic"},
        "objects": {"uri": uri},
    }
    return RunConfig.model_validate(tree)


def test_store_is_claimed_once_and_known_again(tmp_path: Path) -> None:
    first = ObjectStore.open(tmp_path.as_uri())
    assert read_marker(first) is None
    mark = claim_store(first, run_id="mine")
    assert claim_store(ObjectStore.open(tmp_path.as_uri()), run_id="mine") == mark
    assert len(mark.value) == 32


def test_store_claimed_by_one_run_is_refused_to_another(tmp_path: Path) -> None:
    claim_store(ObjectStore.open(tmp_path.as_uri()), run_id="mine")
    with pytest.raises(
        ConfigError,
        match=r"belongs to run mine, and this is run theirs; give this run another objects\.uri",
    ):
        claim_store(ObjectStore.open(tmp_path.as_uri()), run_id="theirs")


def test_store_of_another_run_of_the_same_name_is_detected_by_logged_marker(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    mark = claim_store(store, run_id="mine")
    require_marker(mark, logged_marker=mark.value, store_uri=store.uri(""))
    require_marker(mark, logged_marker="", store_uri=store.uri(""))
    with pytest.raises(
        ConfigError,
        match=f"must hold {'0' * 32}, got {mark.value}; give this run another run.id or objects.uri",
    ):
        require_marker(mark, logged_marker="0" * 32, store_uri=store.uri(""))


def test_run_of_the_same_name_on_another_cluster_cannot_claim_the_store(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    mark = claim_store(store, run_id="mine", cluster_id="first")
    text = r"belongs to run mine of Kafka cluster first, and this is a run of that name on cluster second; give this run another run\.id"
    with pytest.raises(ConfigError, match=text):
        claim_store(store, run_id="mine", cluster_id="second")
    with pytest.raises(ConfigError, match=text):
        claim_store(store, run_id="mine", cluster_id="second", logged_marker="0" * 32)
    assert claim_store(store, run_id="mine", cluster_id="first") == mark
    assert (
        claim_store(store, run_id="mine", cluster_id="second", logged_marker=mark.value) == mark
    ), "it has moved there with its log"
    assert claim_store(store, run_id="mine") == mark, "a broker that does not report its cluster"


def test_marker_of_an_older_release_names_no_cluster(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text('{"run_id": "mine", "value": "' + "a" * 32 + '"}')
    assert (
        claim_store(
            ObjectStore.open(tmp_path.as_uri()), run_id="mine", cluster_id="second"
        ).cluster_id
        == ""
    )


def test_malformed_store_marker_is_rejected(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("[]")
    with pytest.raises(ConfigError, match="must be a marker with run_id and value"):
        claim_store(ObjectStore.open(tmp_path.as_uri()), run_id="mine")


def test_runs_with_the_same_store_uri_use_separate_folders(tmp_path: Path) -> None:
    uri = (tmp_path / "shared").as_uri()
    mine, theirs = (run_of(tmp_path, name, uri) for name in ("mine", "theirs"))
    assert mine.objects_uri == f"{uri}/mine"
    assert not stores_overlap(mine.objects_uri, theirs.objects_uri)


def test_in_memory_store_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"'memory://' lives in one process, and every worker is a process of its own; set objects\.uri",
    ):
        run_of(tmp_path, "mine", "memory://")


def test_local_store_is_claimed_before_read_only_workers_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    run_file, uri = tmp_path / "run.toml", (tmp_path / "objects").as_uri()
    tables = (
        '[run]\nid = "mine"\n[data]\nsource = "arithmetic"\n[model]\npath = '
        f'"{tmp_path}/model"\n[objects]\nuri = "{uri}"\n'
    )
    run_file.write_text(tables)
    prepare(run_file)
    mark = read_marker(ObjectStore.open(load_run_config(run_file).objects_uri))
    assert mark is not None
    assert mark.run_id == "mine"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("file:///a/b", "file:///a/./b/", True),
        ("file:///a/b", "file:///a/%62", True),
        ("file:///a/b", "file:///a/b/c", True),
        ("file:///a/b", "file:///a/bc", False),
        ("s3://bucket/x", "s3://bucket", True),
        ("s3://bucket/x", "s3://bucket/y/../x", True),
        ("s3://bucket/x", "s3://other/x", False),
        ("s3://bucket/x", "gs://bucket/x", False),
    ],
)
def test_store_overlap_is_detected_for_every_form_of_uri(
    one: str, other: str, *, expected: bool
) -> None:
    assert stores_overlap(one, other) is stores_overlap(other, one) is expected


def test_symlink_to_a_store_counts_as_that_store(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "objects")
    assert stores_overlap((tmp_path / "objects").as_uri(), (tmp_path / "link").as_uri())


def test_object_of_another_size_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UnreadFile(FileIO):
        def readall(self) -> bytes:
            pytest.fail("it was read")

    store = ObjectStore.open(tmp_path.as_uri())
    reference = store.put_at("weights/a", b"0123456789")
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: UnreadFile(path))
    with pytest.raises(ObjectError, match="was altered: it must have 4 bytes, got 10"):
        store.get(ObjectRef(reference.uri, reference.digest, 4))
