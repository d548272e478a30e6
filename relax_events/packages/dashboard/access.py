"""Who may see the page: browsers that opened a link which the run's account has printed.

    relax run, relax dashboard, relax dashboard --link --> a link, which works once
    browser: GET /?token=TOKEN --> the link is used up --> cookie --> /

Links and cookies are empty files in a folder that only their owner may read, named by the digest of
the secret. So any process of this account can print a link, and a page that starts again knows its
browsers. The cookie is of one port: browsers send it to all ports of a host.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import parse_qs, urlencode

from relax_events.api.errors import ConfigError
from relax_events.api.http import Identity, RequestHead

FOLDER = "page"
TOKEN_BYTES = 16
"""128 bits can't be guessed, and the link fits a line of a terminal."""
LINK_SECONDS, COOKIE_SECONDS = 24 * 3600, 30 * 24 * 3600
"""Unused links and cookies are deleted after this, when a page starts."""
NO_LINK = (
    "this page is for the account that started it: open the link that relax printed, which works "
    "once; print another one with: relax dashboard --link"
)
SECRET = re.compile("[A-Za-z0-9_-]{20,100}")
READER = Identity(name="reader", max_connections=256)
LINK = Identity(name="link")


class PageAccess:
    """See the module's docstring."""

    def __init__(self, directory: Path) -> None:
        """Open the folder; create it where it is missing.

        Args:
            directory: Of the runs. Where it can't be written, or another account serves pages from
                it, a folder among the temporary files takes its place.
        Raises:
            ConfigError: Other accounts may read the folder, or there is none.
        """
        self._folder = _open_folder(directory)
        self._known: set[str] = set()

    def create_link(self, url: str, *, run_id: str = "") -> str:
        """Return an address that opens the page once.

        Args:
            url: Of the page.
            run_id: The run that it opens with; empty for the newest.
        """
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._write(f"link-{_digest(token)}")
        return f"{url}/?{urlencode({'token': token} | ({'run': run_id} if run_id else {}))}"

    def redeem(self, token: str) -> str:
        """Use a link up, and return the secret of a new cookie; empty where there is no such link,
        or no longer.
        """
        try:
            (self._folder / f"link-{_digest(token)}").unlink()
        except FileNotFoundError:
            return ""
        cookie = secrets.token_urlsafe(TOKEN_BYTES)
        self._write(f"cookie-{_digest(cookie)}")
        return cookie

    def identify(self, head: RequestHead) -> Identity | None:
        """Return who makes a request; see `http.identity.Identify`."""
        if self._knows(find_cookie(head)):
            return READER
        if (head.method, head.path) != ("GET", "/"):
            return None
        (token, *_) = parse_qs(head.query).get("token", [""])
        is_link = SECRET.fullmatch(token) and (self._folder / f"link-{_digest(token)}").exists()
        return LINK if is_link else None

    def delete_old(self) -> None:
        """Delete links and cookies that are past their time."""
        for prefix, seconds in (("link", LINK_SECONDS), ("cookie", COOKIE_SECONDS)):
            for file in self._folder.glob(f"{prefix}-*"):
                with suppress(FileNotFoundError):  # another page deletes too
                    if time.time() - file.stat().st_mtime > seconds:
                        file.unlink()

    def _knows(self, cookie: str) -> bool:
        if not SECRET.fullmatch(cookie):
            return False
        name = f"cookie-{_digest(cookie)}"
        if name not in self._known and (self._folder / name).exists():
            self._known.add(name)
        return name in self._known

    def _write(self, name: str) -> None:
        os.close(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def cookie_name(head: RequestHead) -> str:
    """Return the name of the cookie of the port that a browser sees."""
    port = head.headers.get("host", "").rpartition(":")[2]
    return f"relax-page-{port}" if port.isdecimal() else "relax-page"


def find_cookie(head: RequestHead) -> str:
    """Return the secret of a request's cookie; empty without one."""
    for pair in head.headers.get("cookie", "").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == cookie_name(head):
            return value
    return ""


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def _open_folder(directory: Path) -> Path:
    for folder in (directory / FOLDER, Path(tempfile.gettempdir()) / f"relax-page-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        facts = folder.lstat()
        if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
            continue
        if facts.st_mode & 0o077:
            raise ConfigError(
                f"{folder} has mode {facts.st_mode & 0o777:o}: it must be yours alone (0700), "
                "since it opens the page; delete it"
            )
        if os.access(folder, os.W_OK):
            return folder
    raise ConfigError(
        f"{directory / FOLDER} and its substitute among the temporary files are not folders that "
        "this account may write; set run.directory to one"
    )
