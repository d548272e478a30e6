"""The object store over HTTP, with a small S3 server that can refuse, hang and send partial
responses.
"""

import threading
from collections.abc import Iterator

import pytest

from relax_events.errors import ObjectError, StoreUnavailable
from relax_events.objects import ObjectStore
from relax_events.objects import store as store_module
from relax_events.objects.backends import Deadlines
from relax_events.objects.outages import outages
from tests.s3_server import S3Server, environment

pytestmark = pytest.mark.integration

IMPATIENT = Deadlines(connect_seconds=1.0, request_seconds=0.3, retry_seconds=1.0, max_retries=1)
FEW_RETRIES = Deadlines(connect_seconds=60, request_seconds=60, retry_seconds=60, max_retries=1)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name, value in environment("127.0.0.1", server.server_port).items():
        monkeypatch.setenv(name, value)
    yield server
    server.closing.set()
    server.shutdown()
    thread.join(timeout=60)
    server.server_close()


def test_objects_come_back_from_a_bucket_with_a_prefix(server: S3Server) -> None:
    store = ObjectStore.open("s3://bucket/runs/one")
    reference = store.put(b"hello")
    assert reference.uri.startswith("s3://bucket/runs/one/sha256/2c/2cf24dba")
    assert list(server.objects) == [f"/bucket/runs/one/{store.key(reference.uri)}"]
    assert store.get(reference) == b"hello"
    store.put_at("weights/2/a", b"data")
    assert store.list("weights") == ["weights/2/a"]
    assert store.exists("weights/2/a")
    store.delete(["weights/2/a", "weights/2/gone"])
    assert not store.exists("weights/2/a")


def test_put_does_not_upload_again_when_the_content_is_there(server: S3Server) -> None:
    store = ObjectStore.open("s3://bucket")
    store.put(b"hello")
    store.put(b"hello")
    assert sum(request.startswith("PUT") for request in server.requests) == 1


def test_large_objects_are_transferred_in_multiple_parts(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PART_BYTES", 1000)
    store = ObjectStore.open("s3://bucket")
    data = bytes(range(256)) * 10
    reference = store.put(data)
    assert sum("partNumber" in request for request in server.requests) == 3
    server.requests.clear()
    assert store.get(reference) == data
    assert sum(request.startswith("GET") for request in server.requests) == 3


def test_calls_are_tried_again_when_the_server_is_busy(server: S3Server) -> None:
    store = ObjectStore.open("s3://bucket")
    server.num_refusals = 2
    reference = store.put_at("a", b"hello")
    server.num_refusals = 2
    assert store.get(reference) == b"hello"


def test_calls_fail_by_the_deadline_when_the_server_hangs(server: S3Server) -> None:
    store = ObjectStore.open("s3://bucket", deadlines=IMPATIENT)
    server.hangs = True
    with pytest.raises(StoreUnavailable, match="can't write s3://bucket/a: "):
        store.put_at("a", b"hello")
    with pytest.raises(StoreUnavailable, match="can't read s3://bucket/a: "):
        store.get_at("a")
    assert {request.split()[0] for request in server.requests} == {"PUT", "HEAD"}


def test_worker_waits_for_an_unavailable_bucket_and_retries_the_same_object(
    server: S3Server,
) -> None:
    store = ObjectStore.open("s3://bucket", deadlines=FEW_RETRIES)
    reference = store.put(b"hello")
    server.num_refusals = 10**9
    away: list[float] = []

    def pause(_: float) -> None:
        away.append(outages.seconds)
        if len(away) == 3:
            server.num_refusals = 0

    outages.start_waiting(deadline_seconds=3600, pause=pause)
    try:
        assert store.get(reference) == b"hello"
        assert len(away) == 3
        assert away == sorted(away)
        assert outages.seconds == 0
        with pytest.raises(ObjectError, match="there is no such object"):
            store.get_at("missing")
        assert len(away) == 3
    finally:
        outages.stop_waiting()


def test_calls_fail_when_no_server_listens(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    store = ObjectStore.open("s3://bucket", deadlines=IMPATIENT)
    with pytest.raises(StoreUnavailable, match="can't look up s3://bucket/"):
        store.put(b"hello")


def test_get_names_the_object_when_it_is_missing(server: S3Server) -> None:
    store = ObjectStore.open("s3://bucket")
    with pytest.raises(ObjectError, match="can't read s3://bucket/a: there is no such object"):
        store.get_at("a")
