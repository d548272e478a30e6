"""A small S3 server that keeps objects in memory, and can refuse, hang and send partial responses.

python -m tests.s3_server HOST PORT
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree as ET


class S3Server(ThreadingHTTPServer):
    """Keeps objects in a dict; answers 503 while `num_refusals` is above 0, and not at all while
    `hangs`."""

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), S3Handler)
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


def environment(host: str, port: int) -> dict[str, str]:
    """Return the variables by which clients find a server."""
    settings = {
        "ENDPOINT": f"http://{host}:{port}",
        "ALLOW_HTTP": "true",
        "REGION": "local",
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
    }
    return {f"AWS_{name}": value for name, value in settings.items()}


if __name__ == "__main__":
    S3Server(sys.argv[1], int(sys.argv[2])).serve_forever()
