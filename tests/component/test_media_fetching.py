"""Media by URL, from servers on this machine: which URLs are fetched, and which are never
requested.
"""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from relax_events.config import MediaConfig
from relax_events.errors import MediaError
from relax_events.events.parts import Modality
from relax_events.media.fetching import WebFetcher, is_public
from relax_events.media.items import MediaAccess, MediaItem

CONTENT = b"an image"
ENOUGH = threading.Event()


class Host(BaseHTTPRequestHandler):
    """Serves files, redirects to other addresses, drips, and floods."""

    def do_GET(self) -> None:
        kind, _, rest = self.path.partition("?")[0].strip("/").partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest if "://" in rest else f"/{rest}")
            self.end_headers()
        elif kind == "gone":
            self.send_error(404)
        elif kind == "drip":
            self.send_response(200)
            self.end_headers()
            while not ENOUGH.wait(0.05):
                self.wfile.write(b"x")
        elif kind == "flood":
            self.send_response(200)
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(bytes(1000))
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the fetcher has read enough
            return


@pytest.fixture
def port() -> Iterator[int]:
    ENOUGH.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_address[1]
        ENOUGH.set()
        server.shutdown()
        thread.join()


def fetcher(*hosts: str, seconds: float = 20.0) -> WebFetcher:
    """A fetcher to whom this machine's first address is the internet."""
    return WebFetcher(
        hosts or ("127.0.0.1",),
        max_bytes=100,
        seconds=seconds,
        may_connect=lambda address: address == "127.0.0.1",
    )


def check_refused(one: WebFetcher, url: str, reason: str) -> str:
    with pytest.raises(MediaError) as caught:
        one.fetch(url, location="row 1")
    assert caught.value.reason == reason
    assert str(caught.value).startswith("row 1")
    return str(caught.value)


def test_file_is_fetched_directly_and_through_redirects(port: int) -> None:
    assert fetcher().fetch(f"http://127.0.0.1:{port}/a.png?size=2", location="row 1") == CONTENT
    assert fetcher().fetch(f"http://127.0.0.1:{port}/to/to/b.png", location="row 1") == CONTENT


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/a",
        "http:///a",
        "http://me:secret@127.0.0.1/a",
        "file:///etc/passwd",
        "http://[::1/a",
        "http://127.0.0.1:port/a",
    ],
)
def test_forbidden_media_urls_are_rejected(url: str) -> None:
    check_refused(fetcher(), url, "forbidden_address")


def test_host_outside_the_allowlist_is_never_contacted(port: int) -> None:
    text = check_refused(
        fetcher("images.example"), f"http://127.0.0.1:{port}/a", "forbidden_address"
    )
    assert text.endswith("has host '127.0.0.1'; media_hosts allows images.example")


def test_allowed_host_at_a_private_address_is_never_contacted(port: int) -> None:
    item = MediaItem(
        Modality.IMAGE, f"http://localhost:{port}/a", "row 1", MediaAccess(hosts=("localhost",))
    )
    with pytest.raises(
        MediaError,
        match=r"row 1: host 'localhost' is at (127.0.0.1|::1), which is not a public address",
    ):
        item.read(MediaConfig())


def test_host_with_both_private_and_public_addresses_is_never_contacted(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
        for address in ("127.0.0.1", "10.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert "is at 10.0.0.1" in check_refused(
        fetcher("images.example"), f"http://images.example:{port}/a", "forbidden_address"
    )


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.2/secret", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd"],
)
def test_redirect_to_a_private_address_is_not_followed(port: int, target: str) -> None:
    one = fetcher("127.0.0.1", "127.0.0.2", "169.254.169.254")
    check_refused(one, f"http://127.0.0.1:{port}/to/{target}", "forbidden_address")


def test_redirect_to_another_host_is_not_followed(port: int) -> None:
    check_refused(
        fetcher(), f"http://127.0.0.1:{port}/to/http://localhost:{port}/a", "forbidden_address"
    )


def test_number_of_redirects_is_limited(port: int) -> None:
    assert "redirects again" in check_refused(
        fetcher(), f"http://127.0.0.1:{port}/to/to/to/to/a", "not_fetched"
    )


def test_not_found_error_names_the_url_without_its_query(port: int) -> None:
    text = check_refused(fetcher(), f"http://127.0.0.1:{port}/gone?key=secret", "not_fetched")
    assert text == f"row 1: 'http://127.0.0.1:{port}/gone' responds 404 Not Found"


def test_download_of_a_file_that_is_too_large_is_aborted(port: int) -> None:
    check_refused(fetcher(), f"http://127.0.0.1:{port}/flood", "too_large")


def test_download_from_a_slow_host_is_aborted_at_the_deadline(port: int) -> None:
    check_refused(fetcher(seconds=0.3), f"http://127.0.0.1:{port}/drip", "not_fetched")


def test_error_names_host_that_refuses_the_connection() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        check_refused(fetcher(), f"http://127.0.0.1:{closed.getsockname()[1]}/a", "not_fetched")


PUBLIC = ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"]
OURS = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "::1",
    "::",
    "fe80::1",
    "fd00::1",
]
SPECIAL = ["192.88.99.1", "3fff::1", "3fff:fff::1", "2001:db8::1", "198.18.0.1", "240.0.0.1"]
CARRYING_ANOTHER = [
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "64:ff9b::a00:1",
    "2002:a00:1::",
    "ff02::1",
]


@pytest.mark.parametrize("address", [*PUBLIC, *OURS, *CARRYING_ANOTHER, *SPECIAL])
def test_public_addresses_are_distinguished_from_others(address: str) -> None:
    assert is_public(address) is (address in PUBLIC)
