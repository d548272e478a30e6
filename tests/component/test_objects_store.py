import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError

from relax_events.errors import ConfigError, ObjectError, StoreUnavailable
from relax_events.events.parts import ObjectRef
from relax_events.objects import ObjectStore

pytestmark = pytest.mark.unit

HELLO_DIGEST = (
    "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # `printf hello | sha256sum`
)


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(
        "memory://" if request.param == "memory" else (tmp_path / "new" / "objects").as_uri()
    )


def test_put_stores_under_the_digest_when_given_bytes(store: ObjectStore) -> None:
    reference = store.put(b"hello", suffix=".txt")
    assert reference.digest.hex() == HELLO_DIGEST
    assert reference.num_bytes == 5
    assert reference.uri == store.uri(f"sha256/2c/{HELLO_DIGEST}.txt")
    assert store.get(reference) == b"hello"


def test_put_takes_a_view_when_its_items_are_wider_than_a_byte(store: ObjectStore) -> None:
    reference = store.put(memoryview(b"12345678").cast("q"))
    assert reference.num_bytes == 8
    assert store.get(reference) == b"12345678"


def test_put_skips_the_upload_when_the_content_is_present(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    put = obstore.put
    monkeypatch.setattr(
        obstore, "put", lambda *args, **kwargs: (sent.append(args[1]), put(*args, **kwargs))[1]
    )
    assert store.put(b"hello") == store.put(b"hello")
    assert len(sent) == 1


def test_put_at_replaces_when_the_name_is_taken(store: ObjectStore) -> None:
    first = store.put_at("weights/1/manifest.json", b"one")
    second = store.put_at("weights/1/manifest.json", b"other")
    assert store.get_at("weights/1/manifest.json") == b"other"
    assert store.get(second) == b"other"
    with pytest.raises(ObjectError, match=f"{first.uri} was altered: it must have 3 bytes, got 5"):
        store.get(first)


def test_get_names_both_digests_when_the_content_was_altered(store: ObjectStore) -> None:
    reference = store.put(b"hello")
    store.put_at(store.key(reference.uri), b"hallo")
    with pytest.raises(
        ObjectError, match=f"SHA-256 must be {HELLO_DIGEST}, got {sha256(b'hallo').hexdigest()}"
    ):
        store.get(reference)


def test_get_names_the_object_when_it_is_missing(store: ObjectStore) -> None:
    reference = ObjectRef(store.uri("sha256/00/none"), bytes(32), 1)
    with pytest.raises(ObjectError, match=f"can't read {reference.uri}: there is no such object"):
        store.get(reference)


def test_get_refuses_when_the_uri_lies_outside(store: ObjectStore) -> None:
    for uri in ("file:///etc/passwd", "s3://other/key", store.uri("")[:-1] + "-sibling/key"):
        with pytest.raises(ObjectError, match="lies outside the object store"):
            store.get(ObjectRef(uri, bytes(32), 1))


@pytest.mark.parametrize(
    "key",
    [
        "../up",
        "a/../../up",
        "/absolute",
        "a//b",
        ".hidden",
        "a/",
        "",
        "blank space",
        "per%2e%2ecent",
    ],
)
def test_names_are_refused_when_they_could_leave_the_root(store: ObjectStore, key: str) -> None:
    with pytest.raises(ObjectError, match="can't name an object"):
        store.put_at(key, b"data")
    with pytest.raises(ObjectError, match="can't name an object"):
        store.get(ObjectRef(store.uri("") + key, bytes(32), 1))


def test_list_returns_sorted_names_of_only_the_given_folder(store: ObjectStore) -> None:
    for key in ("weights/2/b", "weights/2/a", "weights/10/c", "weights-old/2/d"):
        store.put_at(key, b"data")
    assert store.list("weights/2") == store.list("weights/2/") == ["weights/2/a", "weights/2/b"]
    assert store.list("weights") == ["weights/10/c", "weights/2/a", "weights/2/b"]
    assert len(store.list("")) == 4
    assert store.list("nowhere") == []


def test_delete_ignores_missing_objects(store: ObjectStore) -> None:
    store.put_at("a", b"1")
    store.delete(["gone", "a"])
    assert not store.exists("a")
    store.delete([])


def test_a_folder_is_no_object(store: ObjectStore) -> None:
    store.put_at("runs/7/name", b"x")
    assert not store.exists("runs/7")
    with pytest.raises(ObjectError):
        store.get_at("runs/7")


def test_put_leaves_a_whole_object_when_many_write_the_same_name(store: ObjectStore) -> None:
    contents = [bytes([number]) * 200_000 for number in range(8)]
    start = threading.Barrier(len(contents))

    def write(content: bytes) -> ObjectRef:
        start.wait(timeout=60)
        return store.put_at("contested", content)

    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(write, contents))
    assert store.get_at("contested") in contents
    assert store.list("") == ["contested"]


def test_open_finds_the_objects_again_when_the_directory_has_them(tmp_path: Path) -> None:
    uri = (tmp_path / "with space").as_uri()
    reference = ObjectStore.open(uri).put(b"hello")
    assert ObjectStore.open(uri + "/").get(reference) == b"hello"


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("", "is no object store"),
        ("ftp://host/x", "is no object store"),
        ("/plain/path", "is no object store"),
        ("s3:///prefix", "is no object store"),
        ("file://relative/x", "absolute directory, with three slashes"),
        ("file:relative", "absolute directory"),
    ],
)
def test_open_names_the_uri_when_it_is_no_store(uri: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        ObjectStore.open(uri)
    assert repr(uri) in str(caught.value)


def test_open_names_the_uri_when_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/objects' can't be opened: .*Not a directory"):
        ObjectStore.open((tmp_path / "file" / "objects").as_uri())


def test_put_names_store_and_remedy_when_the_disk_is_full(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(*args: object, **kwargs: object) -> None:
        raise GenericError(
            "Generic LocalFileSystem error: Unable to copy data to file: No space left on "
            "device (os error 28)\n\nDebug source: ..."
        )

    monkeypatch.setattr(obstore, "put", put)
    with pytest.raises(
        StoreUnavailable,
        match=r"can't write .*a/b: the object store is full; free space there or set objects.uri",
    ) as caught:
        store.put_at("a/b", b"data")
    assert "Debug" not in str(caught.value)
