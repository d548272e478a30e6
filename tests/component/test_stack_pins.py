"""Images are pinned by the digests that registries return: of the multi-platform index, by token or
login, and only if the digest matches.
"""

from __future__ import annotations

import base64
import json
import re
import socket
from pathlib import Path

import pytest
from image_registry import LIST, MANIFEST, SIGNED, TOKEN, ImageRegistry, serve_images
from stack import pins

from tests.stack.container_engine import StackError, read_pins
from tests.stack.registry import ImageName, fetch_digest

LOGIN = "reader:a password"
BASIC = f"Basic {base64.b64encode(LOGIN.encode()).decode()}"


@pytest.fixture(autouse=True)
def docker_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


def log_in(folder: Path, registry: str) -> None:
    (folder / "config.json").write_text(
        json.dumps({"auths": {registry: {"auth": BASIC.removeprefix("Basic ")}}})
    )


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (
            "debian:bookworm-slim",
            "https://registry-1.docker.io/v2/library/debian/manifests/bookworm-slim",
        ),
        ("apache/kafka:4.3.1", "https://registry-1.docker.io/v2/apache/kafka/manifests/4.3.1"),
        (
            "docker.io/apache/kafka:4.3.1",
            "https://registry-1.docker.io/v2/apache/kafka/manifests/4.3.1",
        ),
        ("ghcr.io/kafbat/kafka-ui:v1.3.0", "https://ghcr.io/v2/kafbat/kafka-ui/manifests/v1.3.0"),
        ("registry.example:5000/a/b/c", "https://registry.example:5000/v2/a/b/c/manifests/latest"),
        ("localhost:5000/kafka:4", "http://localhost:5000/v2/kafka/manifests/4"),
    ],
)
def test_image_name_is_parsed_as_docker_parses_it(name: str, url: str) -> None:
    assert ImageName.of(name).url == url


@pytest.mark.parametrize("kind", [LIST, "application/vnd.oci.image.index.v1+json"])
def test_multi_platform_image_is_pinned_by_the_digest_of_its_index(kind: str) -> None:
    with serve_images() as registry:
        digest = registry.put_image("apache/kafka", "4.3.1", kind=kind)
        assert fetch_digest(f"{registry.host}/apache/kafka:4.3.1") == digest


def test_single_platform_image_is_pinned_by_the_digest_of_its_manifest() -> None:
    with serve_images() as registry:
        digest = registry.put("made/here", "1", MANIFEST, {"schemaVersion": 2})
        assert fetch_digest(f"{registry.host}/made/here:1") == digest


@pytest.mark.parametrize("key", ["token", "access_token"])
def test_token_is_fetched_where_the_registry_asks_for_one(key: str) -> None:
    with serve_images(asks="token", token_key=key) as registry:
        digest = registry.put_image("apache/kafka", "4.3.1")
        assert fetch_digest(f"{registry.host}/apache/kafka:4.3.1") == digest
        path = "/v2/apache/kafka/manifests/4.3.1"
        assert registry.requests == [(path, ""), ("/token", ""), (path, f"Bearer {TOKEN}")]


def test_docker_login_authenticates_at_token_server_and_registry(docker_folder: Path) -> None:
    for asks in ("token", "password"):
        with serve_images(asks=asks, login=LOGIN) as registry:
            digest = registry.put_image("own/image", "1")
            with pytest.raises(StackError, match=f"docker login {registry.host}"):
                fetch_digest(f"{registry.host}/own/image:1")
            log_in(docker_folder, registry.host)
            assert fetch_digest(f"{registry.host}/own/image:1") == digest


def test_login_is_not_sent_to_a_host_the_registry_redirects_to(docker_folder: Path) -> None:
    with (
        serve_images() as elsewhere,
        serve_images(asks="password", login=LOGIN, redirect=f"http://{elsewhere.host}") as registry,
    ):
        digest = elsewhere.put_image("own/image", "1")
        log_in(docker_folder, registry.host)
        assert fetch_digest(f"{registry.host}/own/image:1") == digest
        assert elsewhere.requests == [("/v2/own/image/manifests/1", "")]


def test_login_is_not_sent_to_a_token_server_without_https(docker_folder: Path) -> None:
    with serve_images(asks="token", realm="http://tokens.example/token") as registry:
        registry.put_image("own/image", "1")
        log_in(docker_folder, registry.host)
        with pytest.raises(
            StackError, match=r"asks for 'Bearer realm=\"http://tokens.example/token\""
        ):
            fetch_digest(f"{registry.host}/own/image:1")


@pytest.mark.parametrize("given", ["<html>", "[]", "{}"])
def test_error_names_token_server_that_returns_no_token(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageRegistry, "token_answer", given.encode())
    with serve_images(asks="token") as registry:
        registry.put_image("own/image", "1")
        with pytest.raises(StackError, match=f"http://{registry.host}/token gives no token"):
            fetch_digest(f"{registry.host}/own/image:1")


def test_digest_that_does_not_match_the_manifest_bytes_is_rejected() -> None:
    other = "sha256:" + "ab" * 32
    with serve_images(named_digest=other) as registry:
        digest = registry.put_image("apache/kafka", "4.3.1")
        with pytest.raises(
            StackError,
            match=f"has the digest {digest}, and its registry names {other}; do not use it",
        ):
            fetch_digest(f"{registry.host}/apache/kafka:4.3.1")


@pytest.mark.parametrize("kind", [SIGNED, "text/html"])
def test_unsupported_manifest_type_is_rejected(kind: str) -> None:
    with serve_images() as registry:
        registry.put("old/image", "1", kind, {"schemaVersion": 1})
        with pytest.raises(
            StackError, match=f"is a {re.escape(kind)}, and no manifest of an image"
        ):
            fetch_digest(f"{registry.host}/old/image:1")


def test_manifest_above_the_size_limit_is_rejected() -> None:
    with serve_images() as registry:
        registry.put("large/image", "1", MANIFEST, {"layers": "x" * (5 << 20)})
        with pytest.raises(StackError, match="a manifest has at most 4194304 bytes"):
            fetch_digest(f"{registry.host}/large/image:1")


def test_error_names_missing_image_tag_or_registry() -> None:
    with (
        serve_images() as registry,
        pytest.raises(StackError, match=r"/v2/apache/kafka/manifests/9: HTTP Error 404"),
    ):
        fetch_digest(f"{registry.host}/apache/kafka:9")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(StackError, match=f"http://127.0.0.1:{port}/v2/a/manifests/1: .*refused"):
        fetch_digest(f"127.0.0.1:{port}/a:1")


def test_pins_match_the_chosen_images_and_are_written_only_if_all_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "images.env"
    monkeypatch.setattr(pins, "PINS_FILE", file)
    with serve_images(asks="token") as registry:
        variables = pins.read_third_party_images()
        digests = {}
        for number, variable in enumerate(variables):
            digests[variable] = registry.put_image("copies/image", f"{number}.0")
            monkeypatch.setenv(variable, f"{registry.host}/copies/image:{number}.0")
        monkeypatch.setenv("BASE_IMAGE", pinned := "debian@sha256:" + "cd" * 32)
        pins.write_pins()
        wanted = {
            variable: f"{registry.host}/copies/image@{digest}"
            for variable, digest in digests.items()
        } | {"BASE_IMAGE": pinned}
        assert read_pins(file) == wanted
        monkeypatch.setenv("KAFKA_IMAGE", f"{registry.host}/copies/image:none")
        with pytest.raises(StackError, match="404"):
            pins.write_pins()
        assert read_pins(file) == wanted
