"""Hostile requests against the product's HTTP servers, each served on a free port of 127.0.0.1."""

from __future__ import annotations

import http.client
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

from relax_events.attacks.attacked_run import build_tiny_model
from relax_events.attacks.gateway_session import open_session
from relax_events.attacks.http_requests import CLOSED, HttpAttack, Target, http_attacks
from relax_events.attacks.http_sender import send
from relax_events.attacks.served_app import serving
from relax_events.attacks.suite import HELD, Assault, Attack
from relax_events.attacks.targets import Targets
from relax_events.config import DataConfig, EngineConfig, ModelConfig
from relax_events.confinement.entry_points import GATEWAY, MODEL_SERVER, PAGE, RUN_API, BoundedPoint
from relax_events.http.identity import SMALL_BODY_BYTES

TOKEN = "a-token-of-this-attack"  # noqa: S105  of no account
SECONDS = 60.0
Serve = Callable[[Path], AbstractContextManager[tuple[str, Target]]]


class CallArrived(AssertionError):
    """A call reached the application behind a server, although each must be refused before."""


def http_assaults() -> Iterator[Assault]:
    """Give the assaults on the HTTP servers."""
    for point, serve in SERVERS.items():
        yield Assault(point.name, point.doors, "bounds", partial(_prepare, serve))


@contextmanager
def _prepare(serve: Serve, _: Targets) -> Iterator[list[Attack]]:
    with tempfile.TemporaryDirectory() as name, serve(Path(name)) as (url, target):
        yield [
            *(Attack(one.name, partial(_send, one, url)) for one in http_attacks(target)),
            Attack("a right call after all of them", partial(_call, url, target)),
        ]


def _send(attack: HttpAttack, url: str) -> str:
    answer = send(attack, port=urlsplit(url).port or 0)
    if answer.status not in attack.statuses:
        what = "closed the connection" if answer.status == CLOSED else f"status {answer.status}"
        return f"{what} instead of {sorted(attack.statuses)}"
    if answer.num_bytes > attack.max_bytes:
        return f"{answer.num_bytes} bytes of the body were taken, and {attack.max_bytes} may be"
    return HELD


def _call(url: str, target: Target) -> str:
    """A call with the key gets as far as the application."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SECONDS)
    name, _, value = target.key.partition(": ")
    connection.request("GET", "/none", headers={name: value})
    status = connection.getresponse().status
    connection.close()
    return HELD if status == http.client.NOT_FOUND else f"status {status}"


def bearer_target(url: str, path: str, num_bytes: int, *, key: str = TOKEN) -> Target:
    """Return a route with a bearer token."""
    return Target(url.removeprefix("http://"), path, f"Authorization: Bearer {key}", num_bytes)


def _refuse_call(*_: object) -> NoReturn:
    raise CallArrived


@contextmanager
def serve_api(_: Path) -> Iterator[tuple[str, Target]]:
    """Serve a run's API, whose service must not be asked."""
    from relax_events.controller.api import build_app

    app = build_app(cast("Any", None), _refuse_call, token=TOKEN, host="127.0.0.1")
    with serving(app) as url:
        yield url, bearer_target(url, "/rollout/scale_out", SMALL_BODY_BYTES)


@contextmanager
def serve_gateway(folder: Path) -> Iterator[tuple[str, Target]]:
    """Serve a gateway with a session, whose policy must not be asked."""
    from relax_events.data.rendering import PromptRenderer
    from relax_events.packages.gateway.app import build_gateway
    from relax_events.packages.gateway.session_keys import SessionKeys

    async def generate(_: object) -> NoReturn:
        raise CallArrived

    path = build_tiny_model(folder / "model")
    renderer = PromptRenderer.from_folder(path, DataConfig(source="http"))
    keys, session = SessionKeys(), open_session(renderer, generate)
    key, num_bytes = keys.open(session), session.body_bound.num_bytes
    with serving(build_gateway(keys, model_name="tiny")) as url:
        yield url, bearer_target(url, "/v1/chat/completions", num_bytes, key=key)
    session.queue.close()


@contextmanager
def serve_page(folder: Path) -> Iterator[tuple[str, Target]]:
    """Serve the dashboard of no run."""
    from relax_events.packages.dashboard.access import PageAccess
    from relax_events.packages.dashboard.app import build_app

    access = PageAccess(folder)
    with serving(build_app(cast("Any", None), access, host="127.0.0.1")) as url:
        cookie = _open_link(access.create_link(url))
        host = url.removeprefix("http://")
        yield url, Target(host, "/api/runs/x/scale", f"Cookie: {cookie}", SMALL_BODY_BYTES)


def _open_link(link: str) -> str:
    """Open a link as a browser does, and return the cookie."""
    address = urlsplit(link)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=SECONDS)
    connection.request("GET", f"{address.path}?{address.query}")
    answer = connection.getresponse()
    connection.close()
    return str(answer.getheader("set-cookie")).partition(";")[0]


@contextmanager
def serve_model(folder: Path) -> Iterator[tuple[str, Target]]:
    """Serve a model, as `relax serve` does."""
    from relax_events.packages.gateway.model_app import build_model_app
    from relax_events.packages.gateway.sampling import CallSampling
    from relax_events.packages.gateway.served_model import ServedModel
    from relax_events.packages.gateway.token_route import PATH

    path = build_tiny_model(folder / "model")
    settings = ModelConfig(dtype="float32", path=path, device="cpu")
    engine = EngineConfig(threads=1, max_running_samples=4, max_context_tokens=512)
    model = ServedModel(settings, engine, name="tiny")
    num_bytes = model.open_session(CallSampling()).body_bound.num_bytes
    with serving(build_model_app(model, engine, token=TOKEN)) as url:
        yield url, bearer_target(url, PATH, num_bytes)


SERVERS: dict[BoundedPoint, Serve] = {
    RUN_API: serve_api,
    GATEWAY: serve_gateway,
    PAGE: serve_page,
    MODEL_SERVER: serve_model,
}
"""How each server is started, with a call of it that is attacked."""
