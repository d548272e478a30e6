"""The attacks on HTTP servers, against each of ours: none of them has an effect, and the bodies of
callers without a key stay unread.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from gateway_sessions import open_session
from served_app import serving
from served_model import served

from relax_events.attacks.http_requests import Target, http_attacks
from relax_events.config import DataConfig
from relax_events.controller.api import build_app as build_api
from relax_events.controller.scaling_service import ScalingService
from relax_events.dashboard.access import PageAccess
from relax_events.dashboard.app import build_app as build_page
from relax_events.dashboard.registry import RunRegistry
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.examples.tiny_tokenizer import train_tokenizer
from relax_events.gateway.app import build_gateway
from relax_events.gateway.chat_renderer import ChatRenderer
from relax_events.gateway.session_keys import SessionKeys
from relax_events.http.identity import SMALL_BODY_BYTES
from tests.http_attacker import send
from tests.page_login import log_in, login_headers

TOKEN = "a-token-of-this-test"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
MAX_GROWTH_BYTES = 8 * 1024**2


@contextmanager
def attacked_api(_: Path) -> Iterator[tuple[str, Target]]:
    """Serve a run's API, whose service must not be asked."""
    service = cast("ScalingService", None)
    put = lambda task: pytest.fail("a call arrived")  # noqa: E731
    app = build_api(service, put, token=TOKEN, host="127.0.0.1")
    with serving(app) as url:
        yield url, bearer_target(url, "/rollout/scale_out", SMALL_BODY_BYTES)


@contextmanager
def attacked_gateway(folder: Path) -> Iterator[tuple[str, Target]]:
    """Serve a gateway with a session, whose policy must not be asked."""

    async def generate(request: GenerationRequest) -> GeneratedSample:
        pytest.fail("a call arrived")

    (folder / "template.jinja").write_text(TEMPLATE)
    train_tokenizer(["read the file"]).save_pretrained(folder)
    config = DataConfig(source="http", chat_template_file=folder / "template.jinja")
    renderer = ChatRenderer(PromptRenderer.from_folder(folder, config))
    keys = SessionKeys()
    session = open_session(renderer, generate)
    target_key = keys.open(session)
    with serving(build_gateway(keys, model_name="tiny")) as url:
        num_bytes = session.body_bound.num_bytes
        yield url, bearer_target(url, "/v1/chat/completions", num_bytes, key=target_key)
    renderer.close()


@contextmanager
def attacked_page(folder: Path) -> Iterator[tuple[str, Target]]:
    """Serve the page of no run."""
    access = PageAccess(folder)
    app = build_page(cast("RunRegistry", None), access, host="127.0.0.1")
    with serving(app) as url:
        cookie = login_headers(log_in(access.create_link(url)))["Cookie"]
        host = url.removeprefix("http://")
        yield url, Target(host, "/api/runs/x/scale", f"Cookie: {cookie}", SMALL_BODY_BYTES)


@contextmanager
def attacked_model(_: Path) -> Iterator[tuple[str, Target]]:
    """Serve a model, as `relax serve` does."""
    with served(token=TOKEN) as url:
        yield url, bearer_target(url, "/generate", 8 * 1024**2)


def bearer_target(url: str, path: str, num_bytes: int, *, key: str = TOKEN) -> Target:
    """Return a route with a bearer token."""
    return Target(url.removeprefix("http://"), path, f"Authorization: Bearer {key}", num_bytes)


SERVERS = [attacked_api, attacked_gateway, attacked_page, attacked_model]


@pytest.mark.parametrize("attacked", SERVERS)
def test_no_attack_has_an_effect_and_the_server_answers_afterwards(
    attacked: Any, tmp_path: Path
) -> None:
    with attacked(tmp_path) as (url, target):
        port = int(url.rpartition(":")[2])
        attacks = http_attacks(target)
        wrong = {
            attack.name: answer
            for attack in attacks
            if (answer := send(attack, port=port)).status not in attack.statuses
            or answer.num_bytes > attack.max_bytes
        }
        assert wrong == {}
        assert is_answered(url, target)
    assert len({attack.name for attack in attacks}) == len(attacks)


def is_answered(url: str, target: Target) -> bool:
    """Return whether a call with the key gets as far as the application."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    name, _, value = target.key.partition(": ")
    connection.request("GET", "/none", headers={name: value})
    status = connection.getresponse().status
    connection.close()
    return status == 404


@pytest.mark.parametrize("attacked", SERVERS)
def test_bodies_without_a_key_cost_no_memory(attacked: Any, tmp_path: Path) -> None:
    """Twenty bodies of 64 MB, one after the other: the first ones warm up what is allocated once."""
    with attacked(tmp_path) as (url, target):
        port = int(url.rpartition(":")[2])
        unread = [one for one in http_attacks(target) if 401 in one.statuses and one.body]
        for attack in unread:
            send(attack, port=port)
        before = psutil.Process().memory_info().rss
        for _ in range(5):
            for attack in unread[:4]:
                assert send(attack, port=port).status == 401
        assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
