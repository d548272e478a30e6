"""Send requests to a service over HTTP, with timeout, retries and a connection pool. Only this
module imports the HTTP client.
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import lru_cache
from typing import Any

from relax_events.config.addresses import is_in_clear
from relax_events.errors import EnvironmentProblem, RewardError

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 8.0
RETRYABLE_STATUS_CODES = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_CONNECTIONS = 64


def import_client() -> Any:
    """Import the HTTP client.

    Raises:
        EnvironmentProblem: It is not installed.
    """
    try:
        import httpx2
    except ImportError as error:
        raise EnvironmentProblem(
            f"this reward calls a service, which needs httpx2 ({error}); install "
            "relax-events[rewards]"
        ) from None
    return httpx2


async def post_json(
    url: str,
    body: dict[str, Any],
    *,
    seconds: float = 30.0,
    retries: int = 3,
    token_variable: str = "",
    pause_seconds: float = FIRST_PAUSE_SECONDS,
) -> Any:
    """Send a JSON document and return the one that comes back.

    Connection errors, timeouts and the status codes of a busy or failing service are retried after
    a doubling pause; other errors are final.

    Args:
        url: URL of the service.
        body: JSON document to send.
        seconds: Timeout of one attempt.
        retries: Number of further attempts.
        token_variable: Name of the environment variable that holds the bearer token; empty sends
            none.
        pause_seconds: Pause before the second attempt.
    Raises:
        RewardError: The service did not respond with JSON, with its last error; or the token would
            leave this machine unencrypted.
    """
    if token_variable and is_in_clear(url):
        raise RewardError(
            f"the token in {token_variable} would be sent unencrypted to {url}; take an "
            "https address, or leave token_variable out"
        )
    client, problem = _client(), ""
    headers = (
        {"Authorization": f"Bearer {os.environ.get(token_variable, '')}"} if token_variable else {}
    )
    for attempt in range(retries + 1):
        if attempt:
            await asyncio.sleep(
                min(pause_seconds * 2 ** (attempt - 1), MAX_PAUSE_SECONDS)
                * random.uniform(0.5, 1.0)  # noqa: S311 spreads the load
            )
        try:
            response = await client.post(url, json=body, headers=headers, timeout=seconds)
        except import_client().TransportError as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if response.status_code not in RETRYABLE_STATUS_CODES:
            return _parse_response(url, response)
        problem = f"status {response.status_code}"
    raise RewardError(
        f"{url} failed {retries + 1} time(s), at last with {problem}; is the service up?"
    )


def _parse_response(url: str, response: Any) -> Any:
    if not response.is_success:
        raise RewardError(
            f"{url} refused with status {response.status_code}: {response.text[:200]}"
        )
    try:
        return response.json()
    except ValueError:
        raise RewardError(f"{url} answered {response.text[:100]!r}, which is not JSON") from None


@lru_cache(maxsize=1)
def _client_of(loop: asyncio.AbstractEventLoop) -> Any:
    package = import_client()
    return package.AsyncClient(limits=package.Limits(max_connections=MAX_CONNECTIONS))


def _client() -> Any:
    return _client_of(asyncio.get_running_loop())
