"""The object store over HTTP, with a small S3 server that can refuse, hang and send partial
responses.
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree as ET

import pytest

from relax_events.errors import ObjectError, StoreUnavailable
from relax_events.objects import ObjectStore
from relax_events.objects import store as store_module
from relax_events.objects.backends import Deadlines
from relax_events.objects.outages import outages

pytestmark = pytest.mark.integration

IMPATIENT = Deadlines(connect_seconds=1.0, request_seconds=0.3, retry_seconds=1.0, max_retries=1)


class S3Server(ThreadingHTTPServer):
    """Keeps objects in a dict; answers 503 while `num_refusals` is above 0, and not at all while
    `hangs`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), S3Handler)
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        self.num_refusals = 0
        self.hangs = False
        self.closing = threading.Event()


class S3Handler(BaseHTTPRequestHandler):
    server: S3Server
    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        self.server.requests.append(f"{self.command} {self.path}")
        if self.server.hangs:
            self.server.closing.wait(timeout=30)
            self.close_connection = True
        elif self.server.num_refusals > 0:
            self.server.num_refusals -= 1
            self.answer(503)
        else:
            getattr(self, f"s3_{self.command.lower()}")(url.path, query, body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one  # noqa: N815

    def s3_put(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploadId" in query:
            self.server.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
        else:
            self.server.objects[path] = body
        self.answer(200, headers={"ETag": '"tag"'})

    def s3_post(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploads" in query:
            self.server.parts[path] = {}
            self.answer(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{path}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        elif "uploadId" in query:
            parts = self.server.parts.pop(query["uploadId"][0])
            self.server.objects[path] = b"".join(parts[number] for number in sorted(parts))
            self.answer(
                200,
                b"<CompleteMultipartUploadResult><ETag>tag</ETag></CompleteMultipartUploadResult>",
            )
        else:
            keys = [
                element.text
                for element in ET.fromstring(body).iter()
                if element.tag.rpartition("}")[2] == "Key"
            ]
            for key in keys:
                self.server.objects.pop(f"{path.rstrip('/')}/{key}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def s3_get(self, path: str, query: dict[str, list[str]], _: bytes) -> None:
        if "list-type" in query:
            bucket = path.rstrip("/")
            keys = sorted(key.removeprefix(f"{bucket}/") for key in self.server.objects)
            contents = "".join(
                f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>tag</ETag><Size>1</Size></Contents>"
                for key in keys
                if key.startswith(query["prefix"][0])
            )
            self.answer(
                200,
                f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode(),
            )
        elif path not in self.server.objects:
            self.answer(404)
        else:
            self.answer_range(self.server.objects[path])

    s3_head = s3_get

    def answer_range(self, data: bytes) -> None:
        headers = {"ETag": '"tag"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if wanted := self.headers.get("Range"):
            first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
            self.answer(
                206,
                data[first : last + 1],
                headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"},
            )
        else:
            self.answer(200, data, headers)

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    settings = {
        "ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "ALLOW_HTTP": "true",
        "REGION": "local",
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
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
    store = ObjectStore.open("s3://bucket", deadlines=IMPATIENT)
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


def test_calls_fail_when_nobody_listens(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    store = ObjectStore.open("s3://bucket", deadlines=IMPATIENT)
    with pytest.raises(StoreUnavailable, match="can't look up s3://bucket/"):
        store.put(b"hello")


def test_get_names_the_object_when_it_is_missing(server: S3Server) -> None:
    store = ObjectStore.open("s3://bucket")
    with pytest.raises(ObjectError, match="can't read s3://bucket/a: there is no such object"):
        store.get_at("a")
