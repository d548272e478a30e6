"""Request an image's digest from its registry, by the HTTP API of all registries, as docker does.

Source: OCI distribution specification 1.1, "Pulling manifests"; Docker's "Token authentication
specification".
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from email.message import Message
from hashlib import sha256
from http.client import HTTPException
from ipaddress import ip_address
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

from tests.stack.container_engine import StackError

HUB, HUB_API, HUB_LOGIN = "docker.io", "registry-1.docker.io", "https://index.docker.io/v1/"
LISTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
SINGLE = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""Manifest types whose digest is that of their bytes; older ones are signed, and rejected."""
MANIFEST_BYTES = 4 << 20
"""Maximum size to read; the specification requires registries to support it."""
REQUEST_SECONDS = 30.0
UNAUTHORIZED = 401
PARAMETER = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class ImageName:
    """An image name: registry, repository and tag, parsed as docker does."""

    registry: str
    repository: str
    tag: str

    @classmethod
    def of(cls, name: str) -> ImageName:
        """Parse a name such as `apache/kafka:4.3.1`, which is on Docker Hub, or
        `ghcr.io/kafbat/kafka-ui:v1.3.0`.
        """
        first, slash, rest = name.partition("/")
        is_registry = bool(slash) and (first == "localhost" or "." in first or ":" in first)
        registry, path = (first, rest) if is_registry else (HUB, name)
        repository, _, tag = path.partition(":")
        return cls(
            registry,
            repository if registry != HUB or "/" in repository else f"library/{repository}",
            tag or "latest",
        )

    @property
    def url(self) -> str:
        """URL of the manifest; plain http only on the loopback interface."""
        host = HUB_API if self.registry == HUB else self.registry
        return f"{'http' if _is_loopback(host) else 'https'}://{host}/v2/{self.repository}/manifests/{self.tag}"


def fetch_digest(name: str) -> str:
    """Return the digest of a tag in its registry: of the list of all platforms, if there is one.

    Raises:
        StackError: The registry can't be reached, refuses, or returns a manifest with a different
            digest.
    """
    image = ImageName.of(name)
    body, headers = _manifest(image)
    kind = headers.get_content_type()
    if kind not in LISTS + SINGLE:
        raise StackError(
            f"{name}: {image.url} is a {kind}, and no manifest of an image; is a proxy in between?"
        )
    digest = f"sha256:{sha256(body).hexdigest()}"
    named = headers.get("Docker-Content-Digest", digest)
    if named != digest:
        raise StackError(
            f"{name}: {image.url} has the digest {digest}, and its registry names {named}; "
            "do not use it"
        )
    return digest


def _manifest(image: ImageName) -> tuple[bytes, Message]:
    """Request a manifest, with a token or a login if the registry requires one."""
    try:
        return _request(image.url)
    except HTTPError as error:
        if error.code != UNAUTHORIZED:
            raise StackError(f"{image.url}: {error}") from error
        challenge = error.headers.get("WWW-Authenticate", "")
    except (OSError, HTTPException) as error:
        raise StackError(f"{image.url}: {error}") from error
    try:
        return _request(image.url, _authorization(challenge, image))
    except (OSError, HTTPException) as error:
        raise StackError(
            f"{image.url}: {error}, with what `docker login {image.registry}` has left, if anything"
        ) from error


def _request(url: str, authorization: str = "") -> tuple[bytes, Message]:
    request = Request(url, headers={"Accept": ", ".join(LISTS + SINGLE)})
    if authorization:
        request.add_unredirected_header("Authorization", authorization)  # not sent to another host
    with urlopen(request, timeout=REQUEST_SECONDS) as answer:
        body: bytes = answer.read(MANIFEST_BYTES + 1)
        if len(body) > MANIFEST_BYTES:
            raise StackError(
                f"{url}: a manifest has at most {MANIFEST_BYTES} bytes, and this answer has more"
            )
        return body, answer.headers


def _authorization(challenge: str, image: ImageName) -> str:
    """Answer a registry's challenge: by a token of the server that it names, or by the login that
    docker keeps.
    """
    scheme, _, rest = challenge.partition(" ")
    login = _login(image.registry)
    if scheme.lower() == "basic" and login:
        return f"Basic {login}"
    asked = dict(PARAMETER.findall(rest))
    realm = asked.get("realm", "")
    if scheme.lower() != "bearer" or not (
        realm.startswith("https://") or _is_loopback(urlsplit(realm).netloc)
    ):
        raise StackError(
            f"{image.url} asks for {challenge or 'a login'!r}; log in with `docker login "
            f"{image.registry}`"
        )
    wanted = {"service": asked.get("service", ""), "scope": f"repository:{image.repository}:pull"}
    body, _ = _request(f"{realm}?{urlencode(wanted)}", f"Basic {login}" if login else "")
    return f"Bearer {_token(body, realm)}"


def _token(body: bytes, realm: str) -> str:
    try:
        given = json.loads(body)
        token: str = given.get("token") or given["access_token"]
    except (ValueError, AttributeError, KeyError) as error:
        raise StackError(
            f"{realm} gives no token, where an image's registry says that it does: {body[:100]!r}"
        ) from error
    return token


def _login(registry: str) -> str:
    """Return the login that `docker login` has left in its file, encoded; nothing where it keeps
    logins elsewhere.
    """
    file = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    auths = json.loads(file.read_text()).get("auths", {}) if file.exists() else {}
    login: str = auths.get(HUB_LOGIN if registry == HUB else registry, {}).get("auth", "")
    return login


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] or host
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"
