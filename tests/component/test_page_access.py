"""The page's links and cookies: a link works once, in one browser, and nothing is shown without."""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from relax_events.attacks.served_app import serving
from relax_events.cli.dashboard import dashboard
from relax_events.cli.parameters import BrokerOptions
from relax_events.errors import ConfigError
from relax_events.packages.dashboard.access import LINK_SECONDS, PageAccess
from relax_events.packages.dashboard.app import build_app
from relax_events.packages.dashboard.registry import RunRegistry
from tests.page_login import log_in, login_headers, open_link

PAGE = "text/html,application/xhtml+xml"


@dataclass
class Page:
    """A served page of no run."""

    url: str
    access: PageAccess

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str]:
        """Call a route; return the status and the text."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    access = PageAccess(tmp_path)
    app = build_app(cast("RunRegistry", None), access, host="127.0.0.1")
    with serving(app) as url:
        yield Page(url, access)


def test_link_works_once_and_leads_to_the_address_without_the_token(page: Page) -> None:
    link = page.access.create_link(page.url, run_id="a run")
    status, headers = open_link(link)
    assert (status, headers["location"]) == (303, "/?run=a+run")
    cookie = headers["set-cookie"]
    port = page.url.rpartition(":")[2]
    assert cookie.startswith(f"relax-page-{port}=")
    assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(cookie.split("; "))
    assert headers["referrer-policy"] == "no-referrer"
    assert open_link(link)[0] == 401
    secret = cookie.partition(";")[0]
    assert page.get("/", Cookie=secret)[0] == 200
    assert page.get("/?token=used&run=x", Cookie=secret)[0] == 303, "a browser that has a cookie"


@pytest.mark.parametrize("path", ["/", "/static/app.css", "/api/runs", "/api/runs/x/events"])
def test_page_without_a_link_shows_nothing(page: Page, path: str) -> None:
    for headers in ({}, {"Cookie": "relax-page=x"}, {"Authorization": "Bearer x"}):
        status, text = page.get(path, **headers)
        assert status == 401
        assert "relax dashboard --link" in text
    status, text = page.get(path, Accept=PAGE)
    assert (status, text[:15]) == (401, "<!doctype html>")


def test_link_opens_the_first_page_alone(page: Page) -> None:
    link = page.access.create_link(page.url)
    query = link.partition("/?")[2]
    assert page.get(f"/api/runs?{query}")[0] == 401
    assert page.get(f"/?{query}", method="HEAD")[0] == 401
    assert page.get(f"/?{query}", method="POST")[0] == 401
    assert open_link(link)[0] == 303, "none of them has used it up"


def test_cookie_of_another_page_or_of_a_link_is_none(page: Page, tmp_path: Path) -> None:
    log_in(page.access.create_link(page.url))
    name, _, secret = login_headers(page.url)["Cookie"].partition("=")
    token = page.access.create_link(page.url).rpartition("token=")[2]
    for value in (
        f"{name}={secret[:-1]}",
        f"{name}={token}",
        f"{name}=../{secret}",
        f"x{name}={secret}",
    ):
        assert page.get("/", Cookie=value)[0] == 401
    assert page.get("/", Cookie=f"a=b; {name}={secret}")[0] == 200


def test_files_are_for_their_owner_and_hold_no_secret(page: Page, tmp_path: Path) -> None:
    link = page.access.create_link(page.url)
    log_in(page.access.create_link(page.url))
    secrets = [link.rpartition("token=")[2], login_headers(page.url)["Cookie"].partition("=")[2]]
    folder = tmp_path / "page"
    files = list(folder.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 2
    assert not any(secret in str(file) for secret in secrets for file in files)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="must be yours alone"):
        PageAccess(tmp_path)


def test_page_that_starts_again_knows_its_browsers_and_links(page: Page, tmp_path: Path) -> None:
    address = log_in(page.access.create_link(page.url))
    old, fresh = page.access.create_link(page.url), page.access.create_link(page.url)
    (oldest, *_) = sorted(set((tmp_path / "page").glob("link-*")))
    os.utime(oldest, (0, oldest.stat().st_mtime - LINK_SECONDS - 60))
    again = PageAccess(tmp_path)
    again.delete_old()
    with serving(build_app(cast("RunRegistry", None), again, host="127.0.0.1")) as url:
        links = [f"{url}/?{link.partition('/?')[2]}" for link in (old, fresh)]
        assert sorted(open_link(link)[0] for link in links) == [303, 401]
        name, _, secret = login_headers(address)["Cookie"].partition("=")
        port = url.rpartition(":")[2]
        restarted = Page(url, again)
        assert name != f"relax-page-{port}"
        assert restarted.get("/", Cookie=f"relax-page-{port}={secret}")[0] == 200


def test_command_prints_another_link(
    page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = int(page.url.rpartition(":")[2])
    dashboard("mine", port=port, link=True, broker=BrokerOptions(directory=tmp_path))
    link = capsys.readouterr().out.strip()
    assert link.startswith(f"{page.url}/?token=")
    assert open_link(link)[1]["location"] == "/?run=mine"


def test_folder_of_another_account_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The substitute is a folder of this account's name, unless a link stands there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "page").symlink_to(tmp_path / "elsewhere")
    PageAccess(tmp_path).create_link("http://a")
    substitute = tmp_path / f"relax-page-{os.getuid()}"
    assert len(list(substitute.iterdir())) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (*_, file) = substitute.iterdir()
    file.unlink()
    substitute.rmdir()
    substitute.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="are not folders that this account may write"):
        PageAccess(tmp_path)
