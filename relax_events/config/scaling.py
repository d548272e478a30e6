"""The section `scaling`: workers that come and go while the run goes on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_events.config.base import Positive, Seconds, Section
from relax_events.config.external_values import FilePath, Listener

Ratio = Annotated[float, Field(ge=0, le=1)]


class AutoscalerConfig(Section):
    """When rollout workers are added and taken away by themselves, one request after the other,
    between `workers.rollout` and `scaling.max_workers`.

    They are added when any of the `out` conditions holds, unless the trainer has more samples at
    hand than it can use, and taken away when all of the `in` conditions do. Defaults are Relax's.
    """

    enabled: bool = False
    """Whether it does."""
    interval_seconds: Seconds = 10.0
    """Between two looks at the figures."""
    out_usage_ratio: Ratio = 0.85
    """Prompt groups that workers hold, of those that they have room for
    (`engine.max_prompt_groups`): above this is out."""
    out_usage_seconds: Seconds = 30.0
    """For so long."""
    out_queue_prompt_groups: Annotated[float, Field(ge=0)] = 10.0
    """Consumer lag of the prompt queue: prompt groups that nobody holds, for each worker; more than
    these is out."""
    out_queue_seconds: Seconds = 20.0
    """For so long."""
    out_wait_ratio: Ratio = 0.5
    """Share of a train step that the trainer waits for samples: above this, over
    `out_usage_seconds`, is out."""
    out_cooldown_seconds: Seconds = 60.0
    """After it has added some."""
    out_workers: Positive = 4
    """At most so many at a time."""
    trainer_bound_staleness_ratio: Ratio = 0.9
    """Mean staleness of a train step, of `run.max_staleness`: from this on, while the trainer waits
    for less than `trainer_bound_wait_ratio`, samples wait for the trainer, and nothing is out."""
    trainer_bound_wait_ratio: Ratio = 0.05
    """See there."""
    in_usage_ratio: Ratio = 0.3
    """As above: below this is in."""
    in_usage_seconds: Seconds = 120.0
    """For so long, with an empty queue."""
    in_projected_usage_ratio: Ratio = 0.5
    """Usage that the others would have: in only below this."""
    in_throughput_variance: Annotated[float, Field(ge=0)] = 0.1
    """Variance of the workers' prompt groups a second over that time, by the square of their mean:
    in only up to this."""
    in_cooldown_seconds: Seconds = 300.0
    """After it has changed anything."""
    in_workers: Positive = 1
    """At most so many at a time."""


class ScalingConfig(Section):
    """Workers that come and go while the run goes on, and the HTTP API by which they are asked for
    (extra `api`, ADR 16).
    """

    api: Literal["auto", "on", "off"] = "auto"
    """Whether the controller serves the API; `auto` does where the extra `api` is installed."""
    host: Listener = "127.0.0.1"
    """Address on which it does."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the same; 0 takes a free one, which `relax scale` finds in the run's folder."""
    token_file: FilePath | None = None
    """File that holds the token without which no call is answered; by default one is made in the
    run's folder, as `api-token`."""
    max_workers: Positive = 32
    """How many workers of a role may be asked for."""
    timeout_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long workers that were asked for may take until they serve, unless the request says
    otherwise; 0 stands for as long as a worker of the role may take to start
    (`health.start_seconds`), and its server to load the newest version."""
    on_partial_failure: Literal["rollback", "keep"] = "rollback"
    """What becomes of the other workers of a request when one of them does not come up: they go as
    well, or stay."""
    autoscaler: AutoscalerConfig = AutoscalerConfig()
    """When the number of rollout workers is changed by itself."""
