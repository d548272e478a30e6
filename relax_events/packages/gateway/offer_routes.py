"""The routes of harnesses that a person starts: take a session, and finish it.

POST /sessions           TOKEN --> key, base_url, task; 204 if no episode waits
POST /sessions/finish    KEY   --> reward, or error
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from relax_events.api.http import read_identity
from relax_events.packages.gateway.disconnects import cancel_on_disconnect
from relax_events.packages.gateway.offers import SessionOffers
from relax_events.packages.gateway.session_keys import Harness, require_key

MAX_WAIT_SECONDS = 60.0
MAX_ERROR_CHARACTERS = 400


class TakeBody(BaseModel):
    """A harness's request for a session."""

    model_config = ConfigDict(extra="forbid")

    wait_seconds: Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS)] = 30.0
    """How long to wait for an episode."""


class FinishBody(BaseModel):
    """How an episode ended."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The harness's own reward, which the reward function `environment` returns."""
    error: Annotated[str, Field(max_length=10_000)] = ""
    """Why the harness failed; the episode is then begun again."""


NO_WISHES = TakeBody()


def add_offer_routes(app: FastAPI, offers: SessionOffers, *, model_name: str) -> None:
    """Add the routes.

    Args:
        app: The gateway's application.
        offers: The episodes.
        model_name: The name under which the policy is listed.
    """

    @app.post("/sessions")
    async def take_session(request: Request, body: TakeBody = NO_WISHES) -> Response:
        """Give a harness the oldest episode that waits."""
        if not isinstance(read_identity(request.scope).subject, Harness):
            raise HTTPException(401, "no token, or the wrong one; see environment.harness")
        offer = await cancel_on_disconnect(request, offers.take(seconds=body.wait_seconds))
        if offer is None:
            return Response(status_code=204)
        address = str(request.base_url).rstrip("/")
        return JSONResponse(
            {
                "key": offer.key,
                "base_url": f"{address}/v1",
                "anthropic_base_url": address,
                "model": model_name,
                "sample_id": offer.session.sample.sample_id,
                "task": offer.task,
                "start_seconds": offers.limits.start_seconds,
                "episode_seconds": offers.limits.episode_seconds,
                "idle_seconds": offers.limits.idle_seconds,
            }
        )

    @app.post("/sessions/finish")
    async def finish_session(request: Request, body: FinishBody) -> dict[str, Any]:
        """End an episode; a harness that lost the answer may ask again."""
        error = body.error[:MAX_ERROR_CHARACTERS]
        if not offers.finish(require_key(request), reward=body.reward, error=error):
            raise HTTPException(401, "no key, or none of a session that a harness has")
        return {"is_finished": True}
