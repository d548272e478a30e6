"""Reads and sets the number of a StatefulSet's replicas through the Kubernetes API, from within a
pod; needs no Kubernetes package.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from relax_events.errors import ConfigError, EnvironmentProblem

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the token, the authority and the namespace of a pod's service account."""
CALL_SECONDS = 3.0
MAX_RESPONSE_BYTES = 1 << 20
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Replicas:
    """Pods of a StatefulSet.

    Attributes:
        wanted: Number that the StatefulSet should have.
        existing: Number that exist, those that are still ending included.
    """

    wanted: int
    existing: int


class KubernetesClient:
    """Calls the scale subresource of StatefulSets in the pod's namespace. Every call has a deadline
    and reads the token again, since Kubernetes replaces it.
    """

    def __init__(self, url: str, *, account: Path = ACCOUNT) -> None:
        """Prepare calls.

        Args:
            url: Of the API server.
            account: The folder with `token`, `ca.crt` and `namespace`.
        Raises:
            ConfigError: A file is missing: the pod has no service account's token.
        """
        self._url, self._token_file = url, account / "token"
        try:
            self._token()
            self._namespace = (account / "namespace").read_text().strip()
            self._trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise ConfigError(
                f"{account} lacks a file of the pod's service account: {error}; set "
                "automountServiceAccountToken: true in the controller's pod, or unset "
                "scaling.kubernetes_release"
            ) from None

    @classmethod
    def from_pod(cls, environment: Mapping[str, str] = os.environ) -> KubernetesClient:
        """Return the client of this pod.

        Raises:
            ConfigError: This process runs in no pod, or in one without a token.
        """
        host, port = (
            environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT")
        )
        if not host or not port:
            raise ConfigError(
                "scaling.kubernetes_release is set, and this is no pod: KUBERNETES_SERVICE_HOST is "
                "not in the environment; unset scaling.kubernetes_release"
            )
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", account=ACCOUNT)

    def read_replicas(self, name: str) -> Replicas:
        """Return the replicas of a StatefulSet.

        Raises:
            EnvironmentProblem: The API server can't be reached or refuses; the text says why.
        """
        return self._call("GET", name, None)

    def set_replicas(self, name: str, number: int) -> Replicas:
        """Set how many replicas a StatefulSet should have; raises as `read_replicas`."""
        return self._call("PATCH", name, orjson.dumps({"spec": {"replicas": number}}))

    def _token(self) -> str:
        return self._token_file.read_text().strip()

    def _call(self, method: str, name: str, body: bytes | None) -> Replicas:
        if not NAME.fullmatch(name):
            raise ConfigError(f"scaling.kubernetes_release: {name!a} is no name of a StatefulSet")
        path = f"/apis/apps/v1/namespaces/{self._namespace}/statefulsets/{name}/scale"
        what = f"{method} {self._url}{path}"
        try:
            status, answer = self._request(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentProblem(f"{what} failed: {error or type(error).__name__}") from None
        if status != http.HTTPStatus.OK:
            remedy = (
                "; the controller's Role must allow get and patch of statefulsets/scale by name"
                if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)
                else ""
            )
            raise EnvironmentProblem(f"{what} is refused: {status} {_reason(answer)}{remedy}")
        try:
            scale = orjson.loads(answer)
            return Replicas(
                int(scale["spec"].get("replicas", 0)), int(scale["status"].get("replicas", 0))
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            raise EnvironmentProblem(f"{what} returned no scale: {answer[:200]!a}") from None

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        parts = urlsplit(self._url)
        connection = (
            http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=CALL_SECONDS, context=self._trust
            )
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CALL_SECONDS)
        )
        try:
            headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
            if body is not None:
                headers["Content-Type"] = "application/merge-patch+json"
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(MAX_RESPONSE_BYTES)
        finally:
            connection.close()


def _reason(answer: bytes) -> str:
    """Return the message of Kubernetes' Status object, or the start of what was sent instead."""
    try:
        found: Any = orjson.loads(answer)["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        found = answer[:200].decode("latin-1")
    return ascii(str(found))[1:-1][:500]
