"""Hostile servers of environments against the sessions of OpenEnv and MCP."""

from __future__ import annotations

import http.server
import importlib.util
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from relax_events.attacks.attacked_run import build_attacked_run
from relax_events.attacks.doors.environments import SAMPLE_FAILURES, play_session
from relax_events.attacks.environment_server import HUGE, RAW, WELL, HostileServer
from relax_events.attacks.servers import file_observations, wrong_observations
from relax_events.attacks.suite import HELD, Assault, Attack, NotPossible
from relax_events.attacks.targets import Targets
from relax_events.confinement.entry_points import SERVER_SESSIONS
from relax_events.environments.session_pool import SessionPool

RAW_MESSAGES = ("", "{", "[]", "5", '"a"', "{}", '{"data": 5}', '{"data": []}', "\x00")
TIMEOUT_SECONDS = 20.0
NEEDED = {"openenv": "websockets", "mcp": "mcp"}


def server_assaults() -> Iterator[Assault]:
    """Give the assaults of servers of environments."""
    point = SERVER_SESSIONS
    for part, prepare in (("OpenEnv", _prepare), ("redirects", _prepare_redirects)):
        yield Assault(point.name, point.doors, point.profile, prepare, part)


@contextmanager
def _prepare(targets: Targets) -> Iterator[list[Attack]]:
    _require("openenv")
    observations = file_observations(Path(targets.outside["public"])) | wrong_observations()
    named = [*observations, HUGE, *(f"{RAW}{message}" for message in RAW_MESSAGES)]
    with HostileServer(observations).running() as url, _open_pool(url) as pool:
        yield [
            Attack("an honest observation", partial(_expect_well, pool)),
            *(Attack(f"observation: {name}", partial(_fail, pool, name)) for name in named),
        ]


def _require(interface: str) -> None:
    if importlib.util.find_spec(NEEDED[interface]) is None:
        raise NotPossible(f"{NEEDED[interface]} is not installed")


@contextmanager
def _open_pool(address: str, interface: str = "openenv") -> Iterator[SessionPool]:
    if interface == "mcp":
        settings: dict[str, object] = {"tool_servers": {"hostile": {"address": address}}}
    else:
        settings = {"address": address}
    settings |= {"interface": interface, "timeout_seconds": TIMEOUT_SECONDS}
    with tempfile.TemporaryDirectory() as name:
        pool = SessionPool(build_attacked_run(Path(name), environment=settings))
        try:
            yield pool
        finally:
            pool.close()


def _fail(pool: SessionPool, action: str) -> str:
    """The sample fails, and the next session of the same child plays."""
    try:
        reply = play_session(pool, action, {})
    except SAMPLE_FAILURES as error:
        return "the error holds a file" if "TOPSECRET" in str(error) else _expect_well(pool)
    except TimeoutError:
        return "the session hangs"
    return f"the reply was taken: {reply[:100]!r}"


def _expect_well(pool: SessionPool) -> str:
    try:
        reply = play_session(pool, WELL, {})
    except (*SAMPLE_FAILURES, TimeoutError) as error:
        return f"an honest session failed: {error}"
    return HELD if reply == WELL else f"an honest session got {reply[:100]!r}"


@contextmanager
def _prepare_redirects(targets: Targets) -> Iterator[list[Attack]]:
    """Servers that lead to another port, which the profile does not open either."""
    attacks = []
    inner = f"http://127.0.0.1:{targets.outside['port']}/latest/meta-data"
    with redirecting_server(inner) as address:
        for interface in NEEDED:
            _require(interface)
            attacks.append(Attack(f"redirect of {interface}", partial(_open, address, interface)))
        yield attacks


def _open(address: str, interface: str) -> str:
    with _open_pool(address, interface) as pool:
        try:
            play_session(pool, WELL, {})
        except SAMPLE_FAILURES:
            return HELD
    return "the session began"


@contextmanager
def redirecting_server(target: str) -> Iterator[str]:
    """Serve redirects to an address alone, and give the server's own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(307)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET  # noqa: N815  # the library's name

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
