"""A small S3 server that keeps objects in memory, and can refuse, hang and send partial responses.

python -m tests.s3_server HOST PORT
"""

import re
import sys
import threading
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree as ET

ACTIONS = {
    "GET": "s3:GetObject",
    "HEAD": "s3:GetObject",
    "PUT": "s3:PutObject",
    "POST": "s3:PutObject",
    "DELETE": "s3:DeleteObject",
}
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


def allows(policy: dict[str, Any], action: str, path: str) -> bool:
    """Tell whether a policy allows an action on a path of the form /bucket/key."""
    resource = f"arn:aws:s3:::{path.lstrip('/')}"
    return any(
        statement["Effect"] == "Allow"
        and action in statement["Action"]
        and any(fnmatchcase(resource, pattern) for pattern in statement["Resource"])
        for statement in policy["Statement"]
    )


def keys_in(body: bytes) -> list[str]:
    """Return the keys that a call asks to delete."""
    found = [e.text for e in ET.fromstring(body).iter() if e.tag.rpartition("}")[2] == "Key"]
    return [key for key in found if key is not None]


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
        self.policies: dict[str, dict[str, Any]] = {}
        """Policies by access key; while there are any, a call that its key's policy does not
        allow is answered with 403."""
        self.refused: list[str] = []


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
        elif not self.is_allowed(url.path, query, body):
            self.server.refused.append(f"{self.command} {self.path} by {self.find_key()}")
            self.answer(403, DENIED)
        else:
            getattr(self, f"s3_{self.command.lower()}")(url.path, query, body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one  # noqa: N815

    def find_key(self) -> str:
        """Return the caller's access key; empty if there is none."""
        match = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        return match[1] if match else ""

    def is_allowed(self, path: str, query: dict[str, list[str]], body: bytes) -> bool:
        """Tell whether the caller's policy allows a call."""
        if not self.server.policies:
            return True
        policy = self.server.policies.get(self.find_key())
        if policy is None:
            return False
        if "list-type" in query:
            return allows(policy, "s3:ListBucket", path.rstrip("/"))
        if "delete" in query:
            names = (f"{path.rstrip('/')}/{key}" for key in keys_in(body))
            return all(allows(policy, "s3:DeleteObject", name) for name in names)
        return allows(policy, ACTIONS[self.command], path)

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
            keys = keys_in(body)
            for key in keys:
                self.server.objects.pop(f"{path.rstrip('/')}/{key}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def s3_get(self, path: str, query: dict[str, list[str]], _: bytes) -> None:
        if "list-type" in query:
            bucket, prefix = path.rstrip("/"), query["prefix"][0]
            keys = sorted(key.removeprefix(f"{bucket}/") for key in self.server.objects)
            keys = [key for key in keys if key.startswith(prefix)]
            folders = set()
            if "delimiter" in query:
                inner = {key: key.removeprefix(prefix).partition("/") for key in keys}
                folders = {f"{prefix}{name}/" for name, slash, _ in inner.values() if slash}
                keys = [key for key, (_, slash, _) in inner.items() if not slash]
            contents = "".join(
                f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>tag</ETag><Size>1</Size></Contents>"
                for key in keys
            )
            contents += "".join(
                f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
                for name in sorted(folders)
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
