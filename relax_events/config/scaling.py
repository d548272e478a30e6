"""The section `scaling`: workers that come and go while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from relax_events.config.base import Positive, Seconds, Section


class ScalingConfig(Section):
    """Workers that come and go while the run goes on, and the HTTP API by which they are asked for (extra `api`, ADR 16)."""

    api: Literal["auto", "on", "off"] = "auto"
    """Whether the controller serves the API; `auto` does where the extra `api` is installed."""
    host: str = "127.0.0.1"
    """Address on which it does."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the same; 0 takes a free one, which `relax scale` finds in the run's folder."""
    token_file: Path | None = None
    """File that holds the token without which no call is answered; by default one is made in the run's folder, as `api-token`."""
    max_workers: Positive = 32
    """How many workers of a role may be asked for."""
    timeout_seconds: Seconds = 300.0
    """How long workers that were asked for may take until they serve, unless the request says otherwise."""
    on_partial: Literal["rollback", "keep"] = "rollback"
    """What becomes of the other workers of a request when one of them does not come up: they go as well, or stay."""
