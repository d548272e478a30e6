"""Calls a run's API from the command line."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from relax_events.errors import CheckFailed, ConfigError
from relax_events.http.tls import open_client_context
from relax_events.session.change_audit import describe_account

CALL_SECONDS = 15.0
"""Longer than the controller may take to respond."""
CALLER_HEADER = "X-Relax-Caller"
"""What a client says of itself, for the record of changes."""
USAGE = (400, 401, 404, 422)


@dataclass(frozen=True, slots=True)
class ScaleClient:
    """A client of a run's API: its address, the token, and the authority that it trusts; None
    takes the authorities of this machine.
    """

    url: str
    token: str
    ca_file: Path | None = None

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, key: str = ""
    ) -> dict[str, Any]:
        """Call a route under `/rollout` and return its response.

        Raises:
            ConfigError: The call is rejected for its arguments.
            CheckFailed: The API does not respond, or another request must finish first.
        """
        headers = {
            "Authorization": f"Bearer {self.token}",
            "Content-Type": "application/json",
            CALLER_HEADER: ascii(describe_account())[1:-1],
        } | ({"Idempotency-Key": key} if key else {})
        content = None if body is None else orjson.dumps(body)
        url = f"{self.url}/rollout/{path}"
        request = urllib.request.Request(  # noqa: S310 the run's own controller
            url, data=content, headers=headers, method=method
        )
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # no proxy may see the token
            urllib.request.HTTPSHandler(
                context=open_client_context(self.ca_file, name="http.ca_file")
            ),
        )
        try:
            with opener.open(request, timeout=CALL_SECONDS) as response:
                body_read: dict[str, Any] = orjson.loads(response.read())
                return body_read
        except urllib.error.HTTPError as refusal:
            text = _message(refusal.read())
            raise (ConfigError if refusal.code in USAGE else CheckFailed)(
                f"{self.url} rejected the call ({refusal.code}): {text}"
            ) from None
        except (OSError, orjson.JSONDecodeError) as error:
            why = getattr(error, "reason", error)
            raise CheckFailed(
                f"{self.url} does not answer: {why}; the run has ended, or its controller "
                "starts again"
            ) from None


def _message(content: bytes) -> str:
    try:
        return str(orjson.loads(content)["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return content.decode(errors="replace")[:200]
