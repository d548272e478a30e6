"""What the page can change: the number of workers, and dead letters. Each call has a dry run, and
needs the token of the run's API.
"""

from __future__ import annotations

import hmac
from contextlib import closing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from relax_events.api.errors import AccessDenied
from relax_events.api.log import RecordProducer
from relax_events.api.runs import RunConfig
from relax_events.controller.api_client import ScaleClient
from relax_events.controller.api_server import ApiEndpointFile
from relax_events.ops import dead_letters
from relax_events.packages.dashboard.details import open_log

MAX_IDS = 1000


class Action(BaseModel):
    """A change; nothing is changed while `dry_run` is true."""

    model_config = ConfigDict(extra="forbid")

    dry_run: bool = True


class ScaleAction(Action):
    """Scale a role out or in, to a number of workers."""

    direction: Literal["out", "in"]
    role: Annotated[str, Field(max_length=64)] = "default"
    num_replicas: Annotated[int, Field(ge=0, le=10_000)]
    key: Annotated[str, Field(max_length=128, pattern=r"^[!-~]*$")] = ""


class DeadLetterAction(Action):
    """Requeue or drop dead letters."""

    verb: Literal["requeue", "drop"]
    ids: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MAX_IDS)]
    comment: Annotated[str, Field(max_length=500)] = ""


def require_token(config: RunConfig, authorization: str) -> str:
    """Return the given token once it is that of the run's API.

    Raises:
        AccessDenied: It is missing or wrong.
        ConfigError: The run serves no API on this machine, so there is no token.
    """
    token = ApiEndpointFile.from_config(config).read_token()
    presented = authorization.removeprefix("Bearer ")
    if not hmac.compare_digest(presented.encode("utf-8", "replace"), token.encode()):
        endpoint = ApiEndpointFile.from_config(config)
        raise AccessDenied(f"the token is missing or wrong; it is in {endpoint.token_file}")
    return token


def scale(config: RunConfig, action: ScaleAction, *, token: str) -> dict[str, Any]:
    """Ask the run's controller to scale, or what it would do.

    Raises:
        ConfigError: The controller rejects it.
        CheckFailed: The controller does not answer.
    """
    url = ApiEndpointFile.from_config(config).read_url()
    client = ScaleClient(url, token, config.http.ca_file)
    body = {
        "model_name": action.role,
        "num_replicas": action.num_replicas,
        "dry_run": action.dry_run,
    }
    return client.call("POST", f"scale_{action.direction}", body, key=action.key)


def resolve_dead_letters(config: RunConfig, action: DeadLetterAction) -> dict[str, Any]:
    """Requeue or drop dead letters, or say which ones would be.

    Raises:
        ConfigError: One is unknown, resolved already, or can't be requeued.
    """
    with open_log(config) as log:
        selection = dead_letters.Selection(tuple(action.ids))
        chosen = selection.choose(dead_letters.read_dead_letters(log))
        if action.verb == "requeue":
            for dead_letter in chosen:
                dead_letters.require_origin(dead_letter, log.plan)
        done = 0
        if not action.dry_run:
            with closing(RecordProducer(log.connection)) as producer:
                done = (
                    dead_letters.requeue(log, chosen, producer)
                    if action.verb == "requeue"
                    else dead_letters.drop(log, chosen, producer, reason=action.comment)
                )
        return {
            "dry_run": action.dry_run,
            "selected": [dead_letter.id for dead_letter in chosen],
            "num_resolved": done,
        }
