"""HTTPS of our servers, and the refusal to send tokens in clear beyond this machine."""

from __future__ import annotations

import http.client
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from engine_requests import tiny_model
from sglang_servers import BOUNDS
from small_settings import small_run

from relax_events.attacks.served_app import serving
from relax_events.config import EngineConfig, HttpConfig, ModelConfig, RunConfig, SGLangConfig
from relax_events.controller.api_client import ScaleClient
from relax_events.controller.api_server import ApiEndpointFile, ApiServer, require_api_port
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.controller.scaling_service import MainThreadTask, ScalingService
from relax_events.engines.sglang.server import SGLangServer
from relax_events.errors import CheckFailed, ConfigError, EnvironmentProblem
from relax_events.http.guard import RequestGuard
from relax_events.http.identity import Identity, identify_by_token
from relax_events.http.tls import TlsFiles, choose_run_tls, choose_tls, open_client_context
from relax_events.kafka.security.certificates import make_authority, make_broker_certificate
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.machine_checks import check_harness_address
from relax_events.packages.dashboard.access import PageAccess
from relax_events.packages.dashboard.app import build_app as build_page
from relax_events.packages.dashboard.registry import RunRegistry
from relax_events.packages.gateway.server import GatewayServer
from relax_events.packages.gateway.session_keys import SessionKeys
from relax_events.projections.scaling import ScaleState
from tests.unit.run_events import run_config

DAY = timedelta(days=1)
NAMES = "a.certificate", "a.key", "a.plain"


@dataclass(frozen=True)
class Files:
    """A certificate of 127.0.0.1, and its authority."""

    tls: TlsFiles
    ca_file: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority = make_authority(lifetime=DAY)
    pair = make_broker_certificate(authority, ["127.0.0.1"], lifetime=DAY)
    found = Files(TlsFiles(folder / "server.pem", folder / "server.key"), folder / "ca.pem")
    found.tls.certificate.write_bytes(pair.certificate)
    found.tls.key.write_bytes(pair.key)
    found.ca_file.write_bytes(authority.certificate)
    return found


def with_tls(config: RunConfig, files: Files, **sections: Any) -> RunConfig:
    """Return a run whose servers speak HTTPS."""
    settings = {"certificate_file": files.tls.certificate, "key_file": files.tls.key}
    return small_run(
        config.model_dump() | {"http": settings | {"ca_file": files.ca_file}} | sections
    )


def test_scaling_api_and_its_client_speak_https(tmp_path: Path, files: Files) -> None:
    config = with_tls(run_config(tmp_path), files)
    bounds = ScalingBounds.from_config(config, is_supervised=True)
    service = ScalingService(ScaleState(), bounds, lambda _: None, record=lambda _: None)
    put: Callable[[MainThreadTask[Any]], None] = lambda task: task.run()  # noqa: E731
    with closing(ApiServer(config, service, put)) as server:
        token = ApiEndpointFile.from_config(config).read_token()
        assert server.url.startswith("https://127.0.0.1:")
        found = ScaleClient(server.url, token, files.ca_file).call("GET", "engines")
        assert found["total_engines"] == 0 or found["models"]
        with pytest.raises(CheckFailed, match="certificate verify failed"):
            ScaleClient(server.url, token).call("GET", "engines")
        with pytest.raises(CheckFailed):
            ScaleClient(server.url.replace("https", "http"), token).call("GET", "engines")


def test_gateway_speaks_https(files: Files) -> None:
    server = GatewayServer(SessionKeys(), model_name="tiny", tls=files.tls)
    try:
        assert server.url.startswith("https://127.0.0.1:")
        connection = http.client.HTTPSConnection(
            server.url.removeprefix("https://"),
            context=open_client_context(files.ca_file, name="a.file"),
            timeout=60,
        )
        connection.request("GET", "/v1/models", headers={"x-api-key": "none"})
        assert connection.getresponse().status == 401
        connection.close()
    finally:
        server.close()


async def answer_with_an_old_version(_: Any, receive: Any, send: Any) -> None:
    """Answer every call as an SGLang server that is too old."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"version": "0.0"}'})


def test_engine_attaches_to_a_server_over_https_with_its_token(
    tmp_path: Path, files: Files
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    app = RequestGuard(
        answer_with_an_old_version,
        problem=lambda _, status, text: text.encode(),
        host="127.0.0.1",
        identify=identify_by_token("secret", Identity(name="engine")),
    )
    with serving(app, tls=files.tls) as url:
        cases: tuple[tuple[dict[str, Any], str], ...] = (
            ({"start_seconds": 2.0}, "was not ready within"),
            ({"ca_file": files.ca_file}, "requires a token"),
            ({"ca_file": files.ca_file, "token_file": token_file}, "works with SGLang"),
        )
        for settings, text in cases:
            sglang = SGLangConfig(urls=(url,), **settings)
            config = EngineConfig(threads=1, **BOUNDS, sglang=sglang)
            model = ModelConfig(dtype="float32", path=tiny_model())
            with pytest.raises((ConfigError, EnvironmentProblem), match=text):
                SGLangServer(tiny_model(), config=config, model=model)


def test_cookie_of_the_page_is_for_https_alone(tmp_path: Path, files: Files) -> None:
    access = PageAccess(tmp_path)
    app = build_page(cast("RunRegistry", None), access, host="127.0.0.1")
    with serving(app, tls=files.tls) as url:
        context = ssl.create_default_context(cafile=files.ca_file)
        connection = http.client.HTTPSConnection(url.removeprefix("https://"), context=context)
        connection.request("GET", access.create_link(url).removeprefix(url))
        answer = connection.getresponse()
        assert answer.status == 303
        assert "; Secure" in (answer.getheader("set-cookie") or "")
        connection.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "", "10.0.0.7", "node-7"])
def test_plain_http_beyond_this_machine_needs_a_word(host: str, files: Files) -> None:
    plain: dict[str, Any] = {"certificate": None, "key": None, "names": NAMES}
    with pytest.raises(ConfigError, match=r"set a\.certificate and a\.key, or a\.plain where"):
        choose_tls(host, accepts_plain=False, **plain)
    assert choose_tls(host, accepts_plain=True, **plain) is None
    assert choose_tls("127.0.0.1", accepts_plain=False, **plain) is None


def test_wrong_files_are_refused_before_anything_is_served(tmp_path: Path, files: Files) -> None:
    certificate, key = files.tls.certificate, files.tls.key
    for first, second in ((key, certificate), (certificate, tmp_path / "none"), (key, key)):
        with pytest.raises(ConfigError, match="can't be used: "):
            choose_run_tls(HttpConfig(certificate_file=first, key_file=second), "127.0.0.1")
    with pytest.raises(ConfigError, match="belong together, and one is missing"):
        choose_run_tls(HttpConfig(certificate_file=certificate), "127.0.0.1")
    with pytest.raises(ConfigError, match=r"engine\.ca = .*can't be used"):
        open_client_context(tmp_path / "none", name="engine.ca")


def test_run_is_refused_before_it_starts(tmp_path: Path, files: Files) -> None:
    everywhere = {"scaling": {"host": "0.0.0.0", "api": "on"}}
    tree = run_config(tmp_path).model_dump()
    with pytest.raises(ConfigError, match=r"set http\.certificate_file and http\.key_file"):
        require_api_port(small_run(tree | everywhere))
    assert require_api_port(small_run(tree | everywhere | {"http": {"accept_plain": True}}))
    assert "HTTPS" in require_api_port(with_tls(run_config(tmp_path), files, **everywhere))
    harness = {"host": "10.0.0.7", "port": 8400, "token_file": tmp_path / "token"}
    environment = {"environment": tree["environment"] | {"harness": harness}}
    with pytest.raises(ConfigError, match="tokens would cross the network in clear"):
        check_harness_address(CheckedRun(small_run(tree | environment)))
    assert (
        check_harness_address(CheckedRun(small_run(tree))) == "none: environment.harness.port = 0"
    )


def test_serve_command_refuses_plain_http_for_other_machines(tmp_path: Path) -> None:
    words = ["serve", str(tiny_model()), "--host", "0.0.0.0"]
    refused = subprocess.run(
        [sys.executable, "-m", "relax_events.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert refused.returncode == 2
    assert "set --certificate-file and --key-file, or --accept-plain" in refused.stderr
    assert not (tmp_path / ".relax").exists(), "no token was made"
