"""A client of the page: it opens a link once, and has the cookie from then on."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

COOKIES: dict[str, str] = {}
"""The cookie of each page that a test has opened, by the page's address."""


def open_link(link: str) -> tuple[int, dict[str, str]]:
    """Open a link as a browser does, without following it; return the status and the headers."""
    address = urlsplit(link)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=300)
    try:
        connection.request("GET", f"{address.path}?{address.query}")
        answer = connection.getresponse()
        answer.read()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def log_in(link: str) -> str:
    """Open a link, keep the cookie for its page, and return the page's address."""
    status, headers = open_link(link)
    assert status == 303, (status, headers)
    address = link.partition("/?")[0]
    COOKIES[address] = headers["set-cookie"].partition(";")[0]
    return address


def login_headers(address: str) -> dict[str, str]:
    """Return the headers that a page's calls need; none for a page that was not opened."""
    return {"Cookie": COOKIES[address]} if address in COOKIES else {}
