"""Rewards from a remote service over HTTP, by sample or by prompt group."""

from __future__ import annotations

from typing import Any

from relax_events.errors import RewardError
from relax_events.rewards.http_client import import_client, post_json
from relax_events.rewards.registry import reward


@reward(packages=("httpx2",), prepare=import_client)
async def remote(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    url: str,
    request_seconds: float = 30.0,
    retries: int = 3,
    token_variable: str = "",
) -> Any:
    """Return the response of a service to a POST of `prompt`, `response`, `label` and `metadata`: a
    number, or an object of components.

    Connection and service errors are retried `retries` times, with pauses. `token_variable` names
    the environment variable of a bearer token.

    Raises:
        RewardError: The service did not respond, or not with a reward.
    """
    body = {"prompt": prompt, "response": completion, "label": answer, "metadata": metadata}
    return _reward(
        url,
        await post_json(
            url, body, seconds=request_seconds, retries=retries, token_variable=token_variable
        ),
    )


@reward(packages=("httpx2",), prepare=import_client)
async def remote_group(
    completions: list[str],
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    url: str,
    request_seconds: float = 30.0,
    retries: int = 3,
    token_variable: str = "",
) -> list[Any]:
    """Return the response of a service to one POST for the whole prompt group, with `responses`: a
    list of numbers or of objects.

        An object with `error` fails only its sample. Otherwise as `remote`.

    Raises:
        RewardError: The service did not respond, or not with a list of that length.
    """
    body = {"prompt": prompt, "responses": completions, "label": answer, "metadata": metadata}
    reply = await post_json(
        url, body, seconds=request_seconds, retries=retries, token_variable=token_variable
    )
    if not isinstance(reply, list) or len(reply) != len(completions):
        raise RewardError(
            f"{url} must answer with a list of {len(completions)} rewards, got {reply!r:.100}"
        )
    return [_reward_or_error(url, one) for one in reply]


def _reward(url: str, reply: Any) -> Any:
    if isinstance(reply, dict) and "error" in reply:
        raise RewardError(f"{url} says: {reply['error']!s:.200}")
    if isinstance(reply, bool) or not isinstance(reply, int | float | dict):
        raise RewardError(
            f"{url} must answer with a number or an object of numbers, got {reply!r:.100}"
        )
    return reply


def _reward_or_error(url: str, reply: Any) -> Any:
    try:
        return _reward(url, reply)
    except RewardError as error:
        return error
