"""Send requests to a service over HTTP, with timeout, retries and a connection pool. Only this
module imports the HTTP client.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from relax_events.config.addresses import is_in_clear
from relax_events.errors import EnvironmentProblem, RewardError

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 8.0
RETRYABLE_STATUS_CODES = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_CONNECTIONS = 64
MAX_REPLY_BYTES = 4 * 1024**2
"""Of a reward or an LLM judge's reply: 100,000 tokens have about 1 MiB."""


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


def build_chat_url(url: str) -> str:
    """Return the address of chat completions of a server, whose address may end with `/v1`."""
    return f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"


async def post_json(
    url: str,
    body: dict[str, Any],
    *,
    seconds: float = 30.0,
    retries: int = 3,
    token_variable: str = "",
    pause_seconds: float = FIRST_PAUSE_SECONDS,
) -> Any:
    """Send a JSON document and return the JSON document of the reply.

    Connection errors, timeouts and the status codes of a busy or failing service are retried after
    a doubling pause; other errors are final. No error shows the token.

    Args:
        url: URL of the service.
        body: JSON document to send.
        seconds: Deadline of one attempt, up to the last byte of the reply.
        retries: Number of further attempts.
        token_variable: Name of the environment variable that holds the bearer token; empty sends
            none.
        pause_seconds: Pause before the second attempt.
    Raises:
        RewardError: The service did not respond with JSON, with its last error; its reply is
            compressed or too large; or as of `read_token`.
    """
    problem = ""
    headers = {"Accept-Encoding": "identity"}
    if token_variable:
        headers["Authorization"] = f"Bearer {read_token(token_variable, url=url)}"
    for attempt in range(retries + 1):
        if attempt:
            await asyncio.sleep(
                min(pause_seconds * 2 ** (attempt - 1), MAX_PAUSE_SECONDS)
                * random.uniform(0.5, 1.0)  # noqa: S311 spreads the load
            )
        try:
            async with asyncio.timeout(seconds):
                status, content = await _exchange(url, body, headers=headers)
        except TimeoutError:
            problem = f"no complete reply within {seconds:g} s"
            continue
        except import_client().LocalProtocolError:
            problem = "a request that HTTP does not allow"  # its text quotes headers: the token
            continue
        except import_client().TransportError as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if status not in RETRYABLE_STATUS_CODES:
            return _parse_response(url, status, content)
        problem = f"status {status}"
    raise RewardError(
        f"{url} failed {retries + 1} time(s), at last with {problem}; is the service up?"
    )


def read_token(variable: str, *, url: str) -> str:
    """Return the bearer token of an environment variable, without white space around it.

    Args:
        variable: Its name.
        url: Address that the token is for.
    Raises:
        RewardError: The token would leave this machine unencrypted; the variable is not set or
            empty; or no header can hold the token. The text names the variable, without its value.
    """
    if is_in_clear(url):
        raise RewardError(
            f"the token in {variable} would be sent unencrypted to {url}; take an "
            "https address, or leave token_variable out"
        )
    token = os.environ.get(variable, "").strip()
    if not token:
        raise RewardError(
            f"the environment variable {variable} is not set or empty; put the token into it"
        )
    if not (token.isascii() and token.isprintable()):
        raise RewardError(
            f"the token in {variable} has a control character, or one beyond ASCII; put the token "
            "alone into it"
        )
    return token


async def _exchange(
    url: str, body: dict[str, Any], *, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    """Send a request; return the status and the content as it came, read up to the bound. The
    caller has a deadline.

    Raises:
        RewardError: The content is compressed, or larger.
    """
    request = _client().stream("POST", url, json=body, headers=headers, timeout=None)
    async with request as response:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise RewardError(
                f"{url} answered in the encoding {encoding[:40]!r}, and a few bytes of it may "
                "unpack to any size; let the service send replies uncompressed, as it is asked to"
            )
        content = bytearray()
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > MAX_REPLY_BYTES:
                raise RewardError(
                    f"{url} answered with more than {MAX_REPLY_BYTES} bytes, which no reward or "
                    "judgement has; let the service send the reward alone"
                )
        return response.status_code, bytes(content)


async def close_client() -> None:
    """Close the connections of the running event loop, which ends."""
    client = _client()
    _open_client.cache_clear()
    await client.aclose()


def _parse_response(url: str, status: int, content: bytes) -> Any:
    text = content.decode(errors="replace")
    if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        raise RewardError(f"{url} refused with status {status}: {text[:200]}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RewardError(f"{url} answered {text[:100]!r}, which is not JSON") from None


@lru_cache(maxsize=1)
def _open_client(loop: asyncio.AbstractEventLoop) -> Any:
    package = import_client()
    return package.AsyncClient(limits=package.Limits(max_connections=MAX_CONNECTIONS))


def _client() -> Any:
    return _open_client(asyncio.get_running_loop())
